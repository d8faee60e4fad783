"""What a sweep has found so far: its trials, the best of them, and that one as a method file."""

from __future__ import annotations

import dataclasses
from typing import Any

import yaml

from engine.drafters.method import MethodConfig
from engine.errors import ConfigError
from playground.experiments.sweeps.fields import shown
from playground.experiments.sweeps.noise import as_good
from playground.experiments.sweeps.plan import OBJECTIVES, SweepPlan
from playground.experiments.sweeps.store import FAULT, Sweep, status_of
from playground.experiments.sweeps.trials import Trial, key_of, last_words, num_done

MOST_NAMED = 5
"""Trials that the verdict names."""
FORMULAS: dict[str, str] = {
    "value": "what the sweep maximises",
    "speedup": OBJECTIVES["speedup"][1],
    "tok_s": "new tokens after the first / seconds of decoding, over all answers of the trial",
    "plain_tok_s": "the same of plain decoding, which answers every prompt in turn with the method",
    "mat": OBJECTIVES["mat"][1],
    "same": "answers that are token for token plain decoding's / answers compared",
    "seconds": "from the trial's start to its end, loading of the drafter included",
    "as_good": "its speedups do not differ from the best trial's, compared prompt by prompt as "
    "logarithms (Student's t at 95 %)",
}
"""Formula of every column."""


def shown_trials(sweep: Sweep) -> list[Trial]:
    """The trials that a person wants to see: one per slot, by number.

    One that was broken off while its point was being chosen stands for nothing.
    """
    num_fields = len(sweep.plan.space.varied)
    words = last_words(sweep.trials()).values()
    told = (t for t in words if len(t.point) == num_fields or t.outcome == "running")
    return sorted(told, key=lambda trial: trial.number)


def broken_off(trial: Trial) -> Trial:
    """The trial as it stands when nobody is running it."""
    return dataclasses.replace(trial, outcome="killed") if trial.outcome == "running" else trial


def best_of(trials: list[Trial]) -> Trial | None:
    """The trial with the largest value; the earlier one of two equal ones."""
    measured = [t for t in trials if t.outcome == "measured" and t.figures is not None]
    return max(measured, key=lambda t: (t.figures.value, -t.number), default=None)  # type: ignore[union-attr]


def state_of(sweep: Sweep) -> dict[str, Any]:
    """Everything that a page or a file shows of a sweep, as plain JSON."""
    plan, attributes = sweep.plan, sweep.attributes
    status = status_of(attributes)
    trials = shown_trials(sweep)
    if status != "running":
        trials = [broken_off(trial) for trial in trials]
    best = best_of(trials)
    title, formula = OBJECTIVES[plan.objective]
    return {
        "name": sweep.name,
        "status": status,
        "fault": attributes.get(FAULT, ""),
        "objective": {"key": plan.objective, "title": title, "formula": formula},
        "about": about(plan),
        "target": plan.target.name,
        "method": plan.method,
        "fields": [vary.field for vary in plan.space.varied],
        "num_trials": plan.num_trials,
        "num_done": num_done(trials, plan.mode),
        "more_to_try": more_to_try(plan),
        "trials": [row_of(trial) for trial in trials],
        "best": None if best is None else best.number,
        "as_good": [] if best is None else _numbers(as_good(best, trials, plan.objective)),
        "verdict": "" if best is None else verdict(plan, trials, best),
        "formulas": FORMULAS,
    }


def more_to_try(plan: SweepPlan) -> bool:
    """Whether a finished search would find points that it has not measured."""
    most = plan.space.num_points
    return plan.mode == "search" and (most is None or most > plan.trials)


def about(plan: SweepPlan) -> str:
    """The plan in one line."""
    space = " × ".join(f"{vary.field} {vary}" for vary in plan.space.varied)
    how = "grid" if plan.mode == "grid" else "search"
    target = plan.target.title or plan.target.name
    prompts = f"{plan.num_pairs} answers of {plan.limits.max_new_tokens} tokens, {plan.suite}"
    return f"{target} · {plan.title} · {how} · {space} · {prompts}"


