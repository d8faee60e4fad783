"""What a report needs to know of one finished request, read from its run in the log."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Self

from playground.experiments.bench.plan import Key
from storage import RunDetail, RunLog, RunQuery, RunSummary

PAGE = 500
SPLIT = ("draft_s", "verify_s", "accept_s", "other_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A finished request. Seconds; counts of accepted tokens are before any cut.

    Attributes:
        decode_s: first commit → last commit; 0 where the first token was the only one.
        at_least: steps that accepted at least 1, 2, … draft tokens.
        split_s: seconds in draft, verify, accept and other, over all steps.
        itl_s: mean over steps of step latency / tokens it committed.
    """

    run_id: str
    suite: str
    category: str
    group: str
    prompt: str
    turn: int
    repeat: int
    configuration: str
    num_prompt_tokens: int
    num_new_tokens: int
    num_steps: int
    num_drafted: int
    num_accepted: int
    ttft_s: float
    decode_s: float
    itl_s: float | None
    at_least: tuple[int, ...]
    split_s: tuple[float, ...]
    output_ids: tuple[int, ...]
    text: str
    finish_reason: str | None

    @property
    def key(self) -> Key:
        return self.suite, self.prompt, self.turn, self.repeat, self.configuration

    @property
    def pair(self) -> tuple[str, str, int, int]:
        """What the same request to another configuration shares with it."""
        return self.suite, self.prompt, self.turn, self.repeat

    @property
    def latency_s(self) -> float:
        """Request in the engine → last commit."""
        return self.ttft_s + self.decode_s

    @property
    def tok_s(self) -> float | None:
        """Decoding without prefill; None where nothing was decoded after the first token."""
        return (self.num_new_tokens - 1) / self.decode_s if self.decode_s > 0 else None

    @property
    def mat(self) -> float | None:
        return 1 + self.num_accepted / self.num_steps if self.num_steps else None

    @property
    def step_s(self) -> float | None:
        """Mean seconds per step."""
        return sum(self.split_s) / self.num_steps if self.num_steps else None

    @property
    def context_len(self) -> float:
        """Mean length of the context while decoding."""
        return self.num_prompt_tokens + self.num_new_tokens / 2

    @classmethod
    def of(cls, run: RunDetail) -> Self:
        """From a completed run of a benchmark."""
        metrics = run.metrics
        steps = int(metrics["num_steps"])
        tok_s, itl_ms = metrics["tok_s"], metrics["itl_ms"]
        split = metrics["time_split"] or dict.fromkeys(SPLIT, 0.0)
        labels = run.labels
        return cls(
            run_id=run.id,
            suite=labels["suite"],
            category=labels["category"],
            group=labels["group"],
            prompt=labels["prompt"],
            turn=int(labels["turn"]),
            repeat=int(labels["repeat"]),
            configuration=labels["configuration"],
            num_prompt_tokens=metrics["num_prompt_tokens"],
            num_new_tokens=metrics["num_new_tokens"],
            num_steps=steps,
            num_drafted=metrics["num_drafted"],
            num_accepted=metrics["num_accepted"],
            ttft_s=metrics["ttft_s"],
            decode_s=(metrics["num_new_tokens"] - 1) / tok_s if tok_s else 0.0,
            itl_s=itl_ms / 1000 if itl_ms is not None else None,
            at_least=tuple(round(rate * steps) for rate in metrics["position_rates"]),
            split_s=tuple(steps * split[part] for part in SPLIT),
            output_ids=run.output_ids,
            text=run.text,
            finish_reason=run.finish_reason,
        )


def summaries(log: RunLog, benchmark_id: str) -> Iterator[RunSummary]:
    """Every run of a benchmark, oldest first."""
    offset = 0
    while True:
        query = RunQuery(benchmark_id=benchmark_id, descending=False, limit=PAGE, offset=offset)
        page = log.find(query)
        yield from page.rows
        offset += PAGE
        if offset >= page.total:
            return


def measured_runs(log: RunLog, benchmark_id: str, known: Iterable[Measured] = ()) -> list[Measured]:
    """Every completed request of a benchmark, each once (the newest run of it).

    Args:
        known: read before, and not read again.
    """
    read = {measured.run_id: measured for measured in known}
    found: dict[Key, Measured] = {}
    for run in summaries(log, benchmark_id):
        if run.status == "completed" and "configuration" in run.labels:
            measured = read.get(run.id)
            if measured is None and (detail := log.get(run.id)) is not None:
                measured = Measured.of(detail)
            if measured is not None:
                found[measured.key] = measured
    return list(found.values())
