"""A benchmark on a cluster: its prompts in shards, each measured by one worker.

Every worker runs the loop of a benchmark in one process, plain decoding in turn with the methods,
and writes to the same log; a shard whose worker dies is gone on with by another.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from playground.experiments.cluster import Workers
from playground.experiments.job import Progress
from playground.experiments.measurement import Measurement, Summary
from playground.experiments.plan import ExperimentPlan
from playground.experiments.worker import TaskContext

SHARDS_EACH = 2
"""Shards per worker: fewer warm-ups with one, a shorter wait for the slowest with many."""


def measure_shards(
    workers: Workers,
    plan: ExperimentPlan,
    benchmark_id: str,
    *,
    tell: Callable[[Progress], None],
    cancelled: Callable[[], bool],
) -> Summary:
    """Measure on all workers what the log lacks of a plan; as `Measurement.run` otherwise."""
    shards = {f"shard {i + 1}": part for i, part in enumerate(split(plan, workers.size))}
    parts: dict[str, Progress] = {}
    began_s, num_measured = time.monotonic(), 0

    def forward(name: str, progress: Progress) -> None:
        """Progress of all shards together."""
        nonlocal num_measured
        parts[name] = progress
        num_measured += progress.last is not None
        num_done = sum(part.num_done for part in list(parts.values()))
        left_s = (plan.num_requests - num_done) * (time.monotonic() - began_s)
        whole = replace(
            progress,
            num_done=num_done,
            num_planned=plan.num_requests,
            message=f"{name} · {progress.message}",
            eta_s=left_s / num_measured if num_measured else None,
            num_failed=sum(part.num_failed for part in list(parts.values())),
        )
        tell(whole)

    tasks = {
        name: partial(measure_shard, plan=part, benchmark_id=benchmark_id)
        for name, part in shards.items()
    }
    results = workers.do_all(tasks, tell=forward, cancelled=cancelled)
    summaries: list[Summary] = list(results.values())
    return Summary(
        any(one.cancelled for one in summaries),
        sum(one.num_new for one in summaries),
        sum(one.num_failed for one in summaries),
        tuple(skip for one in summaries for skip in one.skipped),
        {name: fault for one in summaries for name, fault in one.faults.items()},
        {name: notes for one in summaries for name, notes in one.notes.items()},
    )


def split(plan: ExperimentPlan, num_workers: int) -> list[ExperimentPlan]:
    """Every n-th prompt in a shard, so that each has some of all kinds."""
    num = min(len(plan.items), SHARDS_EACH * num_workers)
    parts = (plan.items[i::num] for i in range(num))
    return [ExperimentPlan.parse({**dict(plan), "items": part}) for part in parts]


def measure_shard(context: TaskContext, plan: ExperimentPlan, benchmark_id: str) -> Summary:
    """What the log lacks of a plan, measured by one worker."""
    return Measurement(
        plan=plan,
        log=context.log,
        benchmark_id=benchmark_id,
        tell=context.tell,
        cancelled=context.cancelled,
        worker=context.name,
    ).run(context.bench)
