"""The results of a sweep so far: its trials, the best of them, and its settings as a method file.

A sweep is a row of the run log, and its runs name the trial that they belong to. The outcomes of
the trials are artifacts of that row; every trial with figures is a configuration of its report.

Every trial answers the same prompts, so trials are compared prompt by prompt. The best is chosen on
the same data, so the comparisons use Bonferroni's correction for the number of the others.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from engine import formats
from engine.drafters.method import MethodConfig
from engine.errors import ConfigError
from engine.formats import plural
from playground.experiments.plan import SweepPlan
from playground.experiments.prompts import in_order
from playground.experiments.report.columns import COLUMNS, Cell
from playground.experiments.report.export import json_text
from playground.experiments.report.report import (
    Report,
    Results,
    environment_of,
    leader_of,
    make_section,
    unknown_experiment,
)
from playground.experiments.space import Objective, point_text, setting_text
from playground.experiments.statistics import FinishedRequest, finished_requests
from playground.experiments.sweep.trials import Trial, num_done, with_figures
from playground.host.catalog import MethodTypes
from playground.host.speedup import DOUBTS, TRIAL, differ, key_of, trials_of
from storage import Benchmark, RunLog

BEST = "best"
SHOWN = ("speedup", "tok_s", "mat", "draft_acceptance", "ttft_ms", "verdict")
"""Columns of a report in the table of trials."""
FIELDS = ("number", "point", "outcome", "reason", "seconds")
"""What such an artifact has of a trial; older versions stored figures, too."""
MAX_NAMED = 5
"""Trials that the headline names."""
AS_GOOD = (
    "its speedup is not shown to differ from the best trial's, compared prompt by prompt "
    "(Student's t at 95%, corrected for the number of trials)"
)
NO_RUNS = "It has no figures: the log no longer has its runs."


@dataclass(frozen=True, slots=True)
class SweepResults(Results):
    """A sweep, and its results so far; a trial with figures is a configuration of the report.

    Attributes:
        trials: those that have begun, by number.
        best: None before there is one.
        ties: numbers of the trials that do not differ significantly from the best.
    """

    plan: SweepPlan
    trials: tuple[Trial, ...]
    best: Trial | None
    ties: tuple[int, ...]

    @property
    def num_done(self) -> int:
        return num_done(self.trials, self.plan.chooser.mode)

    def trial(self, number: object = BEST) -> Trial:
        """The best trial, or one by its number, which may be a text."""
        name = self.benchmark.name
        if number == BEST:
            if self.best is None:
                raise ConfigError(f"Sweep {name} has measured nothing yet. Let it run longer.")
            return self.best
        match = next((trial for trial in self.trials if str(trial.number) == str(number)), None)
        if match is None:
            raise ConfigError(f"Sweep {name} has no trial {number!r:.60}.")
        return match

    def config(self, number: object = BEST) -> MethodConfig:
        """The method's settings in the best trial, or in one by its number."""
        return self.plan.space.config(self.trial(number).point)

    # ---- its words

    def outcome(self, trial: Trial) -> str:
        """The outcome of a trial; one still running in a stopped sweep was interrupted."""
        status = self.benchmark.status
        if trial.outcome == "running" and status != "running":
            return "stopped" if status == "cancelled" else "interrupted"
        return trial.outcome

    def result_text(self, trial: Trial) -> str:
        """The outcome of a trial, or its comparison with the best one."""
        if trial.section is None:
            return self.outcome(trial)
        if self.best is not None and trial.number == self.best.number:
            return "best"
        return "≈ best" if trial.number in self.ties else ""

    def reason(self, trial: Trial) -> str:
        """Why a trial has no result, or no speedup."""
        if trial.section is None:
            return NO_RUNS if trial.outcome == "measured" else trial.reason
        speedup = trial.section.overall.speedup
        doubt = speedup and speedup.doubt
        return f"No speedup is given: {DOUBTS[doubt]}" if doubt else ""

    def table(self, *, best_first: bool = False) -> tuple[dict[str, str], list[list[Cell]]]:
        """The trials as a table, by number: titles with formulas, and rows.

        The objective is the first of their figures.
        """
        fields = [vary.field for vary in self.plan.chooser.varied]
        trials, objective = list(self.trials), self.plan.chooser.objective
        columns = [COLUMNS[name] for name in sorted(SHOWN, key=lambda name: name != objective)]
        heads = dict.fromkeys(("trial", "state", *fields), "")
        heads |= {column.title: column.formula for column in columns}
        if best_first:
            trials.sort(key=lambda t: (t.section is None, -(t.value(objective) or -math.inf)))
        rows = [
            [
                Cell(str(trial.number)),
                Cell(self.result_text(trial), hint=self.reason(trial)),
                *(Cell(setting_text(trial.point.get(name))) for name in fields),
                *(trial.cell(column) for column in columns),
            ]
            for trial in trials
        ]
        return heads, rows

    # ---- its files

    def json_text(self) -> str:
        """The whole report, and all trials."""
        trials = [
            {
                "name": trial.name,
                "trial": trial.id,
                **_meta_of(trial),
                "outcome": self.outcome(trial),
                "reason": self.reason(trial),
            }
            for trial in self.trials
        ]
        best, fault = self.best and self.best.number, self.benchmark.summary.get("error")
        return json_text(self, fault=fault or "", trials=trials, best=best, as_good=self.ties)

    def preset_yaml(self) -> str:
        """The best trial as a method file, for `--method FILE.yaml` or `presets/methods`."""
        trial, plan, name = self.trial(), self.plan, self.benchmark.name
        config = plan.space.config(trial.point)
        description = f"Trial {trial.number} of sweep {name} on {plan.target.name}"
        if trial.section is not None:
            num = trial.section.overall.num_requests
            reached = objective_text(trial, plan.chooser.objective)
            description += f": {reached} over {plural(num, 'answer')}"
        values = {
            "name": f"{name}-{trial.number}",
            "title": f"{type(config).title}, tuned",
            "description": f"{description}.",
            "config": {"decoding_type": config.decoding_type, **config.changed},
        }
        return yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=100)


