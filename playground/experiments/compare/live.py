"""A comparison while people watch it: every round is announced, and its runs stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from playground.errors import attempt
from playground.experiments.compare.report import Comparison, ComparisonResults
from playground.experiments.experiment import Experiment
from playground.experiments.measurement import Prompt
from playground.experiments.plan import ExperimentPlan, Request
from playground.host.live import LiveRun
from playground.host.runner import EngineHost
from playground.host.stream import run_meta


def panel_meta(
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


class Round(NamedTuple):
    """One prompt, once by every configuration that still runs, in the plan's order."""

    number: int
    """From 1."""
    runs: tuple[LiveRun, ...]


class LiveComparison:
    """The view of a comparison that runs.

    Attributes:
        round: the one that is running, or ran last.
        comparison: its results so far.
        results: its report, with remarks.
        report: the same as JSON text; complete once the experiment is over.
    """

    def __init__(self, host: EngineHost, experiment: Experiment) -> None:
        self._host, self._experiment = host, experiment
        self.round: Round | None = None
        self.comparison = Comparison(experiment.id, experiment.plan)
        self.results: ComparisonResults | None = None
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
            run.meta = panel_meta(plan, name, run.id, prompt.text, messages)
            self._host.runs.add(run)
        self.round = Round(number, tuple(runs.values()))
        return runs

    def draw(self) -> None:
        """Read what is in the log by now."""
        log, types = self._host.log, self._host.catalog.types
        last = self.comparison
        self.comparison = Comparison.read(log, self._experiment.id, types, last=last)
        self.comparison.faults.update(self._experiment.faults)
        self.results = self.comparison.results(log)
        self.report = self.results.to_json()
