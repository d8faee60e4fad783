"""Runs a comparison while people watch: every round is announced, and its runs stream."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from engine.drafters.base import BuildContext
from playground.errors import attempt
from playground.experiments.compare.report import Comparison
from playground.experiments.finished import RunGroup, details_of
from playground.experiments.job import Job, Jobs, State, submit
from playground.experiments.measurement import Measurement, Prompt, Summary
from playground.experiments.plan import ExperimentPlan, Request
from playground.host.live import LiveRun
from playground.host.runner import EngineHost
from playground.host.stream import run_meta


class Round(NamedTuple):
    """One prompt, once by every configuration that still runs, in the plan's order."""

    number: int
    """From 1."""
    runs: tuple[LiveRun, ...]


class CompareJob(Job):
    """One comparison, from the queue to its end.

    Attributes:
        round: the one that is running, or ran last.
        comparison: what came of it so far.
        report: the same as JSON text; complete once it is over.
    """

    def __init__(self, host: EngineHost, plan: ExperimentPlan, owner: str) -> None:
        super().__init__(secrets.token_hex(8), owner=owner)
        self.plan = plan
        self.round: Round | None = None
        self.comparison = Comparison(self.id, plan.to_dict(), planned=plan.num_requests)
        self.report = ""
        self._host = host
        self._read: set[str] = set()
        self._measurement = Measurement(
            plan=plan,
            log=host.log,
            group=RunGroup(labels={"compare": self.id}),
            tell=self.tell,
            cancelled=self.cancelled,
            announce=self._announce,
            drop_faulty=True,
            audits_each=1,
        )

    @classmethod
    def start(cls, host: EngineHost, jobs: Jobs, plan: ExperimentPlan, *, owner: str) -> CompareJob:
        """Queue a comparison; an unfinished one of the same owner is cancelled.

        Raises QueueFullError, ClosingError: it was not taken on; then nothing is cancelled.
        """
        job = cls(host, plan, owner)

        def take_on() -> Callable[[], State]:
            result = submit(host, job, plan, job._measure)
            return lambda: job._ended(result())

        jobs.start(job, take_on)
        return job

    @property
    def share(self) -> float | None:
        """How much of it is done; None while nothing is known."""
        now = self.progress
        return None if now is None or not now.num_done else now.num_done / now.num_planned

    # ---- on the engine's thread

    def _measure(self, bench: BuildContext) -> Summary:
        try:
            return self._measurement.run(bench)
        finally:
            self._draw()

    def _announce(
        self, number: int, requests: Sequence[Request], prompt: Prompt
    ) -> Mapping[str, LiveRun]:
        """Runs that panels can show from now on."""
        if self.round is not None:
            self._draw()
        messages = [dict(message) for message in prompt.messages]
        runs: dict[str, LiveRun] = {}
        asked = {request.configuration for request in requests}
        for configuration in self.plan.configurations:
            if configuration.name in asked:
                run = LiveRun(self.owner, messages=messages)
                run.meta = run_meta(
                    run.id,
                    title=configuration.title,
                    target=self.plan.target.title or self.plan.target.name,
                    badge=configuration.config.badge,
                    method=configuration.config.model_dump(mode="json"),
                    prompt=prompt.text,
                    messages=messages,
                )
                self._host.runs.add(run)
                runs[configuration.name] = run
        self.round = Round(number, tuple(runs.values()))
        return runs

    def _draw(self) -> None:
        """The report so far; where the log cannot be read now, it comes with the next round."""
        attempt(self._write_report, where=f"the report of comparison {self.id}")

    def _write_report(self) -> None:
        comparison = self.comparison
        group = RunGroup(labels={"compare": self.id})
        for run in details_of(self._host.log, group, known=self._read):
            if run.status != "running":
                comparison.add(run)
                self._read.add(run.id)
        comparison.faults.update(self._measurement.faults)
        self.report = comparison.to_json(self._host.log, self._host.catalog.types)

    # ---- when it is over

    def _ended(self, summary: Summary) -> State:
        comparison = self.comparison
        comparison.planned = None if summary.status == "completed" else self.plan.num_requests
        if summary.cancelled:
            return "cancelled"
        comparison.skipped = {skip.prompt: skip.reason for skip in summary.skipped}
        self._host.log.wait_for(self._write_report)
        problems = [*comparison.faults.values(), *comparison.skipped.values()]
        if problems and not comparison.runs:
            self.error = problems[0]
            return "failed"
        return "completed"

    @property
    def message(self) -> str:
        """What is being done, or how it ended."""
        if self.over.is_set():
            return {"cancelled": "stopped", "failed": "failed"}.get(self.state, "done")
        return super().message
