"""A replay's figures side by side, with and without drafts, and what follows from them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine import formats
from engine.formats import DASH
from engine.metrics import speedup, step_ms_of
from playground.connect.advice import Choice, Measured, choose, schedule, stops_paying
from playground.connect.readings import Engine
from playground.connect.replay import Level, failures, same_texts
from playground.host.baseline import DOUBTS, Doubt, Evidence, doubt_of

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
    "failed": "requests without a whole answer",
}
"""Columns of the table, and how each is computed."""


@dataclass(frozen=True, slots=True)
class Report:
    """All levels of a replay; `plain` without drafts, empty where that could not be asked for."""

    engine: Engine
    drafting: tuple[Level, ...]
    plain: tuple[Level, ...] = ()

    @property
    def pairs(self) -> list[tuple[Level, Level | None]]:
        others = {level.concurrency: level for level in self.plain}
        return [(level, others.get(level.concurrency)) for level in self.drafting]

    @property
    def position_rates(self) -> tuple[float, ...]:
        """Of the first level, whose requests do not wait for each other."""
        counted = [level.counted for level in self.drafting if level.counted is not None]
        return counted[0].position_rates if counted else ()

    @property
    def choices(self) -> list[Choice]:
        """The predicted best draft length per concurrency; none without plain levels and rates."""
        rates = self.position_rates
        measured = [
            Measured(own.concurrency, plain.tok_s, own.tok_s)
            for own, plain in self.pairs
            if plain is not None and plain.tok_s and own.tok_s
        ]
        return [choose(one, rates) for one in measured] if rates else []

    def rows(self) -> list[list[str]]:
        """A row per level, as `COLUMNS`."""
        found = []
        for own, plain in self.pairs:
            if plain is not None:
                found.append(_row(plain, "plain", DASH, None))
            same = same_texts(own, plain) if plain else None
            found.append(_row(own, "drafting", formats.speedup(_speedup(own, plain)), same))
        return found

    def sentences(self) -> list[str]:
        """What the figures say, and which length to set."""
        said = [_verdict(own, plain) for own, plain in self.pairs if plain is not None]
        said += [f"The engine restarted at concurrency {lv.concurrency}: its counters are "
                 "cover only what came after." for lv in self.drafting if lv.restarted]  # fmt: skip
        said += self._advice()
        return [*filter(None, said), *failures([*self.plain, *self.drafting])]

    def _advice(self) -> list[str]:
        if not self.choices:
            return []
        first, stops = self.choices[0], stops_paying(self.choices)
        best = first.draft_len
        approximated = (
            "MAT(k) from the position rates, step(k) on a straight line between no draft and "
            f"{len(self.position_rates)} tokens: an approximation."
        )
        if not best:
            said = [f"No draft length is predicted to pay at concurrency {first.concurrency}."]
        else:
            said = [
                f"Predicted fastest at concurrency {first.concurrency}: {best} drafted tokens, "
                f"{formats.tok_s(first.tok_s)} tok/s, {formats.speedup(first.speedup)} plain "
                f"decoding ({self.engine.flag.format(k=best, k1=best + 1)})."
            ]
        if stops is not None and best:
            said.append(
                f"From concurrency {stops} on, drafting is predicted to cost more than it gains."
            )
        if self.engine.name == "vllm" and len(self.choices) > 1:
            table = json.dumps(schedule(self.choices))
            said.append(f'By batch size: "num_speculative_tokens_per_batch_size": {table}.')
        return [*said, approximated]

    def to_dict(self) -> dict[str, Any]:
        return {
            "engine": self.engine.name,
            "levels": [
                _figures(level, kind)
                for kind, levels in (("plain", self.plain), ("drafting", self.drafting))
                for level in levels
            ],
            "position_rates": list(self.position_rates),
            "choices": [
                {
                    "concurrency": c.concurrency,
                    "draft_len": c.draft_len,
                    "tok_s": c.tok_s,
                    "speedup": c.speedup,
                    "tok_s_by_len": list(c.tok_s_by_len),
                }
                for c in self.choices
            ],  # fmt: skip
            "sentences": self.sentences(),
        }


def _figures(level: Level, kind: str) -> dict[str, Any]:
    return {
        "kind": kind,
        "concurrency": level.concurrency,
        "tok_s": level.tok_s,
        "throughput": level.throughput,
        "ttft_p50_ms": level.ttft_ms(50),
        "ttft_p95_ms": level.ttft_ms(95),
        "tpot_ms": level.tpot_ms,
        "mat": level.mat,
        "num_answered": len(level.replies),
        "num_failed": level.num_failed,
    }


def _speedup(own: Level, plain: Level | None) -> float | None:
    if plain is None or _doubt(own, plain):
        return None
    return speedup(own.tok_s, plain.tok_s)


def _doubt(own: Level, plain: Level | None) -> Doubt | None:
    """Why the two rates are not divided."""
    own_step_ms = step_ms_of(own.mat, own.tok_s)
    plain_step_ms = step_ms_of(1.0, plain.tok_s) if plain else None
    return doubt_of(Evidence(_seconds(own_step_ms), _seconds(plain_step_ms)))


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000


def _verdict(own: Level, plain: Level | None) -> str:
    """Speedup = MAT / what a step costs in plain steps."""
    gain, where = _speedup(own, plain), f"Concurrency {own.concurrency}"
    if doubt := _doubt(own, plain):
        return f"{where}: no speedup is given: {DOUBTS[doubt]}"
    if gain is None or own.mat is None:
        return ""
    return (
        f"{where}: {formats.speedup(gain)} plain decoding: {formats.mat(own.mat)} tokens a step, "
        f"and a step takes {formats.figure(own.mat / gain, 2, '×')} as long as a plain step."
    )


def _row(level: Level, what: str, ratio: str, same: Sequence[int] | None) -> list[str]:
    return [
        f"concurrency {level.concurrency}, {what}",
        formats.tok_s(level.tok_s),
        formats.tok_s(level.throughput),
        formats.milliseconds(level.ttft_ms(50)),
        formats.milliseconds(level.ttft_ms(95)),
        formats.milliseconds(level.tpot_ms),
        formats.mat(level.mat),
        ratio,
        DASH if same is None else f"{same[0]} of {same[1]}",
        str(level.num_failed),
    ]