# ---- the best trial


def ranking(trials: Sequence[Trial], objective: Objective) -> tuple[Trial | None, tuple[int, ...]]:
    """The first trial with the largest value, and the numbers of those that are as good.

    MAT has no noise, so none is as good.
    """
    measured = [trial for trial in trials if trial.value(objective) is not None]
    best = max(measured, key=lambda trial: trial.value(objective) or 0.0, default=None)
    if best is None or objective == "mat":
        return best, ()
    others = [trial for trial in measured if trial is not best]
    ties = (t.number for t in others if not differ(best.counts, t.counts, len(others)))
    return best, tuple(ties)


def objective_text(trial: Trial, objective: Objective) -> str:
    """The objective and its value in a trial: `speedup 1.52×`."""
    return f"{COLUMNS[objective].title} {trial.cell(COLUMNS[objective]).text}"


def headline_of(
    plan: SweepPlan, trials: Sequence[Trial], best: Trial | None, ties: Sequence[int]
) -> str:
    """The best trial and what it is worth; empty before anything is measured."""
    num_missing = sum(trial.outcome == "measured" and trial.section is None for trial in trials)
    missing = f"{plural(num_missing, 'trial')} without figures: the log no longer has their runs."
    if best is None or best.section is None:
        return missing if num_missing else ""
    objective, section = plan.chooser.objective, best.section
    reached = f"{objective_text(best, objective)}{_gain(plan, trials, best)}"
    parts = [f"Best so far: {point_text(best.point)}, with {reached}."]
    if ties:
        named = ", ".join(map(str, ties[:MAX_NAMED])) + ", …" * (len(ties) > MAX_NAMED)
        parts.append(f"As good within the noise: trial{'s' * (len(ties) > 1)} {named}.")
    num_measured = sum(trial.value(objective) is not None for trial in trials)
    if num_measured > 1 and objective != "mat":
        parts.append(f"Exploratory: picked from {num_measured} trials on the same prompts.")
    speedup = section.overall.speedup
    if speedup is not None and speedup.ratio is not None and speedup.ratio < 1:
        parts.append(f"Plain decoding is faster: the speedup is {speedup.text}.")
    answers = section.verdict
    if answers is not None and not answers.identical and section.lossless:
        differing, num = answers.num_compared - answers.num_identical, answers.num_compared
        parts.append(f"{differing} of {num} answers differ from plain decoding's.")
    if num_missing:
        parts.append(missing)
    return " ".join(parts)


