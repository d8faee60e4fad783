"""A comparison on its page: every round streams, and finished runs can be raced.

A message is one of `playground.host.stream` with two JSON texts added: `compare`, the state of the
comparison, and `report`, its results so far. A new round is a new stream: the panels start over.
"""

from __future__ import annotations

import asyncio
import json
import textwrap
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from playground.errors import Fault, attempt, attempt_aside
from playground.experiments.experiment import Experiment
from playground.experiments.measurement import Summary
from playground.experiments.plan import ExperimentPlan, Request
from playground.experiments.report.report import Results, read_results
from playground.host.live import LiveRun
from playground.host.recording import Prompt
from playground.host.runner import EngineHost
from playground.host.stream import (
    TICK_S,
    RunStream,
    StreamMessage,
    follow,
    initial_message,
    run_meta,
)
from playground.runs.reading import History
from storage import RunLog, RunQuery

RunKey = tuple[str, int, str]
"""Prompt, repeat, configuration."""


@dataclass(frozen=True, slots=True)
class Race:
    """A comparison's results, and the ids of all runs that have ended, failed ones included."""

    results: Results
    runs: Mapping[RunKey, str]

    @classmethod
    def of(cls, log: RunLog, results: Results) -> Race:
        runs = {(r.prompt, r.repeat, r.configuration): r.run_id for r in results.requests}
        of_comparison = RunQuery(experiment_id=results.benchmark.id, descending=False)
        finished, ids = set(runs.values()), log.ids(of_comparison)
        for run in log.details([run_id for run_id in ids if run_id not in finished]):
            if run.status not in ("running", "completed") and run.configuration:
                runs.setdefault((run.prompt, run.repeat, run.configuration), run.id)
        return cls(results, runs)

    @property
    def prompts(self) -> dict[str, str]:
        """Every prompt that was run, and its beginning, for a menu."""
        run = {prompt for prompt, _, _ in self.runs}
        lines = {}
        for item in self.results.plan.items:
            begin = textwrap.shorten(item.turns[0], 60, placeholder="…")
            is_own = item.category == item.suite
            lines[item.id] = begin if is_own else f"{item.category}: {begin}"
        return {name: line for name, line in lines.items() if name in run}

    def median_runs(self, prompt: str) -> list[str]:
        """The run of each configuration on this prompt with the median decoding time.

        Of an even number, the faster of the two in the middle; of a configuration that finished
        nothing, the last run that it began.
        """
        run_ids: list[str] = []
        for name in self.results.plan.names:
            own = (prompt, name)
            finished = [r for r in self.results.requests if (r.prompt, r.configuration) == own]
            timed = sorted(finished, key=lambda request: request.decode_s)
            begun = [run for (p, _, n), run in self.runs.items() if (p, n) == own]
            run_ids += [timed[(len(timed) - 1) // 2].run_id] if timed else begun[-1:]
        return run_ids

    @property
    def shown(self) -> list[str]:
        """The median runs of a prompt: of those that most configurations finished, the last."""
        finished = {(r.prompt, r.configuration) for r in self.results.requests}
        counts = {prompt: sum(p == prompt for p, _ in finished) for prompt in self.prompts}
        most = max(counts.values(), default=0)
        prompt = next((p for p in reversed(counts) if counts[p] == most), None)
        return [] if prompt is None else self.median_runs(prompt)

    def to_json(self) -> str:
        """The median runs of every prompt, and of every run the speedup that the table has."""
        drafting = [s for s in self.results.report.configurations if not s.reference]
        texts = {s.name: s.overall.speedup.text for s in drafting if s.overall.speedup}
        return json.dumps(
            {
                "setup": self.results.about,
                "num_repeats": 1 + max((repeat for _, repeat, _ in self.runs), default=-1),
                "prompts": [(line, self.median_runs(name)) for name, line in self.prompts.items()],
                "speedups": {run: texts.get(name, "") for (_, _, name), run in self.runs.items()},
            }
        )


# ---- while it runs


class Comparison(Experiment):
    """An experiment whose rounds are streamed to its page.

    Attributes:
        round: number (from 1) and runs of the current or last round: one prompt, once by every
            configuration that still runs, in the plan's order.
        race: the results so far.
        report: the same as JSON text; complete once the experiment is over.
    """

    def __init__(
        self, host: EngineHost, plan: ExperimentPlan, *, benchmark_id: str | None = None
    ) -> None:
        super().__init__(host.log, plan, benchmark_id=benchmark_id)
        self._host, self.on_round = host, self.begin_round
        self.round: tuple[int, tuple[LiveRun, ...]] = 0, ()
        self.race: Race | None = None
        self.report = ""

    def run(self, measure: Callable[[], Summary]) -> Summary:
        try:
            return super().run(measure)
        finally:
            read = partial(self.log.wait_for, self.refresh)
            attempt(read, where=f"the report of comparison {self.id}")

    def begin_round(
        self, number: int, requests: Sequence[Request], prompt: Prompt
    ) -> Mapping[str, LiveRun]:
        """The live runs of a new round, which panels show from now on."""
        if self.round[0]:
            attempt(self.refresh, where=f"the report of comparison {self.id}")
        messages = [dict(message) for message in prompt.messages]
        runs: dict[str, LiveRun] = {}
        for name in sorted((r.configuration for r in requests), key=self.plan.names.index):
            run = runs[name] = LiveRun(self.owner, messages=messages)
            run.meta = _panel_meta(self.plan, name, run.id, prompt.text, messages)
            self._host.runs.add(run)
        self.round = number, tuple(runs.values())
        return runs

    def refresh(self) -> None:
        """Read the results from the log."""
        types, faults = self._host.catalog.types, self.chooser.faults
        results = read_results(self.log, self.id, tuple(self.requests), types, faults)
        self.race = Race.of(self.log, results)
        self.report = self.race.to_json()


async def stream(job: Comparison, history: History) -> AsyncIterator[StreamMessage]:
    """All messages of a comparison as they arise; the last shows the median runs, ready to race.

    The comparison continues when nobody listens.
    """
    job.watchers += 1
    try:
        shown, last = 0, ""
        planned = await asyncio.to_thread(_planned, job)  # the first call reads presets
        waiting = initial_message(runs=planned)
        while True:
            over, (number, runs) = job.over.is_set(), job.round
            if number > shown:
                shown = number
                async for message in follow(RunStream(runs)):
                    yield {**message, **_texts(job)}
                continue
            if over:
                break
            texts = _texts(job)
            if shown == 0 and texts["compare"] != last:
                yield {**waiting, **texts}
                last = texts["compare"]
            await asyncio.sleep(TICK_S)
        metas = await attempt_aside(lambda: _metas(job.race, history), where="opening its runs")
        if isinstance(metas, Fault):
            yield {**fault_message(metas.sentence), "report": job.report}
            return
        yield initial_message(runs=metas, resync=True, **_texts(job, final=True))
    finally:
        job.watchers -= 1


def reopen_message(race: Race, history: History) -> StreamMessage:
    """A message that shows a stored comparison."""
    row = race.results.benchmark
    state = _state(row.id, "completed", final=True)
    if row.status == "interrupted":
        state |= {"state": "cancelled", "text": "interrupted; these are its measurements so far"}
    texts = {"compare": json.dumps(state), "report": race.to_json()}
    return initial_message(runs=_metas(race, history), resync=True, **texts)


def fault_message(sentence: str, shown: object = None) -> StreamMessage:
    """A message that shows an error and leaves the page otherwise unchanged.

    Args:
        shown: the page's current message; it comes from the browser and is only sent back.
    """
    state = {**_state("", "failed", final=True), "error": sentence}
    current = shown if isinstance(shown, dict) and shown.get("stream") else None
    return {**(current or initial_message(report="")), "compare": json.dumps(state)}


def _texts(job: Comparison, *, final: bool = False) -> dict[str, str]:
    state = {
        **_state(job.id, job.state, final=final),
        **job.status,
        "progress": job.share or None,
    }
    return {"compare": json.dumps(state), "report": job.report}


def _state(compare_id: str, state: str, *, final: bool) -> dict[str, Any]:
    """`final`: the panels show stored runs, which can be raced."""
    nothing = {"text": "", "progress": None, "error": None}
    return {"id": compare_id, "state": state, **nothing, "final": final}


def _metas(race: Race | None, history: History) -> list[dict[str, Any]]:
    """The runs to race first, as panels read them."""
    return [meta for run in (race.shown if race else ()) for meta in history.show(run)["runs"]]


def _planned(job: Comparison) -> list[dict[str, Any]]:
    """Panels for the first prompt, before anything runs; the same in every message."""
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
    )
