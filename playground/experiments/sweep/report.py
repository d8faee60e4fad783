"""What a sweep has found so far: its trials, the best of them, and that one as a method file.

Every trial answers the same prompts, so trials are compared prompt by prompt (`is_apart`). The best
is picked on the data that it is compared on, so it is compared with Bonferroni's correction for the
number of the others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from engine import formats
from engine.drafters.method import MethodConfig
from engine.errors import ConfigError
from engine.formats import DASH
from playground.experiments.report.columns import Cell
from playground.experiments.report.statistics import is_apart
from playground.experiments.space import Objective, point_text, setting_text
from playground.experiments.sweep.plan import OBJECTIVES, SweepPlan
from playground.experiments.sweep.store import StoredSweep
from playground.experiments.sweep.trials import Trial, key_of, num_done
from playground.host.baseline import DOUBTS

FIGURE_TITLES = {
    "speedup": "speedup",
    "tok_s": "tok/s measured",
    "plain_tok_s": "plain tok/s",
    "mat": "MAT",
}
MOST_NAMED = 5
"""Trials that the verdict names."""
FORMULAS: dict[str, str] = {
    "value": "what the sweep maximises",
    "speedup": OBJECTIVES["speedup"][1],
    "tok_s": "new tokens after the first / seconds of decoding, over all answers of the trial",
    "plain_tok_s": "the same for plain decoding, which takes turns with the method on every prompt",
    "mat": OBJECTIVES["mat"][1],
    "same": "answers identical to plain decoding's / answers compared",
    "seconds": "from the trial's start to its end, including loading the drafter",
    "as_good": "its speedup is not shown to differ from the best trial's, compared prompt by "
    "prompt (Student's t at 95%, corrected for the number of trials)",
}
"""Formula of every column."""


def best_of(trials: Sequence[Trial]) -> Trial | None:
    """The trial with the largest value; the earlier one of two equal ones."""
    measured = [(t.value, -t.number, t) for t in trials if t.value is not None]
    return max(measured, key=lambda one: one[:2])[2] if measured else None


def as_good(best: Trial, trials: Sequence[Trial], objective: Objective) -> list[Trial]:
    """Measured trials that cannot be told from the best one; none for MAT, which has no noise."""
    if objective == "mat" or best.figures is None:
        return []
    others = [t for t in trials if t.value is not None and t.figures and t.number != best.number]
    ours = best.figures.counts
    return [t for t in others if t.figures and not is_apart(ours, t.figures.counts, len(others))]


def state_of(sweep: StoredSweep) -> dict[str, Any]:
    """Everything that a page or a file shows of a sweep, as plain JSON."""
    plan, status, search = sweep.plan, sweep.row.status, sweep.plan.chooser
    trials = sweep.trials()
    best = best_of(trials)
    title, formula = OBJECTIVES[search.objective]
    most = plan.space.num_points
    return {
        "name": sweep.row.name,
        "status": status,
        "fault": sweep.fault,
        "objective": {"key": search.objective, "title": title, "formula": formula},
        "about": about(plan),
        "target": plan.target.name,
        "method": plan.swept.name,
        "fields": [vary.field for vary in search.varied],
        "num_trials": plan.num_trials,
        "num_done": num_done(trials, search.mode),
        # whether a finished search would find points that it has not measured
        "more_to_try": search.mode == "search" and (most is None or most > search.trials),
        "trials": [_row(trial, status) for trial in trials],
        "best": None if best is None else best.number,
        "as_good": [] if best is None else _numbers(as_good(best, trials, search.objective)),
        "verdict": "" if best is None else verdict(plan, trials, best),
        "formulas": FORMULAS,
    }


def trial_columns(state: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Every figure of a trial: its name, title and formula; what is maximised comes first."""
    objective = state["objective"]
    others = [
        (name, title, FORMULAS[name])
        for name, title in FIGURE_TITLES.items()
        if name != objective["key"] or name == "tok_s"
    ]
    return [("value", objective["title"], objective["formula"]), *others]


def figure_text(state: Mapping[str, Any], row: Mapping[str, Any], name: str) -> str:
    """A figure of a trial as its kind is written; `value` is of the kind that is maximised."""
    kind = state["objective"]["key"] if name == "value" else name
    return formats.of_kind(kind)((row["figures"] or {}).get(name))


