"""Optuna's own plots of a sweep, readable in light and dark."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import optuna.visualization as draw
import plotly.graph_objects as go
from optuna.importance import PedAnovaImportanceEvaluator

from engine.errors import ConfigError
from playground.experiments.sweep.plan import OBJECTIVES
from playground.experiments.sweep.store import StoredSweep, database_errors
from playground.experiments.sweep.trials import Trial
from playground.plots import styled

MIN_FOR_IMPORTANCE = 6
MOST_TICKS = 12
TOP = 4
"""Best trials that importance is judged by, at least."""
WORST, GOOD = (161, 161, 170), (59, 130, 246)
"""Grey to blue; both show on white and on black."""
BEST = "rgb(217, 119, 6)"


def sweep_figure(sweep: StoredSweep, kind: str) -> go.Figure:
    """Optuna's plot of a sweep."""
    if kind not in DRAWN:
        raise ConfigError(f"plot must be one of {', '.join(DRAWN)}, got {kind!r:.60}.")
    if not _values(sweep.trials()):
        raise ConfigError("Nothing has been measured yet.")
    with database_errors():
        figure = DRAWN[kind](sweep, OBJECTIVES[sweep.plan.chooser.objective][0])
    figure.layout.title = None
    if kind in ("history", "slice"):  # a difference of a thousandth is no cliff
        figure.update_yaxes(rangemode="tozero")
    return styled(figure, height=300)


NOTES: dict[str, str] = {
    "history": "Every measured trial in the order it was run, and the best so far.",
    "parallel": "One line per measured trial, from its value to its settings; amber is the best.",
    "slice": "Every measured trial by one setting at a time; later trials are bluer.",
    "importance": "How much each setting decides whether a trial is among the best (PED-ANOVA).",
}


def _values(trials: list[Trial]) -> list[float]:
    return [t.value for t in trials if t.value is not None]


def _at_measured(figure: go.Figure) -> go.Figure:
    """Ticks only at what was measured, where that is a few whole numbers."""
    for trace in figure.data:
        values = sorted({x for x in trace.x if type(x) is int})
        if len(values) == len(set(trace.x)) <= MOST_TICKS:
            figure.layout["xaxis" + (trace.xaxis or "x")[1:]].tickvals = values
    return figure


def _history(sweep: StoredSweep, title: str) -> go.Figure:
    figure = draw.plot_optimization_history(sweep.study, target_name=title)
    figure.data = [trace for trace in figure.data if trace.name != "Infeasible Trial"]
    figure.update_traces(marker_color=_rgb(1.0), selector={"mode": "markers"})
    figure.update_traces(name="best so far", line_color=BEST, selector={"mode": "lines"})
    return _at_measured(figure)


def _parallel(sweep: StoredSweep, title: str) -> go.Figure:
    fields = [vary.field for vary in sweep.plan.chooser.varied]
    figure = draw.plot_parallel_coordinate(sweep.study, params=fields, target_name=title)
    names = (title, *sorted(fields))  # Optuna's order; it cuts long names
    figure.layout.xaxis.ticktext = names
    for trace in figure.data:
        if trace.mode == "lines":
            values = [value for _, value in trace.customdata]
            trace.customdata = [list(pair) for pair in zip(names, values, strict=True)]
            best = trace.y[0] == 1.0
            trace.line.color = BEST if best else _rgb(trace.y[0])
            trace.line.width = 3 if best else 1.2
            trace.opacity = 1 if best else 0.8
        else:
            trace.marker.colorscale = _scale()
            trace.marker.reversescale = False
    return figure


def _slice(sweep: StoredSweep, title: str) -> go.Figure:
    fields = [vary.field for vary in sweep.plan.chooser.varied]
    figure = draw.plot_slice(sweep.study, params=fields, target_name=title)
    figure.update_traces(marker_colorscale=_scale())
    return _at_measured(figure)


def _importance(sweep: StoredSweep, title: str) -> go.Figure:
    values = sorted(_values(sweep.trials()), reverse=True)
    if len(values) < MIN_FOR_IMPORTANCE:
        raise ConfigError(
            f"Importance needs {MIN_FOR_IMPORTANCE} measured trials; there are {len(values)}."
        )
    share = min(0.5, max(0.1, TOP / len(values)))
    if values[math.ceil(share * len(values)) - 1] == values[-1]:
        raise ConfigError("All trials came out equal, so no setting matters more than another.")
    judge = PedAnovaImportanceEvaluator(target_quantile=share)
    figure = draw.plot_param_importances(sweep.study, evaluator=judge, target_name=title)
    figure.update_traces(marker_color=_rgb(1.0))
    return figure


def _rgb(share: float) -> str:
    """A colour between the worst (0) and a good one (1)."""
    mixed = (round(a + share * (b - a)) for a, b in zip(WORST, GOOD, strict=True))
    return f"rgb({', '.join(map(str, mixed))})"


def _scale() -> list[list[Any]]:
    return [[0.0, _rgb(0.0)], [1.0, _rgb(1.0)]]


DRAWN: dict[str, Callable[[StoredSweep, str], go.Figure]] = {
    "history": _history,
    "parallel": _parallel,
    "slice": _slice,
    "importance": _importance,
}
