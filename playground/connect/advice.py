"""The best draft length of a running engine, from measurements with and without drafts.

    MAT(k)  = 1 + Σ rate_i for i ≤ k        rate i: steps that accepted at least i draft tokens
    step(k) = step(0) + k · (step(K) - step(0)) / K
    tok/s   = MAT(k) / step(k)              of one request, at one concurrency

MAT(k) is the MAT of chains of k in the same steps: exact if a shorter chain is the beginning of the
longer one. step(k) is a straight line through two measurements, without drafts and with K: an
approximation, since the cost of drafting and verifying grows unevenly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.metrics import chain_mat, predicted_tok_s, speedup

MIN_GAIN = 0.02
"""Smaller predicted gains count as none."""


@dataclass(frozen=True, slots=True)
class LengthAdvice:
    """The draft length predicted to be fastest at a concurrency; 0 = do not draft."""

    concurrency: int
    draft_len: int
    tok_s: float
    plain_tok_s: float
    tok_s_by_len: tuple[float, ...]

    @property
    def speedup(self) -> float:
        return speedup(self.tok_s, self.plain_tok_s) or 0.0


def best_length(
    concurrency: int, plain_tok_s: float, drafting_tok_s: float, position_rates: Sequence[float]
) -> LengthAdvice:
    """The best length up to the measured one, which is the number of rates.

    Args:
        plain_tok_s, drafting_tok_s: decoding speed of one request, without and with drafts.
    """
    longest = len(position_rates)
    plain_s = 1 / plain_tok_s
    longest_s = chain_mat(position_rates, longest) / drafting_tok_s
    speeds = [plain_tok_s]
    for length in range(1, longest + 1):
        step_s = plain_s + length * (longest_s - plain_s) / longest
        speeds.append(predicted_tok_s(chain_mat(position_rates, length), 1000 * step_s))
    best = max(range(longest + 1), key=speeds.__getitem__)
    if speeds[best] < (1 + MIN_GAIN) * plain_tok_s:
        best = 0
    return LengthAdvice(concurrency, best, speeds[best], plain_tok_s, tuple(speeds))


def break_even_concurrency(advice: Sequence[LengthAdvice]) -> int | None:
    """The lowest concurrency from which on no draft length pays off; None if one always does."""
    lowest = None
    for one in sorted(advice, key=lambda one: one.concurrency, reverse=True):
        if one.draft_len:
            break
        lowest = one.concurrency
    return lowest


def batch_schedule(advice: Sequence[LengthAdvice]) -> list[list[int]]:
    """vLLM's `num_speculative_tokens_per_batch_size`: rows of [first, last, length], no gaps."""
    ordered = sorted(advice, key=lambda one: one.concurrency)
    rows: list[list[int]] = []
    for index, one in enumerate(ordered):
        first = rows[-1][1] + 1 if rows else 1
        is_last = index + 1 == len(ordered)
        last = one.concurrency if is_last else ordered[index + 1].concurrency - 1
        if rows and rows[-1][2] == one.draft_len:
            rows[-1][1] = max(last, first)
        else:
            rows.append([first, max(last, first), one.draft_len])
    return rows
