"""A comparison while people watch it: every round streams, and then its runs are there to race.

A message is one of `playground.host.stream` with two texts added, both JSON: `compare`, where the
comparison is, and `report`, what came of it so far. A new round is a new stream: the panels begin
again.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, NamedTuple

from playground.errors import Fault, attempt, attempt_aside
from playground.experiments.compare.race import Race
from playground.experiments.experiment import Experiment
from playground.experiments.measurement import Prompt
from playground.experiments.plan import ExperimentPlan, Request
from playground.experiments.report.report import read_results
from playground.host.live import LiveRun
from playground.host.runner import EngineHost
from playground.host.stream import (
    TICK_S,
    History,
    Message,
    RunStream,
    bare,
    follow,
    run_meta,
)


class Round(NamedTuple):
    """One prompt, once by every configuration that still runs, in the plan's order."""

    number: int
    """From 1."""
    runs: tuple[LiveRun, ...]


class LiveComparison:
    """The view of a comparison that runs.

    Attributes:
        round: the one that is running, or ran last.
        race: what came of it so far.
        report: the same as JSON text; complete once the experiment is over.
    """

    def __init__(self, host: EngineHost, experiment: Experiment) -> None:
        self._host, self._experiment = host, experiment
        self.round: Round | None = None
        self.race: Race | None = None
        self.report = ""

    def announce(
        self, number: int, requests: Sequence[Request], prompt: Prompt
    ) -> Mapping[str, LiveRun]:
        """Runs that panels can show from now on."""
        if self.round is not None:
            attempt(self.draw, where=f"the report of comparison {self._experiment.id}")
        plan = self._experiment.plan
        messages = [dict(message) for message in prompt.messages]
        runs: dict[str, LiveRun] = {}
        for name in sorted((r.configuration for r in requests), key=plan.names.index):
            run = runs[name] = LiveRun(self._experiment.owner, messages=messages)
            run.meta = _panel_meta(plan, name, run.id, prompt.text, messages)
            self._host.runs.add(run)
        self.round = Round(number, tuple(runs.values()))
        return runs

    def draw(self) -> None:
        """Read what is in the log by now."""
        log, one = self._host.log, self._experiment
        types = self._host.catalog.types
        results = read_results(log, one.id, tuple(one.requests), types, one.faults)
        self.race = Race.of(log, results)
        self.report = self.race.to_json()


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
    shown, last, view = 0, "", view_of(job)
    planned = await asyncio.to_thread(_planned, job)  # reads presets, the first time
    waiting = bare(status={}, runs=planned)
    while True:
        over, now = job.over.is_set(), view.round
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
    metas = await attempt_aside(lambda: _metas(view.race, history), where="opening its runs")
    if isinstance(metas, Fault):
        yield {**fault_message(metas.sentence), "report": view.report}
        return
    yield bare(status={}, runs=metas, resync=True, **_texts(job, final=True))


def reopened(race: Race, history: History) -> Message:
    """A message that shows a comparison of the log."""
    row = race.results.benchmark
    state = _state(row.id, "completed", final=True)
    if row.status == "interrupted":
        state |= {"state": "cancelled", "text": "interrupted; these are its measurements so far"}
    texts = {"compare": json.dumps(state), "report": race.to_json()}
    return bare(status={}, runs=_metas(race, history), resync=True, **texts)


def fault_message(sentence: str, shown: object = None) -> Message:
    """A message that shows an error, and leaves alone what is on show.

    Args:
        shown: the message that the page holds; it comes from the browser and only goes back.
    """
    state = {**_state("", "failed", final=True), "error": sentence}
    kept = shown if isinstance(shown, dict) and shown.get("stream") else None
    return {**(kept or bare(status={}, report="")), "compare": json.dumps(state)}


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


def _metas(race: Race | None, history: History) -> list[dict[str, Any]]:
    """The runs to race first, as panels take them."""
    return [meta for run in (race.shown if race else ()) for meta in history.opened(run)["runs"]]


def _planned(job: Experiment) -> list[dict[str, Any]]:
    """Panels for the first prompt, before anything runs; one message after another is the same."""
    plan, item = job.plan, job.plan.items[0]
    prompt, history = item.turns[0], [dict(message) for message in item.history]
    messages = [] if item.raw else [*history, {"role": "user", "content": prompt}]
    return [
        _panel_meta(plan, name, f"{job.id}/{i}", prompt, messages)
        for i, name in enumerate(plan.names)
    ]


def _panel_meta(
    plan: ExperimentPlan, name: str, run_id: str, prompt: str, messages: Sequence[dict[str, str]]
) -> dict[str, Any]:
    """The facts of a configuration's panel, before its run is in the log."""
    configuration = plan.configuration(name)
    return run_meta(
        run_id,
        title=configuration.title,
        target=plan.target.title or plan.target.name,
        badge=configuration.config.badge,
        method=configuration.values,
        prompt=prompt,
        messages=messages,
        temperature=plan.sampling.temperature,
    )
