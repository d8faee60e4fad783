"""How a sweep stands: its state, its trials as a table, one of them as a card."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine import formats
from engine.formats import DASH
from playground.experiments.job import Job
from playground.experiments.sweep.space import shown
from playground.web.results import HTML, Cell, table_html

Trial = Mapping[str, Any]
STATUS_TEXTS = {
    "running": "running",
    "completed": "done",
    "stopped": "stopped",
    "failed": "failed",
    "interrupted": "interrupted: its process died",
}
OUTCOMES = {"killed": "interrupted", "stopped": "stopped"}
FIGURES = [
    ("speedup", "speedup"),
    ("tok_s", "tok/s measured"),
    ("plain_tok_s", "plain tok/s"),
    ("mat", "MAT"),
]
CARD = HTML.from_string("""
<div class="pg-card"><h3>{{ title }}</h3>
<p class="headline">{{ point }}</p>
<p class="figures">
{% for name, title, text, formula in figures %}
  <span><b data-figure="{{ name }}">{{ text }}</b> {{ title | term(formula) }}</span>
{% endfor %}
</p>
<p class="remark">{{ remark }}</p></div>
""")


def state_text(found: Mapping[str, Any], job: Job | None) -> str:
    """Where a sweep is."""
    parts = [f"{found['num_done']} of {found['num_trials']} trials"]
    now = job and job.progress
    if job is not None and job.cancelled():
        parts.append("stopping")
    elif now and now.trial:
        trial = now.trial
        point = ", ".join(f"{name} {shown(value)}" for name, value in trial.point.items())
        parts.append(f"trial {trial.number}: {point}")
        parts += [f"{trial.num_pairs} of {trial.num_planned} answered", now.message]
    else:
        parts.append(STATUS_TEXTS[found["status"]])
    return " · ".join(filter(None, parts))


def trials_html(found: Mapping[str, Any]) -> str:
    """The trials as a table: settings, then figures."""
    formulas, objective = found["formulas"], found["objective"]
    columns = [("value", objective["title"], objective["formula"])]
    columns += [
        (name, title, formulas[name])
        for name, title in FIGURES
        if name != objective["key"] or name == "tok_s"
    ]
    heads = dict.fromkeys(("trial", "state", *found["fields"]), "")
    heads |= {title: formula for _, title, formula in columns}
    rows: list[list[Cell | str]] = []
    for trial in sorted(found["trials"], key=lambda trial: int(trial["number"])):
        figures = trial["figures"] or {}
        same = f"{figures['num_same']}/{figures['num_prompts']}" if figures else DASH
        rows.append(
            [
                str(trial["number"]),
                Cell(standing(found, trial), hint=trial["reason"] or ""),
                *(shown(trial["point"].get(name)) for name in found["fields"]),
                *(_text(found, name, figures) for name, *_ in columns),
                same,
            ]
        )
    heads["same text"] = formulas["same"]
    return table_html("Trials", heads, rows, best=str(found["best"]))


def standing(found: Mapping[str, Any], trial: Trial) -> str:
    if trial["outcome"] != "measured":
        return OUTCOMES.get(trial["outcome"], str(trial["outcome"]))
    if trial["number"] == found["best"]:
        return "best"
    return "≈ best" if trial["number"] in found["as_good"] else ""


def _text(found: Mapping[str, Any], name: str, figures: Mapping[str, Any]) -> str:
    """A figure as its kind is written; `value` is of the kind that the sweep maximises."""
    return formats.of_kind(found["objective"]["key"] if name == "value" else name)(
        figures.get(name)
    )


def card_html(found: Mapping[str, Any], trial: Trial) -> str:
    """The picked trial: its settings, figures, and what is to be said of it."""
    is_best = trial["number"] == found["best"]
    figures, formulas = trial["figures"] or {}, found["formulas"]
    columns = [("value", found["objective"]["title"]), *FIGURES]
    remark = found["verdict"] if is_best else ""
    if trial["reason"]:
        remark = f"{standing(found, trial)}: {trial['reason']}"
    elif trial["number"] in found["as_good"]:
        remark = f"As good as the best: {formulas['as_good']}."
    return CARD.render(
        title=f"Best: trial {trial['number']}" if is_best else f"Trial {trial['number']}",
        point=", ".join(f"{name} {shown(trial['point'].get(name))}" for name in found["fields"]),
        figures=[(k, title, _text(found, k, figures), formulas[k]) for k, title in columns],
        remark=f"{found['about']}. {remark}",
    )
