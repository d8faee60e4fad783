"""What the Compare page's panels are sent: every round as it runs, then the runs to race.

A message is one of `playground.host.stream` with two texts added, both JSON: `compare`, where the
comparison is, and `report`, what came of it so far. A new round is a new stream: the panels begin
again.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

from engine.errors import ConfigError
from playground.errors import Fault, attempt_aside
from playground.experiments.compare.live import LiveComparison, panel_meta
from playground.experiments.compare.report import Comparison, ComparisonResults
from playground.experiments.experiment import Experiment
from playground.host.live import LiveRuns
from playground.host.stream import (
    TICK_S,
    History,
    Message,
    RunStream,
    bare,
    follow,
    stored_run,
)
from storage import RunLog, StepRow

MAX_RUNS = 8
"""That race at once."""


def view_of(job: Experiment) -> LiveComparison:
    """What the page sees of a comparison that runs here."""
    assert isinstance(job.view, LiveComparison)
    return job.view


async def stream(
    job: Experiment, history: History, tick_s: float = TICK_S
) -> AsyncIterator[Message]:
    """All messages of a comparison, in time; the last shows the median runs, to be raced.

    It goes on if nobody listens any more.
    """
    job.watchers += 1
    try:
        async for message in _messages(job, history, tick_s):
            yield message
    finally:
        job.watchers -= 1


async def _messages(job: Experiment, history: History, tick_s: float) -> AsyncIterator[Message]:
    shown, last = 0, ""
    planned = await asyncio.to_thread(_planned, job)  # reads presets, the first time
    waiting = bare(status={}, runs=planned)
    while True:
        over, now = job.over.is_set(), view_of(job).round
        if now is not None and now.number > shown:
            shown = now.number
            async for message in follow(RunStream(now.runs, lambda run: 0), tick_s):
                yield {**message, **_texts(job)}
            continue
        if over:
            break
        texts = _texts(job)
        if shown == 0 and texts["compare"] != last:
            yield {**waiting, **texts}
            last = texts["compare"]
        await asyncio.sleep(tick_s)
    metas = await attempt_aside(
        lambda: _metas(view_of(job).comparison, history), where="opening its runs"
    )
    if isinstance(metas, Fault):
        yield {**fault_message(metas.sentence), "report": view_of(job).report}
        return
    yield bare(status={}, runs=metas, resync=True, **_texts(job, final=True))


def reopened(results: ComparisonResults, history: History) -> Message:
    """A message that shows a comparison of the log."""
    comparison = results.comparison
    state = _state(comparison.id, "completed", final=True)
    if comparison.interrupted:
        state |= {"state": "cancelled", "text": "interrupted; these are its measurements so far"}
    texts = {"compare": json.dumps(state), "report": results.to_json()}
    return bare(status={}, runs=_metas(comparison, history), resync=True, **texts)


def fault_message(sentence: str, shown: object = None) -> Message:
    """A message that shows an error, and leaves alone what is on show.

    Args:
        shown: the message that the page holds; it comes from the browser and only goes back.
    """
    state = {**_state("", "failed", final=True), "error": sentence}
    kept = shown if isinstance(shown, dict) and shown.get("stream") else None
    return {**(kept or bare(status={}, report="")), "compare": json.dumps(state)}


def race_clocks(runs: LiveRuns, log: RunLog, run_ids: Sequence[str]) -> list[dict[str, Any]]:
    """Of every run: `at_s`, seconds from its request to each commit, and `num` committed there.

    Entry 0 is the prefill's first token; entry n is step n - 1, as the step records have it.
    """
    if len(run_ids) > MAX_RUNS:
        raise ConfigError(f"At most {MAX_RUNS} runs race at once, got {len(run_ids)}.")
    return [_clock(runs, log, run_id) for run_id in run_ids]


def _clock(runs: LiveRuns, log: RunLog, run_id: str) -> dict[str, Any]:
    live = runs.get(run_id)
    ttft_s: float | None
    rows: Sequence[StepRow] | None = None
    if live is not None and live.first is not None:
        ttft_s, rows = live.first.ttft_s, live.rows.read(0)
    if rows is None:
        detail = stored_run(log, run_id if live is None else live.log_id or run_id)
        begun = detail.first_token_id is not None
        ttft_s, rows = (detail.ttft_s or 0.0, log.steps(detail.id)) if begun else (None, ())
    commits = [] if ttft_s is None else [(ttft_s, 1)]
    commits += [(row.at_s, row.num_committed) for row in rows]
    return {"run": run_id, "at_s": [at for at, _ in commits], "num": [num for _, num in commits]}


def _texts(job: Experiment, *, final: bool = False) -> dict[str, str]:
    state = {
        **_state(job.id, job.state, final=final),
        "text": job.message,
        "progress": None if job.over.is_set() else job.share,
        "error": job.error,
    }
    return {"compare": json.dumps(state), "report": view_of(job).report}


def _state(compare_id: str, state: str, *, final: bool) -> dict[str, Any]:
    """`final`: the panels hold runs of the log, which can be raced."""
    nothing = {"text": "", "progress": None, "error": None}
    return {"id": compare_id, "state": state, **nothing, "final": final}


def _metas(comparison: Comparison, history: History) -> list[dict[str, Any]]:
    """The median runs of one prompt, as panels take them."""
    prompt = comparison.shown_prompt()
    runs = [] if prompt is None else comparison.median_runs(prompt)
    return [meta for run in runs for meta in history.opened(run)["runs"]]


def _planned(job: Experiment) -> list[dict[str, Any]]:
    """Panels for the first prompt, before anything runs; one message after another is the same."""
    plan, item = job.plan, job.plan.items[0]
    prompt, history = item.turns[0], [dict(message) for message in item.history]
    messages = [] if item.raw else [*history, {"role": "user", "content": prompt}]
    return [
        panel_meta(plan, name, f"{job.id}/{i}", prompt, messages)
        for i, name in enumerate(plan.names)
    ]