def row_of(trial: Trial) -> dict[str, Any]:
    """A trial as a row."""
    figures = None
    if trial.figures is not None:
        figures = {k: v for k, v in dataclasses.asdict(trial.figures).items() if k != "ratios"}
    return {
        "number": trial.number,
        "point": trial.point,
        "outcome": trial.outcome,
        "reason": trial.reason,
        "figures": figures,
        "seconds": trial.seconds,
    }


def verdict(plan: SweepPlan, trials: list[Trial], best: Trial) -> str:
    """What the best trial means, in a sentence or two."""
    assert best.figures is not None
    settings = ", ".join(f"{field} {shown(value)}" for field, value in best.point.items())
    title = OBJECTIVES[plan.objective][0]
    words = f"Best so far: {settings}, with {title} {best.figures.value:.2f}"
    words += f"{_gain(plan, trials, best)}."
    ties = _numbers(as_good(best, trials, plan.objective))
    if ties:
        more = f" and {len(ties) - MOST_NAMED} more" if len(ties) > MOST_NAMED else ""
        named = ", ".join(map(str, ties[:MOST_NAMED]))
        words += f" As good within the noise: trial{'s' * (len(ties) > 1)} {named}{more}."
    speedup = best.figures.speedup
    if speedup is not None and speedup < 1:
        words += f" Plain decoding is faster: the speedup is {speedup:.2f}."
    differing = best.figures.num_prompts - best.figures.num_same
    if differing and plan.sampling.greedy and plan.space.base.lossless:
        words += f" {differing} of {best.figures.num_prompts} answers differ from plain decoding's."
    return words


def _gain(plan: SweepPlan, trials: list[Trial], best: Trial) -> str:
    """How much better the best is than the settings that the sweep began from."""
    key = key_of(plan.space.start)
    start = next((t for t in trials if t.outcome == "measured" and t.key == key), None)
    if start is None or start.figures is None or best.figures is None or not start.figures.value:
        return ""
    if start.number == best.number:
        return "; these are the settings it began from"
    gain = best.figures.value / start.figures.value
    return f", {gain:.2f} times that of the settings it began from"


def _numbers(trials: list[Trial]) -> list[int]:
    return [trial.number for trial in trials]


def config_of(sweep: Sweep, number: int | None = None) -> MethodConfig:
    """The method's settings in a trial; in the best one without a number.

    Raises:
        ConfigError: there is no such trial, or none was measured yet.
    """
    trials = shown_trials(sweep)
    if number is None:
        found = best_of(trials)
        if found is None:
            raise ConfigError(f"Sweep {sweep.name} has measured nothing yet. Let it run on.")
    else:
        found = next((trial for trial in trials if trial.number == number), None)
        if found is None:
            raise ConfigError(f"Sweep {sweep.name} has no trial {number}.")
    return sweep.plan.space.config(found.point)


def preset_yaml(sweep: Sweep, number: int | None = None) -> str:
    """A trial's settings as a method file, for `--method FILE.yaml` or `presets/methods`.

    Raises:
        ConfigError: there is no such trial, or none was measured yet.
    """
    config = config_of(sweep, number)
    trials = {trial.number: trial for trial in shown_trials(sweep)}
    best = best_of(list(trials.values()))
    chosen = trials[number] if number is not None else best
    assert chosen is not None
    defaults = type(config).parse({}).model_dump(mode="json")
    settings = {
        key: value
        for key, value in config.model_dump(mode="json").items()
        if key == "decoding_type" or value != defaults[key]
    }
    values = {
        "name": f"{sweep.name}-{chosen.number}",
        "title": f"{type(config).title}, tuned",
        "description": _described(sweep, chosen),
        "config": settings,
    }
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=100)


def _described(sweep: Sweep, trial: Trial) -> str:
    plan = sweep.plan
    words = f"Trial {trial.number} of sweep {sweep.name} on {plan.target.name}"
    if trial.figures is None:
        return f"{words}."
    title = OBJECTIVES[plan.objective][0]
    return f"{words}: {title} {trial.figures.value:.3g} over {trial.figures.num_prompts} answers."
