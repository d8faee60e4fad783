"""How a sweep stands: its state, its trials as a table, one of them as a card."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from playground.experiments.job import Job
from playground.experiments.space import shown
from playground.experiments.sweep.report import (
    FORMULAS,
    figure_text,
    standing_of,
    trial_columns,
    trial_table,
)
from playground.web.results import HTML, table_html

Trial = Mapping[str, Any]
STATUS_TEXTS = {
    "running": "running",
    "completed": "done",
    "cancelled": "stopped",
    "failed": "failed",
    "interrupted": "interrupted: its process died",
}
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


def state_text(state: Mapping[str, Any], job: Job | None) -> str:
    """Where a sweep is."""
    parts = [f"{state['num_done']} of {state['num_trials']} trials"]
    now = job and job.progress
    if job is not None and job.cancelled():
        parts.append("stopping")
    elif now and now.trial:
        trial = now.trial
        point = ", ".join(f"{name} {shown(value)}" for name, value in trial.point.items())
        parts.append(f"trial {trial.number}: {point}")
        parts += [f"{trial.num_pairs} of {trial.num_planned} answered", now.message]
    else:
        parts.append(STATUS_TEXTS[state["status"]])
    return " · ".join(filter(None, parts))


def trials_html(state: Mapping[str, Any]) -> str:
    """The trials as a table: settings, then figures."""
    return table_html("Trials", *trial_table(state), best=str(state["best"]))


def card_html(state: Mapping[str, Any], trial: Trial) -> str:
    """The picked trial: its settings, figures, and what is to be said of it."""
    is_best = trial["number"] == state["best"]
    remark = state["verdict"] if is_best else ""
    if trial["reason"]:
        remark = f"{standing_of(state, trial)}: {trial['reason']}"
    elif trial["number"] in state["as_good"]:
        remark = f"As good as the best: {FORMULAS['as_good']}."
    return CARD.render(
        title=f"Best: trial {trial['number']}" if is_best else f"Trial {trial['number']}",
        point=", ".join(f"{name} {shown(trial['point'].get(name))}" for name in state["fields"]),
        figures=[
            (name, title, figure_text(state, trial, name), formula)
            for name, title, formula in trial_columns(state)
        ],
        remark=f"{state['about']}. {remark}",
    )
