"""A point of a sweep, measured: on a target that is loaded here, or by workers that hold one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from engine.drafters.base import BuildContext
from engine.drafters.method import MethodConfig
from engine.errors import ConfigError
from playground.experiments.cluster import Workers
from playground.experiments.finished import Pair, finished_requests
from playground.experiments.job import Progress
from playground.experiments.measurement import Measurement
from playground.experiments.sweep.plan import METHOD, SweepPlan
from playground.experiments.sweep.run import Measure, RunningTrial
from playground.experiments.worker import TaskContext
from storage import RunLog


def measure_point(
    bench: BuildContext,
    log: RunLog,
    plan: SweepPlan,
    config: MethodConfig,
    run_group: str,
    *,
    tell: Callable[[Progress], None],
    cancelled: Callable[[], bool],
    worker: str = "",
) -> Sequence[Pair]:
    """Measure what the log lacks of a point; what it has is told first."""
    measurement = Measurement(
        plan=plan.trial(config),
        log=log,
        benchmark_id=run_group,
        tell=tell,
        cancelled=cancelled,
        worker=worker,
    )
    num_planned = measurement.plan.num_requests
    known = log.wait_for(lambda: finished_requests(log, run_group))
    for number, request in enumerate(known, start=1):
        tell(Progress(number, num_planned, "reading the log", None, last=request))
    summary = measurement.run(bench)
    if not (pairs := measurement.pairs(METHOD)) and not summary.cancelled:
        reasons = [skipped.reason for skipped in summary.skipped]
        why = reasons[0] if reasons else "See its runs in the log for the reason."
        raise ConfigError(f"No prompt was answered by both methods. {why}")
    return pairs


def measure_on(bench: BuildContext, log: RunLog, plan: SweepPlan) -> Measure:
    """Points measured on a loaded target."""

    def measure(config: MethodConfig, run_group: str, trial: RunningTrial) -> Sequence[Pair]:
        tell, cancelled = trial.tell, trial.is_over
        return measure_point(bench, log, plan, config, run_group, tell=tell, cancelled=cancelled)

    return measure


def _task(
    context: TaskContext, plan: SweepPlan, config: MethodConfig, run_group: str
) -> Sequence[Pair]:
    return measure_point(
        context.bench,
        context.log,
        plan,
        config,
        run_group,
        tell=context.tell,
        cancelled=context.cancelled,
        worker=context.name,
    )


def measure_by(workers: Workers, plan: SweepPlan) -> Measure:
    """Points measured by whichever worker is free."""

    def measure(config: MethodConfig, run_group: str, trial: RunningTrial) -> Sequence[Pair]:
        pairs: Sequence[Pair] = workers.do(
            partial(_task, plan=plan, config=config, run_group=run_group),
            taken=lambda about: trial.begin(about.name),
            tell=trial.tell,
            cancelled=trial.is_over,
            title=f"trial {trial.number}",
        )
        return pairs

    return measure
