"""Which draft length suits a running engine, from what was measured on it.

    MAT(k)  = 1 + Σ rate_i for i ≤ k        rate i: steps that accepted at least i draft tokens
    step(k) = step(0) + k · (step(K) - step(0)) / K
    tok/s   = MAT(k) / step(k)              of one request, at one concurrency

MAT(k) is what a chain of k would have brought in the same steps: exact where a shorter chain is
the beginning of the longer one. step(k) is a straight line through two measurements, without
drafts and with K: an approximation, since drafting and verifying have their own steps of cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.metrics import chain_mat, predicted_tok_s, speedup

LEVEL = 0.02
"""A gain below it is none."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Decoding at one concurrency.

    Attributes:
        plain_tok_s, drafting_tok_s: of one request, without and with drafts.
    """

    concurrency: int
    plain_tok_s: float
    drafting_tok_s: float


@dataclass(frozen=True, slots=True)
class Choice:
    """The draft length that is predicted fastest at a concurrency; 0 = do not draft."""

    concurrency: int
    draft_len: int
    tok_s: float
    plain_tok_s: float
    tok_s_by_len: tuple[float, ...]

    @property
    def speedup(self) -> float:
        return speedup(self.tok_s, self.plain_tok_s) or 0.0


def choose(measured: Measured, position_rates: Sequence[float]) -> Choice:
    """The best length up to the one that was measured (as many as there are rates)."""
    longest = len(position_rates)
    plain_s = 1 / measured.plain_tok_s
    longest_s = chain_mat(position_rates, longest) / measured.drafting_tok_s
    rates = [measured.plain_tok_s]
    for length in range(1, longest + 1):
        step_s = plain_s + length * (longest_s - plain_s) / longest
        rates.append(predicted_tok_s(chain_mat(position_rates, length), 1000 * step_s))
    best = max(range(longest + 1), key=lambda length: rates[length])
    if rates[best] < (1 + LEVEL) * measured.plain_tok_s:
        best = 0
    return Choice(measured.concurrency, best, rates[best], measured.plain_tok_s, tuple(rates))


def stops_paying(choices: Sequence[Choice]) -> int | None:
    """The lowest concurrency from which on no draft pays; None where some draft always does."""
    found = None
    for choice in sorted(choices, key=lambda one: one.concurrency, reverse=True):
        if choice.draft_len:
            break
        found = choice.concurrency
    return found


def schedule(choices: Sequence[Choice]) -> list[list[int]]:
    """vLLM's `num_speculative_tokens_per_batch_size`: [first, last, length], gaps closed."""
    ordered = sorted(choices, key=lambda one: one.concurrency)
    rows: list[list[int]] = []
    for at, choice in enumerate(ordered):
        first = rows[-1][1] + 1 if rows else 1
        is_last = at + 1 == len(ordered)
        last = choice.concurrency if is_last else ordered[at + 1].concurrency - 1
        if rows and rows[-1][2] == choice.draft_len:
            rows[-1][1] = max(last, first)
        else:
            rows.append([first, max(last, first), choice.draft_len])
    return rows
