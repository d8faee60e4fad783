"""Why a configuration is faster or slower: its speedup as a formula with the measured numbers.

    speedup = MAT · t_plain / (t_draft + t_verify + t_other)

In units of a plain step, a step saves MAT - 1 of them and pays for drafting, for verifying more
rows than one and for everything else; it is faster where it saves more than it pays. The measured
ratio of tok/s differs from the formula by two factors, which are known as well:

    measured = formula · kept / kept_plain · between_plain / between
    kept     share of tokens that no cut by EOS, stop string or length took away
    between  (step + time until the next one) / step
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from playground.experiments.compare.figures import Pooled

SAME = 0.02
"""A speedup this close to 1 is neither faster nor slower."""
AGREES = 0.005
HARDLY = 1.05
"""A MAT below it: hardly any draft is accepted."""
COST_WORDS = {
    "draft": "drafting",
    "verify": "verifying more rows than one",
    "other": "accepting and everything else",
}


@dataclass(frozen=True, slots=True)
class Balance:
    """What one step saves and pays, in units of a plain step.

    Attributes:
        saved: MAT - 1, the plain steps it stands for beyond the one that it replaces.
        paid: what it costs beyond a plain step, by part; negative where it costs less.
    """

    mat: float
    saved: float
    paid: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.paid.values())

    @property
    def largest(self) -> str:
        return max(self.paid, key=lambda part: self.paid[part])

    @property
    def formula(self) -> float:
        return self.mat / (1 + self.total)

    @property
    def without_largest(self) -> float:
        """The speedup if the largest cost were nothing."""
        return self.mat / (1 + self.total - max(0.0, self.paid[self.largest]))


@dataclass(frozen=True, slots=True)
class Explanation:
    """Sentences with the numbers in them.

    Attributes:
        measured: tok/s over plain decoding's.
        formula: MAT · t_plain / (t_draft + t_verify + t_other).
        terms: the formula with its numbers.
        because: what made it faster or slower.
        differs: why the formula's product is not the measured ratio.
    """

    measured: float
    formula: float
    terms: str
    because: str
    differs: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def explain(own: Pooled, plain: Pooled) -> Explanation:
    """The explanation of `own.tok_s / plain.tok_s`; both over the same prompts and repeats."""
    balance = balance_of(own, plain)
    measured = own.tok_s / plain.tok_s
    return Explanation(
        measured,
        balance.formula,
        _terms(own, plain, balance.formula),
        _because(balance, measured),
        _differs(own, plain, measured, balance.formula),
    )


def balance_of(own: Pooled, plain: Pooled) -> Balance:
    """What a step of `own` saves and pays against one of `plain`."""
    ours, theirs, unit = own.cost, plain.cost, plain.cost.step_s
    paid = {
        "draft": ours.draft_s - theirs.draft_s,
        "verify": ours.verify_s - theirs.verify_s,
        "other": ours.accept_s + ours.other_s - theirs.accept_s - theirs.other_s,
    }
    return Balance(own.mat, own.mat - 1, {part: s / unit for part, s in paid.items()})


def _terms(own: Pooled, plain: Pooled, formula: float) -> str:
    cost = own.cost
    parts = (cost.draft_s, cost.verify_s, cost.accept_s + cost.other_s)
    sum_of = " + ".join(_ms(part) for part in parts)
    return (
        f"MAT · t_plain / (t_draft + t_verify + t_other) = {own.mat:.2f} · "
        f"{_ms(plain.cost.step_s)} ms / ({sum_of} ms) = {formula:.2f}"
    )


def _ms(seconds: float) -> str:
    ms = 1000 * seconds
    return f"{ms:.2f}" if ms < 10 else f"{ms:.1f}"


def _because(balance: Balance, measured: float) -> str:
    largest = COST_WORDS[balance.largest]
    account = (
        f"a step saves {balance.saved:.2f} plain steps (MAT {balance.mat:.2f}) and pays "
        f"{balance.total:.2f} ({_listed(balance.paid)})"
    )
    if balance.mat < HARDLY:
        return f"Hardly any draft is accepted: {account}. " + (
            "It costs little, and gains nothing." if measured > 1 - SAME else "That is a loss."
        )
    if measured > 1 + SAME:
        rest = f"; without it the speedup would be {balance.without_largest:.2f}."
        small = balance.paid[balance.largest] <= 0
        return f"Faster: {account}." + ("" if small else f" Most goes into {largest}{rest}")
    if measured >= 1 - SAME:
        return f"As fast as plain decoding: {account}. Most goes into {largest}."
    rest = f"without it the speedup would be {balance.without_largest:.2f}."
    if balance.without_largest <= 1:
        needed = 1 + balance.total
        rest = f"even without it too little is accepted. At these costs MAT must be {needed:.2f}."
    return f"Slower: {account}. Most goes into {largest}; {rest}"


def _listed(paid: dict[str, float]) -> str:
    names = {"draft": "draft", "verify": "wider verify", "other": "accept and other"}
    return ", ".join(f"{names[part]} {value:+.2f}" for part, value in paid.items())


def _differs(own: Pooled, plain: Pooled, measured: float, formula: float) -> str:
    prefill = "Prefill is in neither figure."
    if abs(measured / formula - 1) < AGREES:
        return f"Measured: {measured:.2f}, as the formula says. {prefill}"
    kept = own.kept / plain.kept - 1
    between = _stretch(plain) / _stretch(own) - 1
    causes = []
    if abs(kept) >= AGREES / 2:
        causes.append(f"tokens cut off at the end of the text ({100 * kept:+.1f} %)")
    if abs(between) >= AGREES / 2:
        causes.append(f"time between steps ({100 * between:+.1f} %)")
    words = " and ".join(causes) or "rounding of the clocks"
    return f"Measured: {measured:.2f}; the difference is {words}. {prefill}"


def _stretch(pooled: Pooled) -> float:
    """Time from step to step over the step's own."""
    return 1 + pooled.cost.between_s / pooled.cost.step_s
