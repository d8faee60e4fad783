"""The results of a sweep so far: its trials, the best of them, and its settings as a method file.

A sweep is a row of the run log; its trials are artifacts of that row.

Every trial answers the same prompts, so trials are compared prompt by prompt. The best is chosen on
the same data, so the comparisons use Bonferroni's correction for the number of the others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import yaml
from pydantic import TypeAdapter

from engine import formats
from engine.drafters.method import MethodConfig
from engine.errors import ConfigError
from engine.formats import DASH
from playground.experiments.plan import OBJECTIVES, SweepPlan
from playground.experiments.report.columns import Cell
from playground.experiments.report.report import unknown_experiment
from playground.experiments.space import Objective, point_text, setting_text
from playground.experiments.statistics import differ
from playground.experiments.sweep.trials import Trial, key_of, num_done
from playground.host.baseline import DOUBTS
from playground.host.catalog import MethodTypes
from storage import Benchmark, RunLog

FIGURES: dict[str, tuple[str, str]] = {
    "speedup": OBJECTIVES["speedup"],
    "tok_s": (
        "tok/s",
        "new tokens after the first / seconds of decoding, over all answers of the trial",
    ),
    "plain_tok_s": (
        "plain tok/s",
        "the same for plain decoding, which takes turns with the method on every prompt",
    ),
    "mat": OBJECTIVES["mat"],
}
"""Figures of a trial: their titles and formulas."""
TRIAL = "trial"
"""Kind of the artifacts of a sweep."""
_TRIAL = TypeAdapter(Trial)
MAX_NAMED = 5
"""Trials that the verdict names."""
FORMULAS: dict[str, str] = {
    **{name: formula for name, (_, formula) in FIGURES.items()},
    "same": "answers identical to plain decoding's / answers compared",
    "as_good": "its speedup is not shown to differ from the best trial's, compared prompt by "
    "prompt (Student's t at 95%, corrected for the number of trials)",
}
"""Formula of every column."""


def best_of(trials: Sequence[Trial], objective: Objective) -> Trial | None:
    """The trial with the largest value; the earlier one of two equal ones."""
    measured = [trial for trial in trials if trial.value(objective) is not None]
    return max(measured, key=lambda t: (t.value(objective) or 0.0, -t.number), default=None)


def as_good(best: Trial, trials: Sequence[Trial], objective: Objective) -> list[Trial]:
    """Measured trials that do not differ significantly from the best; none for MAT (no noise)."""
    if objective == "mat" or best.figures is None:
        return []
    others = [t for t in trials if t.value(objective) is not None and t.number != best.number]
    ours = best.figures.counts
    return [t for t in others if t.figures and not differ(ours, t.figures.counts, len(others))]


@dataclass(frozen=True)
class SweepReport:
    """A sweep as the log has it, and its results so far.

    Attributes:
        row: of the run log.
        trials: those that have begun, by number.
    """

    row: Benchmark
    plan: SweepPlan
    trials: tuple[Trial, ...]

    @cached_property
    def best(self) -> Trial | None:
        return best_of(self.trials, self.plan.chooser.objective)

    def value(self, trial: Trial) -> float | None:
        """What the sweep maximises."""
        return trial.value(self.plan.chooser.objective)

    @cached_property
    def ties(self) -> tuple[int, ...]:
        """Numbers of the trials that are as good as the best."""
        good = self.best and as_good(self.best, self.trials, self.plan.chooser.objective)
        return tuple(trial.number for trial in good or ())

    @property
    def num_done(self) -> int:
        return num_done(self.trials, self.plan.chooser.mode)

    def trial(self, number: int | None = None) -> Trial:
        """A trial by number; without one the best."""
        name = self.row.name
        if number is None:
            if self.best is None:
                raise ConfigError(f"Sweep {name} has measured nothing yet. Let it run longer.")
            return self.best
        match = next((trial for trial in self.trials if trial.number == number), None)
        if match is None:
            raise ConfigError(f"Sweep {name} has no trial {number}.")
        return match

    def config(self, number: int | None = None) -> MethodConfig:
        """The method's settings in a trial; in the best one without a number."""
        return self.plan.space.config(self.trial(number).point)

    # ---- its words

    def outcome(self, trial: Trial) -> str:
        """The outcome of a trial; one still running in a stopped sweep was interrupted."""
        status = self.row.status
        if trial.outcome == "running" and status != "running":
            return "stopped" if status == "cancelled" else "interrupted"
        return trial.outcome

    def result_text(self, trial: Trial) -> str:
        """The outcome of a trial, or its comparison with the best one."""
        if trial.outcome != "measured":
            return self.outcome(trial)
        if self.best is not None and trial.number == self.best.number:
            return "best"
        return "≈ best" if trial.number in self.ties else ""

    def reason(self, trial: Trial) -> str:
        """Why a trial has no result, or no speedup."""
        doubt = trial.figures and trial.figures.doubt
        return trial.reason or (f"No speedup is given: {DOUBTS[doubt]}" if doubt else "")

    @property
    def columns(self) -> list[tuple[str, str, str]]:
        """Name, title and formula of every figure of a trial, the objective first."""
        names = sorted(FIGURES, key=lambda name: name != self.plan.chooser.objective)
        return [(name, *FIGURES[name]) for name in names]

    def figure(self, trial: Trial, name: str) -> str:
        """A figure of a trial as text."""
        return formats.of_kind(name)(getattr(trial.figures, name, None))

    def table(self, *, best_first: bool = False) -> tuple[dict[str, str], list[list[Cell]]]:
        """The trials as a table, by number: titles with formulas, and rows."""
        fields = [vary.field for vary in self.plan.chooser.varied]
        heads = dict.fromkeys(("trial", "state", *fields), "")
        heads |= {title: formula for _, title, formula in self.columns}
        heads |= {"same text": FORMULAS["same"]}
        rows = []
        trials = list(self.trials)
        if best_first:
            trials.sort(key=lambda t: (t.outcome != "measured", -(self.value(t) or -math.inf)))
        for trial in trials:
            figures = trial.figures
            same = f"{figures.num_same}/{figures.num_prompts}" if figures else DASH
            rows.append(
                [
                    Cell(str(trial.number)),
                    Cell(self.result_text(trial), hint=self.reason(trial)),
                    *(Cell(setting_text(trial.point.get(name))) for name in fields),
                    *(Cell(self.figure(trial, name)) for name, *_ in self.columns),
                    Cell(same),
                ]
            )
        return heads, rows

    @property
    def verdict(self) -> str:
        """The best trial and what it is worth, in sentences; empty before there is one."""
        best, plan = self.best, self.plan
        if best is None or best.figures is None:
            return ""
        figures, objective = best.figures, plan.chooser.objective
        reached = f"{OBJECTIVES[objective][0]} {self.figure(best, objective)}{self._gain(best)}"
        parts = [f"Best so far: {point_text(best.point)}, with {reached}."]
        if ties := self.ties:
            named = ", ".join(map(str, ties[:MAX_NAMED])) + ", …" * (len(ties) > MAX_NAMED)
            parts.append(f"As good within the noise: trial{'s' * (len(ties) > 1)} {named}.")
        num_measured = sum(self.value(t) is not None for t in self.trials)
        if num_measured > 1 and objective != "mat":
            parts.append(f"Exploratory: picked from {num_measured} trials on the same prompts.")
        if figures.speedup is not None and figures.speedup < 1:
            parts.append(
                f"Plain decoding is faster: the speedup is {formats.speedup(figures.speedup)}."
            )
        differing, num = figures.num_prompts - figures.num_same, figures.num_prompts
        if differing and plan.sampling.greedy and plan.swept.lossless:
            parts.append(f"{differing} of {num} answers differ from plain decoding's.")
        return " ".join(parts)

    def _gain(self, best: Trial) -> str:
        """The best trial compared with the settings that the sweep began from."""
        key = key_of(self.plan.space.start)
        start = next((t for t in self.trials if t.key == key), None)
        first, value = self.value(start) if start else None, self.value(best)
        if start is None or not first or not value:
            return ""
        if start.number == best.number:
            return "; these are the settings it began from"
        return f", {formats.speedup(value / first)} that of the settings it began from"

    # ---- its files

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain JSON."""
        return {
            "id": self.row.id,
            "name": self.row.name,
            "status": self.row.status,
            "fault": str(self.row.summary.get("error") or ""),
            "plan": self.plan.to_dict(),
            "trials": [self._row(trial) for trial in self.trials],
            "best": None if self.best is None else self.best.number,
            "as_good": list(self.ties),
            "verdict": self.verdict,
        }

    def _row(self, trial: Trial) -> dict[str, Any]:
        stored: dict[str, Any] = _TRIAL.dump_python(trial, mode="json")
        return stored | {"outcome": self.outcome(trial), "reason": self.reason(trial)}

    def preset_yaml(self) -> str:
        """The best trial as a method file, for `--method FILE.yaml` or `presets/methods`."""
        trial, plan, name = self.trial(), self.plan, self.row.name
        config = plan.space.config(trial.point)
        description = f"Trial {trial.number} of sweep {name} on {plan.target.name}"
        objective = plan.chooser.objective
        if trial.figures is not None and trial.figures.value(objective) is not None:
            title, num = OBJECTIVES[objective][0], trial.figures.num_prompts
            description += f": {title} {self.figure(trial, objective)} over {num} answers"
        values = {
            "name": f"{name}-{trial.number}",
            "title": f"{type(config).title}, tuned",
            "description": f"{description}.",
            "config": {"decoding_type": config.decoding_type, **config.changed},
        }
        return yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=100)


# ---- in the log


class SweepStore:
    """The sweeps of a run log; `types` are the methods that they may name, by default all."""

    def __init__(self, log: RunLog, types: MethodTypes | None = None) -> None:
        self.log, self._types = log, types

    def trials(self, sweep_id: str) -> tuple[Trial, ...]:
        """Those that have begun, by number; a copied log may have a trial twice."""
        oldest_first = reversed(self.log.artifacts.find(TRIAL, benchmark_id=sweep_id))
        trials = {one.meta["number"]: _TRIAL.validate_python(one.meta) for one in oldest_first}
        return tuple(trials[number] for number in sorted(trials))

    def save(self, sweep_id: str, trial: Trial) -> None:
        """Store a trial in place of its earlier version."""
        key, meta = {"number": trial.number}, asdict(trial)
        self.log.artifacts.put(TRIAL, key, meta=meta, payload=b"", benchmark_id=sweep_id)

    def load(self, sweep_id: str) -> SweepReport:
        """A sweep and its results. Raises ConfigError: it is not in the log."""
        row = self.log.benchmarks.get(sweep_id)
        if row is None or row.plan.get("kind") != "sweep":
            raise unknown_experiment(sweep_id)
        return SweepReport(row, SweepPlan.stored(row.plan, self._types), self.trials(sweep_id))
