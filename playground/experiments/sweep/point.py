"""A point of a sweep, measured: on a target that is loaded here, or by workers that hold one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from engine.drafters.base import BuildContext
from engine.drafters.method import MethodConfig
from engine.errors import ConfigError
from playground.experiments.cluster import Workers
from playground.experiments.finished import Pair, RunGroup
from playground.experiments.job import Progress
from playground.experiments.measurement import Measurement
from playground.experiments.sweep.plan import METHOD, SweepPlan
from playground.experiments.worker import TaskContext
from storage import RunLog


class Followed(Protocol):
    """Who is told of a trial while its point is measured."""

    num_pairs: int

    def say(self, message: str) -> None: ...
    def answered(self, num_requests: int) -> None: ...
    def report(self, pairs: Sequence[Pair]) -> None: ...
    def is_over(self) -> bool: ...


class Given(Followed, Protocol):
    """The same where a worker takes the trial."""

    number: int

    def begin(self, worker: str) -> None: ...


def measure_on(
    bench: BuildContext,
    log: RunLog,
    plan: SweepPlan,
    config: MethodConfig,
    run_group: str,
    trial: Followed,
    *,
    worker: str = "",
) -> Sequence[Pair]:
    """A point measured on a loaded target, as `sweep.run.Measure`."""

    def tell(progress: Progress) -> None:
        trial.say(progress.message)
        if progress.last is None:
            return
        trial.answered(progress.num_done)
        if len(pairs := measurement.pairs(METHOD)) > trial.num_pairs:
            trial.report(pairs)

    measurement = Measurement(
        plan=plan.trial(config),
        log=log,
        group=RunGroup(run_group),
        tell=tell,
        cancelled=trial.is_over,
        audits_each=0,
        worker=worker,
    )
    summary = measurement.run(bench)
    if not (found := measurement.pairs(METHOD)) and not summary.cancelled:
        reasons = [skipped.reason for skipped in summary.skipped]
        why = reasons[0] if reasons else "See its runs in the log for the reason."
        raise ConfigError(f"No prompt was answered by both methods. {why}")
    return found


@dataclass(slots=True)
class _RemoteTrial:
    """A trial on a worker: what it is told goes to the driver, which says when it is over."""

    context: TaskContext
    num_pairs: int = 0

    def say(self, message: str) -> None:
        self.context.tell(("say", message))

    def answered(self, num_requests: int) -> None:
        self.context.tell(("answered", num_requests))

    def report(self, pairs: Sequence[Pair]) -> None:
        self.num_pairs = len(pairs)
        self.context.tell(("report", pairs))

    def is_over(self) -> bool:
        return self.context.cancelled()


def _point(
    context: TaskContext, plan: SweepPlan, config: MethodConfig, run_group: str
) -> Sequence[Pair]:
    """The task of a worker: one point."""
    trial = _RemoteTrial(context)
    return measure_on(
        context.bench, context.log, plan, config, run_group, trial, worker=context.name
    )


def measure_by(
    workers: Workers, plan: SweepPlan
) -> Callable[[MethodConfig, str, Given], Sequence[Pair]]:
    """Points measured by whichever worker is free."""

    def measure(config: MethodConfig, run_group: str, trial: Given) -> Sequence[Pair]:
        def heard(message: tuple[str, Any]) -> None:
            name, said = message
            getattr(trial, name)(said)

        found: Sequence[Pair] = workers.do(
            partial(_point, plan=plan, config=config, run_group=run_group),
            taken=lambda about: trial.begin(about.name),
            tell=heard,
            cancelled=trial.is_over,
            title=f"trial {trial.number}",
        )
        return found

    return measure