def _gain(plan: SweepPlan, trials: Sequence[Trial], best: Trial) -> str:
    """The best trial compared with the settings that the sweep began from."""
    key, objective = key_of(plan.space.start), plan.chooser.objective
    start = next((trial for trial in trials if trial.key == key), None)
    first, value = start and start.value(objective), best.value(objective)
    if start is None or not first or not value:
        return ""
    if start.number == best.number:
        return "; these are the settings it began from"
    return f", {formats.speedup(value / first)} that of the settings it began from"


# ---- in the log


def stored_trials(log: RunLog, sweep_id: str) -> tuple[Trial, ...]:
    """Those that have begun, by number, without figures."""
    metas = trials_of(log, sweep_id)
    return tuple(Trial(**{name: meta[name] for name in FIELDS}) for meta in metas)


def save_trial(log: RunLog, sweep_id: str, trial: Trial) -> None:
    """Store a trial in place of its earlier version."""
    key, meta = {"number": trial.number}, _meta_of(trial)
    log.artifacts.put(TRIAL, key, meta=meta, payload=b"", benchmark_id=sweep_id)


def stored_sweep(
    log: RunLog, sweep_id: str, types: MethodTypes | None = None
) -> tuple[Benchmark, SweepPlan]:
    """The row of a sweep and its plan; `types` are the methods that it may name, by default all.

    Raises ConfigError: it is not in the log.
    """
    row = log.benchmarks.get(sweep_id)
    if row is None or row.kind != "sweep":
        raise unknown_experiment(sweep_id)
    return row, SweepPlan.stored(row.plan, types)


def read_sweep(
    log: RunLog,
    sweep_id: str,
    types: MethodTypes | None = None,
    known: Iterable[FinishedRequest] = (),
) -> SweepResults:
    """A sweep and its results; `known` are requests that were read before.

    Raises ConfigError: it is not in the log.
    """
    row, plan = stored_sweep(log, sweep_id, types)
    requests = finished_requests(log, sweep_id, known)
    by_trial: dict[str, list[FinishedRequest]] = defaultdict(list)
    for request in requests:
        by_trial[request.trial].append(request)
    trials = tuple(
        with_figures(trial, plan, by_trial[trial.id]) if trial.outcome == "measured" else trial
        for trial in stored_trials(log, sweep_id)
    )
    best, ties = ranking(trials, plan.chooser.objective)
    plain = [one for one in requests if one.configuration == plan.reference.name]
    reference = make_section(plan.reference, plain, plain, {} if plan.sampling.greedy else None)
    sections = reference, *(trial.section for trial in trials if trial.section is not None)
    report = Report(
        configurations=sections,
        groups=tuple(in_order(request.group for request in requests)),
        num_done=len(requests),
        headline=headline_of(plan, trials, best, ties),
        leader=leader_of(sections).name,
    )
    here = environment_of(log, sweep_id)
    return SweepResults(row, plan, tuple(requests), report, here, trials, best, ties)


def _meta_of(trial: Trial) -> dict[str, Any]:
    return {name: getattr(trial, name) for name in FIELDS}
