"""The figures of a measured engine with and without drafting, and the best draft length.

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
from itertools import pairwise

from engine import formats
from engine.figures import FIGURES
from engine.formats import DASH, figure
from engine.metrics import (
    chain_mat,
    mean_or_none,
    percentile,
    predicted_tok_s,
    ratio,
    step_ms_of,
    tpot_ms,
)
from playground.connect.readings import Engine, Reading
from playground.connect.replay import Level, count_equal_texts
from playground.host.balance import step_words
from playground.host.speedup import DOUBTS, Doubt, doubt_of

MIN_GAIN = 0.02
"""Smaller predicted gains count as none."""
COLUMNS = {
    "": "requests under way at the same time, and whether the engine drafts",
    "tok/s each": "(new tokens - 1) / (last piece - first piece), pooled over requests",
    "total tok/s": "new tokens of all requests / time from the first request to the last answer",
    "TTFT p50 ms": "request sent → first piece of text, median",
    "TTFT p95 ms": "request sent → first piece of text, 95th percentile",
    "TPOT ms": "time per output token: mean over requests of (latency - TTFT) / (new tokens - 1)",
    "MAT": "1 + accepted draft tokens / steps, from the engine's counters",
    "speedup": "tok/s per request, over that without drafts at the same concurrency",
    "same texts": "answers identical, character for character, to those without drafts",
    "failed": "requests without a complete answer",
}
"""Columns of the table, and how each is computed."""


def reading_figures(reading: Reading, seconds: float | None) -> list[tuple[str, str, str]]:
    """Title, text and explanation of each figure of the counters over `seconds`."""
    rates = ", ".join(map(formats.percent, reading.position_rates[:16]))
    tok_s = formats.tok_s(ratio(reading.generated, seconds))

    def known(name: str, text: str) -> tuple[str, str, str]:
        return FIGURES[name].title, text, FIGURES[name].formula

    own = (
        ("drafter's steps", reading.mean_num_steps, 1, "steps that the drafter takes now"),
        ("draft tokens", reading.mean_draft_tokens, 1, "verified at once now, the root counted"),
        ("verified window", reading.mean_window, 2, "tokens of a block that are verified, mean"),
        ("MAT of blocks", reading.mean_block_mat, 2, "MAT if whole blocks were verified"),
    )
    return [
        known("throughput", f"{tok_s} tok/s"),
        known("mat", formats.mat(reading.mat)),
        known("draft_acceptance", formats.percent(reading.draft_acceptance)),
        ("running", figure(reading.running, 0), "requests that the engine is answering"),
        ("waiting", figure(reading.waiting, 0), "requests in the engine's queue"),
        known("position_rates", rates or DASH),
        *((title, figure(value, digits), why) for title, value, digits, why in own if value),
    ]


@dataclass(frozen=True, slots=True)
class Report:
    """All measured levels; `plain` is empty if drafting could not be switched off."""

    engine: Engine
    drafting: tuple[Level, ...]
    plain: tuple[Level, ...] = ()

    @property
    def pairs(self) -> list[tuple[Level, Level | None]]:
        """Each level with drafts, and the one without at the same concurrency."""
        plain = {level.concurrency: level for level in self.plain}
        return [(level, plain.get(level.concurrency)) for level in self.drafting]

    @property
    def counters(self) -> Reading:
        """The counters of the first level, at which requests do not wait for each other."""
        return next((lv.counters for lv in self.drafting if lv.counters is not None), Reading())

    @property
    def position_rates(self) -> tuple[float, ...]:
        """From the counters, else assuming equal acceptance at every position."""
        counters = self.counters
        return counters.position_rates or equal_rates(counters.mat, counters.draft_len)

    @property
    def advice(self) -> list[LengthAdvice]:
        """The predicted best length per concurrency; empty without plain levels and rates."""
        rates = self.position_rates
        return [
            best_length(level.concurrency, plain.tok_s, level.tok_s, rates)
            for level, plain in self.pairs
            if rates and plain is not None and plain.tok_s and level.tok_s
        ]

    def rows(self) -> list[list[str]]:
        """A row per level, as `COLUMNS`."""
        rows = []
        for level, plain in self.pairs:
            if plain is not None:
                rows.append(_row(plain, "plain", DASH, DASH))
            equal = "{} of {}".format(*count_equal_texts(level, plain)) if plain else DASH
            gain = formats.speedup(_speedup(level, plain))
            rows.append(_row(level, "drafting", gain, equal))
        return rows

    def sentences(self) -> list[str]:
        """A verdict per level, the advised draft length, and every error."""
        verdicts = [_verdict(level, plain) for level, plain in self.pairs if plain is not None]
        restarts = [
            f"The engine restarted at concurrency {level.concurrency}: "
            "its counters cover only what came after."
            for level in self.drafting
            if level.restarted
        ]
        outcomes = [one for level in (*self.plain, *self.drafting) for one in level.outcomes]
        errors = dict.fromkeys(one.error for one in outcomes if one.error)
        return [*filter(None, verdicts), *restarts, *self._advice_sentences(), *errors]

    def _advice_sentences(self) -> list[str]:
        if not (advice := self.advice):
            return []
        first, schedule = advice[0], batch_schedule(advice)
        where, length = f"concurrency {first.concurrency}", first.draft_len
        sentences = [f"Drafting is not predicted to pay off at {where}."]
        if length:
            sentences = [
                f"Predicted fastest at {where}: {length} drafted tokens, "
                f"{formats.tok_s(first.tok_s)} tok/s, {formats.speedup(first.speedup)} plain "
                f"decoding ({self.engine.flag.format(k=length, k1=length + 1)})."
            ]
            least, _, last_length = schedule[-1]
            if not last_length:
                sentences.append(
                    f"From concurrency {least} on, drafting is predicted not to pay off."
                )
            if self.engine.schedule is not None and len(advice) > 1:
                sentences.append(f"By batch size: {self.engine.schedule(schedule)}.")
        rates = "the position rates" if self.counters.position_rates else "rates assumed equal"
        sentences.append(
            f"The prediction is approximate: MAT(k) from {rates}; step(k) on a straight line "
            f"between no draft and {len(self.position_rates)} tokens."
        )
        return sentences


def _speedup(level: Level, plain: Level | None) -> float | None:
    if plain is None or _doubt(level, plain):
        return None
    return ratio(level.tok_s, plain.tok_s)


def _doubt(level: Level, plain: Level) -> Doubt | None:
    """Why no speedup can be given, if so."""
    return doubt_of(step_ms_of(level.mat, level.tok_s), step_ms_of(1.0, plain.tok_s))


def _verdict(level: Level, plain: Level) -> str:
    """Speedup = MAT / (time of a step / time of a plain step)."""
    gain, where = ratio(level.tok_s, plain.tok_s), f"Concurrency {level.concurrency}"
    if doubt := _doubt(level, plain):
        return f"{where}: no speedup is given: {DOUBTS[doubt]}"
    if gain is None or level.mat is None:
        return ""
    return (
        f"{where}: {formats.speedup(gain)} plain decoding: "
        f"{step_words(level.mat, level.mat / gain)}."
    )


def _row(level: Level, kind: str, gain: str, equal_texts: str) -> list[str]:
    replies = level.replies
    ttfts_ms = [1000 * reply.ttft_s for reply in replies]
    tpots_ms = [tpot_ms(reply.num_new_tokens, reply.decode_s) for reply in replies]
    total = ratio(sum(reply.num_new_tokens for reply in replies), level.seconds) or 0.0
    return [
        f"concurrency {level.concurrency}, {kind}",
        *map(formats.tok_s, (level.tok_s, total)),
        *(formats.milliseconds(percentile(ttfts_ms, q) if replies else None) for q in (50, 95)),
        formats.milliseconds(mean_or_none([ms for ms in tpots_ms if ms is not None])),
        formats.mat(level.mat),
        *(gain, equal_texts, str(level.num_failed)),
    ]


# ---- the best draft length


@dataclass(frozen=True, slots=True)
class LengthAdvice:
    """The draft length predicted to be fastest at a concurrency; 0 = do not draft."""

    concurrency: int
    draft_len: int
    tok_s: float
    plain_tok_s: float

    @property
    def speedup(self) -> float:
        return ratio(self.tok_s, self.plain_tok_s) or 0.0


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
    return LengthAdvice(concurrency, best, speeds[best], plain_tok_s)


def equal_rates(mean: float | None, draft_len: int) -> tuple[float, ...]:
    """Position rates p, p², … of the chain that has this MAT; empty if one is not known."""
    low, high = 0.0, 1.0
    rates: tuple[float, ...] = ()
    for _ in range(40 if mean is not None and draft_len else 0):
        middle = (low + high) / 2
        rates = tuple(middle**i for i in range(1, draft_len + 1))
        low, high = (middle, high) if chain_mat(rates, draft_len) < (mean or 0) else (low, middle)
    return rates


def batch_schedule(advice: Sequence[LengthAdvice]) -> list[list[int]]:
    """The draft length by batch size: rows of [first, last, length], without gaps."""
    ordered = sorted(advice, key=lambda one: one.concurrency)
    changes = [new for old, new in pairwise(ordered) if new.draft_len != old.draft_len]
    firsts = [1, *(one.concurrency for one in changes)]
    lasts = [*(first - 1 for first in firsts[1:]), ordered[-1].concurrency]
    lengths = [one.draft_len for one in (ordered[0], *changes)]
    return [list(row) for row in zip(firsts, lasts, lengths, strict=True)]
