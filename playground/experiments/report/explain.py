"""Why a configuration is faster or slower: its speedup as a formula with the measured numbers.

The formula is that of `Balance`, with MAT as the tokens of a step. The measured ratio of
tok/s differs from it by two further measured factors:

    measured = formula · kept / kept_plain · between_plain / between
    kept     share of tokens that remain after cuts by EOS, stop string or length
    between  (step + time until the next one) / step
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine import formats
from engine.metrics import EQUAL_MARGIN
from playground.experiments.statistics import Pair, Totals, totals_of
from playground.host.balance import Balance, hardly_drafts, missing_drafts, step_words
from playground.host.speedup import Speedup, doubt_of, speedup_of

AGREES = 0.005
COSTS = {"draft": "drafting", "verify": "verification", "other": "the rest"}


@dataclass(frozen=True, slots=True)
class Explanation:
    """The formula of a speedup with its numbers, and what follows from it, in sentences.

    Attributes:
        measured: tok/s over plain decoding's.
        formula: MAT · t_plain / (t_draft + t_verify + t_other).
        terms: the formula with its numbers.
        because: why it is faster or slower.
        differs: why the formula differs from the measured ratio.
    """

    measured: float
    formula: float
    terms: str
    because: str
    differs: str


def explain(pairs: Sequence[Pair]) -> Explanation | None:
    """Explain the speedup over the requests that both decoded; None where there is none."""
    both = [(own, plain) for own, plain in pairs if own.decode_s > 0 and plain.decode_s > 0]
    fast = speedup_of(both)
    own, plain = totals_of(both)
    if fast is None or fast.ratio is None:
        return None
    balance = balance_of(own, plain)
    if balance is None or doubt_of(own.step_s, plain.step_s):
        return None
    assert own.time_split is not None and plain.time_split is not None
    draft, verify, other = (1000 * part for part in own.time_split.parts)
    plain_ms = 1000 * sum(plain.time_split.parts)
    terms = (
        f"MAT · t_plain / (t_draft + t_verify + t_other) = {formats.mat(balance.mat)} · "
        f"{_ms(plain_ms)} ms / ({_ms(draft)} + {_ms(verify)} + {_ms(other)} ms) = "
        f"{formats.speedup(balance.formula)}"
    )
    missing = missing_drafts(own.num_accepted, own.num_drafted)
    because = _because(balance, fast.ratio, _doubt(fast), missing)
    differs = _differs(own, plain, fast.ratio, balance.formula)
    return Explanation(fast.ratio, balance.formula, terms, because, differs)


def _doubt(speedup: Speedup) -> str:
    """A remark where the difference may be noise; empty for a single measurement."""
    if speedup.num_prompts == speedup.num_repeats == 1:
        return ""
    if speedup.low is None:
        return f", with {speedup.interval}"
    return "" if speedup.faster or speedup.slower else ", within the noise"


def balance_of(own: Totals, plain: Totals) -> Balance | None:
    """A step of `own` compared with one of `plain`; None where either has no step."""
    if own.mat is None or not own.step_s or not plain.step_s:
        return None
    assert own.time_split is not None and plain.time_split is not None
    return Balance.of(own.mat, own.time_split.parts, plain.time_split.parts)


def _ms(ms: float) -> str:
    return f"{ms:.2f}" if ms < 10 else f"{ms:.1f}"


def _because(balance: Balance, measured: float, noise: str, missing: str) -> str:
    listed = ", ".join(f"{value:+.2f} {COSTS[part]}" for part, value in balance.paid.items())
    account = f"{step_words(balance.mat, 1 + balance.total)} (1 {listed})."
    if hardly_drafts(balance.mat):
        return f"{missing}: {account}"
    side = f"Faster{noise}" if measured > 1 + EQUAL_MARGIN else f"Slower{noise}"
    if abs(measured - 1) <= EQUAL_MARGIN:
        side = "As fast as plain decoding"
    if balance.paid[balance.largest] <= 0:
        return f"{side}: {account}"
    without = f"without it the speedup would be {formats.speedup(balance.without_largest)}."
    if measured < 1 - EQUAL_MARGIN and balance.without_largest <= 1:
        without = (
            "even without it, too little is accepted. At these costs, breaking even takes a MAT of "
            f"{1 + balance.total:.2f}."
        )
    return f"{side}: {account} The largest extra cost is {COSTS[balance.largest]}; {without}"


def _differs(own: Totals, plain: Totals, measured: float, formula: float) -> str:
    prefill = "Neither figure includes prefill."
    if abs(measured / formula - 1) < AGREES:
        return f"Measured: {formats.speedup(measured)}, as the formula says. {prefill}"
    factors = {
        "tokens cut off at the end of the text": _kept(own) / _kept(plain) - 1,
        "time between steps": _stretch(plain) / _stretch(own) - 1,
    }
    causes = [
        f"{cause} ({100 * by:+.1f}%)" for cause, by in factors.items() if abs(by) >= AGREES / 2
    ]
    why = " and ".join(causes) or "rounding of the clocks"
    return f"Measured: {formats.speedup(measured)}; the difference is {why}. {prefill}"


def _kept(totals: Totals) -> float:
    """Share of the tokens of all steps that remain after cuts by EOS, stop or length."""
    return totals.num_committed / (totals.num_steps + totals.num_accepted)


def _stretch(totals: Totals) -> float:
    """Time from one step to the next over the duration of a step."""
    return max(1.0, totals.decode_s / sum(totals.split_s))