def standing_of(state: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    """The outcome of a trial, or how it compares with the best one."""
    if row["outcome"] != "measured":
        return str(row["outcome"])
    if row["number"] == state["best"]:
        return "best"
    return "≈ best" if row["number"] in state["as_good"] else ""


def trial_table(
    state: Mapping[str, Any], *, best_first: bool = False
) -> tuple[dict[str, str], list[list[Cell]]]:
    """The trials as a table, by number: titles with formulas, and rows."""
    columns = trial_columns(state)
    heads = dict.fromkeys(("trial", "state", *state["fields"]), "")
    heads |= {title: formula for _, title, formula in columns} | {"same text": FORMULAS["same"]}
    rows = []
    for row in sorted(state["trials"], key=_by_value if best_first else _by_number):
        figures = row["figures"]
        same = f"{figures['num_same']}/{figures['num_prompts']}" if figures else DASH
        rows.append(
            [
                Cell(str(row["number"])),
                Cell(standing_of(state, row), hint=row["reason"] or ""),
                *(Cell(setting_text(row["point"].get(name))) for name in state["fields"]),
                *(Cell(figure_text(state, row, name)) for name, *_ in columns),
                Cell(same),
            ]
        )
    return heads, rows


def _by_number(row: Mapping[str, Any]) -> int:
    return int(row["number"])


def _by_value(row: Mapping[str, Any]) -> tuple[bool, float]:
    value = row["figures"] and row["figures"]["value"]
    return row["outcome"] != "measured", float("inf") if value is None else -value


def about(plan: SweepPlan) -> str:
    """The plan in one line."""
    space = " × ".join(f"{vary.field} {vary}" for vary in plan.chooser.varied)
    target = plan.target.title or plan.target.name
    suites = " + ".join(dict.fromkeys(item.suite for item in plan.items))
    prompts = f"{plan.num_turns} answers of {plan.limits.max_new_tokens} tokens, {suites}"
    return f"{target} · {plan.swept.title} · {plan.chooser.mode} · {space} · {prompts}"


def _row(trial: Trial, status: str) -> dict[str, Any]:
    """A trial as JSON; one that is not finished although the sweep does not run was broken off."""
    row = dataclasses.asdict(trial)
    if trial.outcome == "running" and status != "running":
        row["outcome"] = "stopped" if status == "cancelled" else "interrupted"
    if row["figures"] is not None:
        del row["figures"]["counts"], row["figures"]["told"]
        if doubt := row["figures"]["doubt"]:
            row["reason"] = row["reason"] or f"No speedup is given: {DOUBTS[doubt]}"
    return row


def verdict(plan: SweepPlan, trials: Sequence[Trial], best: Trial) -> str:
    """What the best trial means, in a sentence or two."""
    figures = best.figures
    assert figures is not None and figures.value is not None
    objective = plan.chooser.objective
    title = OBJECTIVES[objective][0]
    reached = f"{title} {_text(plan, figures.value)}{_gain(plan, trials, best, figures.value)}"
    parts = [f"Best so far: {point_text(best.point)}, with {reached}."]
    ties = _numbers(as_good(best, trials, objective))
    if ties:
        more = f" and {len(ties) - MOST_NAMED} more" if len(ties) > MOST_NAMED else ""
        named = ", ".join(map(str, ties[:MOST_NAMED]))
        parts.append(f"As good within the noise: trial{'s' * (len(ties) > 1)} {named}{more}.")
    num_others = sum(t.value is not None for t in trials) - 1
    if num_others and objective != "mat":
        parts.append(f"Exploratory: picked from {num_others + 1} trials on the same prompts.")
    if figures.speedup is not None and figures.speedup < 1:
        parts.append(
            f"Plain decoding is faster: the speedup is {formats.speedup(figures.speedup)}."
        )
    differing = figures.num_prompts - figures.num_same
    if differing and plan.sampling.greedy and plan.swept.lossless:
        parts.append(f"{differing} of {figures.num_prompts} answers differ from plain decoding's.")
    return " ".join(parts)


def _text(plan: SweepPlan, value: float | None) -> str:
    return formats.of_kind(plan.chooser.objective)(value)


def _gain(plan: SweepPlan, trials: Sequence[Trial], best: Trial, value: float) -> str:
    """How much better the best is than the settings that the sweep began from."""
    key = key_of(plan.space.start)
    start = next((t for t in trials if t.value and t.key == key), None)
    if start is None or not start.value:
        return ""
    if start.number == best.number:
        return "; these are the settings it began from"
    return f", {formats.speedup(value / start.value)} that of the settings it began from"


def _numbers(trials: Sequence[Trial]) -> list[int]:
    return [trial.number for trial in trials]


def chosen_trial(sweep: StoredSweep, number: int | None = None) -> Trial:
    """A trial by number; without one the best."""
    trials = sweep.trials()
    if number is None:
        if (best := best_of(trials)) is None:
            raise ConfigError(
                f"Sweep {sweep.row.name} has measured nothing yet. Let it run longer."
            )
        return best
    match = next((trial for trial in trials if trial.number == number), None)
    if match is None:
        raise ConfigError(f"Sweep {sweep.row.name} has no trial {number}.")
    return match


def config_of(sweep: StoredSweep, number: int | None = None) -> MethodConfig:
    """The method's settings in a trial; in the best one without a number."""
    return sweep.plan.space.config(chosen_trial(sweep, number).point)


def preset_yaml(sweep: StoredSweep, number: int | None = None) -> str:
    """A trial's settings as a method file, for `--method FILE.yaml` or `presets/methods`."""
    trial, plan = chosen_trial(sweep, number), sweep.plan
    config = plan.space.config(trial.point)
    defaults = type(config).parse({}).model_dump(mode="json")
    description = f"Trial {trial.number} of sweep {sweep.row.name} on {plan.target.name}"
    if trial.figures is not None and trial.figures.value is not None:
        title, figures = OBJECTIVES[plan.chooser.objective][0], trial.figures
        description += f": {title} {_text(plan, figures.value)} over {figures.num_prompts} answers"
    values = {
        "name": f"{sweep.row.name}-{trial.number}",
        "title": f"{type(config).title}, tuned",
        "description": f"{description}.",
        "config": {
            key: value
            for key, value in config.model_dump(mode="json").items()
            if key == "decoding_type" or value != defaults[key]
        },
    }
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=100)


def changed_settings(sweep: StoredSweep, base: MethodConfig, number: int | None) -> dict[str, Any]:
    """A trial's settings that differ from the method's, for the form of another page."""
    start, own = (one.model_dump(mode="json") for one in (base, config_of(sweep, number)))
    return {key: value for key, value in own.items() if start.get(key) != value}
