"""Why a configuration is faster or slower: its speedup as a formula with the measured numbers.

The formula is `engine.metrics`'s, with MAT as the tokens of a step. The measured ratio of tok/s
differs from it by two factors, which are known as well:

    measured = formula · kept / kept_plain · between_plain / between
    kept     share of tokens that no cut by EOS, stop string or length took away
    between  (step + time until the next one) / step
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine import formats
from engine.metrics import SAME, Balance, hardly_drafts
from playground.experiments.finished import Pair
from playground.experiments.report.statistics import Speedup, Totals, speedup_of
from playground.host.baseline import Evidence, doubt_of

AGREES = 0.005
COSTS = {
    "draft": "drafting",
    "verify": "verifying more than one row",
    "other": "accepting and everything else",
}


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


def explain(pairs: Sequence[Pair]) -> Explanation | None:
    """Over the requests that both sides decoded; None where no speedup can be given."""
    both = [(own, plain) for own, plain in pairs if own.decode_s > 0 and plain.decode_s > 0]
    fast = speedup_of(both)
    own, plain = Totals.of([own for own, _ in both]), Totals.of([plain for _, plain in both])
    if fast is None or fast.ratio is None:
        return None
    balance = balance_of(own, plain)
    if balance is None or own.time_split is None or plain.time_split is None:
        return None
    if doubt_of(Evidence(own.step_s, plain.step_s)):
        return None
    draft, verify, other = (1000 * part for part in own.time_split.parts)
    plain_ms = 1000 * sum(plain.time_split.parts)
    terms = (
        f"MAT · t_plain / (t_draft + t_verify + t_other) = {formats.mat(balance.mat)} · "
        f"{_ms(plain_ms)} ms / ({_ms(draft)} + {_ms(verify)} + {_ms(other)} ms) = "
        f"{formats.speedup(balance.formula)}"
    )
    differs = _differs(own, plain, fast.ratio, balance.formula)
    because = _because(balance, fast.ratio, _doubt(fast))
    return Explanation(fast.ratio, balance.formula, terms, because, differs)


def _doubt(speedup: Speedup) -> str:
    """Whether the scatter could make the difference; a single measurement shows none."""
    if speedup.num_prompts == speedup.num_repeats == 1:
        return ""
    if speedup.low is None:
        return f", with {speedup.interval}"
    return "" if speedup.faster or speedup.slower else ", within the noise"


def balance_of(own: Totals, plain: Totals) -> Balance | None:
    """What a step of `own` saves and pays against one of `plain`; None where one took no step."""
    if own.mat is None or not own.step_s or not plain.step_s:
        return None
    assert own.time_split is not None and plain.time_split is not None
    return Balance.of(own.mat, own.time_split.parts, plain.time_split.parts)


def _ms(ms: float) -> str:
    return f"{ms:.2f}" if ms < 10 else f"{ms:.1f}"


def _because(balance: Balance, measured: float, noise: str) -> str:
    largest = COSTS[balance.largest]
    names = {"draft": "drafting", "verify": "verification", "other": "the rest"}
    listed = ", ".join(f"{value:+.2f} {names[part]}" for part, value in balance.paid.items())
    account = (
        f"{balance.mat:.2f} tokens a step, and a step takes {1 + balance.total:.2f}× as long as a "
        f"plain step (1 {listed})"
    )
    without = f"without it the speedup would be {formats.speedup(balance.without_largest)}."
    if hardly_drafts(balance.mat):
        end = "It costs little but gains nothing." if measured > 1 - SAME else "That is a loss."
        return f"Hardly any draft is accepted: {account}. {end}"
    if measured > 1 + SAME:
        small = balance.paid[balance.largest] <= 0
        return f"Faster{noise}: {account}." + (
            "" if small else f" The largest extra cost is {largest}; {without}"
        )
    if measured >= 1 - SAME:
        return f"As fast as plain decoding: {account}. The largest extra cost is {largest}."
    if balance.without_largest <= 1:
        without = (
            "even without it, too little is accepted. At these costs, breaking even takes a MAT of "
            f"{1 + balance.total:.2f}."
        )
    return f"Slower{noise}: {account}. The largest extra cost is {largest}; {without}"


def _differs(own: Totals, plain: Totals, measured: float, formula: float) -> str:
    prefill = "Neither figure includes prefill."
    if abs(measured / formula - 1) < AGREES:
        return f"Measured: {formats.speedup(measured)}, as the formula says. {prefill}"
    kept = _kept(own) / _kept(plain) - 1
    between = _stretch(plain) / _stretch(own) - 1
    causes = []
    if abs(kept) >= AGREES / 2:
        causes.append(f"tokens cut off at the end of the text ({100 * kept:+.1f}%)")
    if abs(between) >= AGREES / 2:
        causes.append(f"time between steps ({100 * between:+.1f}%)")
    why = " and ".join(causes) or "rounding of the clocks"
    return f"Measured: {formats.speedup(measured)}; the difference is {why}. {prefill}"


def _kept(pool: Totals) -> float:
    """Share of the tokens of all steps that was left after cuts by EOS, stop or length."""
    return pool.num_committed / (pool.num_steps + pool.num_accepted)


def _stretch(pool: Totals) -> float:
    """Time from step to step over the step's own."""
    return max(1.0, pool.decode_s / sum(pool.split_s))
