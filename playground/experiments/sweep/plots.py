"""Optuna's own plots of a sweep, readable in light and dark."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import optuna.visualization as draw
import plotly.graph_objects as go
from optuna.importance import PedAnovaImportanceEvaluator
from plotly.colors import sample_colorscale

from engine.errors import ConfigError, one_of
from playground.experiments.sweep.plan import OBJECTIVES
from playground.experiments.sweep.store import StoredSweep, database_errors
from playground.experiments.sweep.trials import by_record
from playground.plots import styled

MIN_FOR_IMPORTANCE = 6
TOP = 4
"""Best trials that importance is judged by, at least."""
SCALE = [[0.0, "rgb(161, 161, 170)"], [1.0, "rgb(59, 130, 246)"]]
"""Grey to blue; both show on white and on black."""
BEST = "rgb(217, 119, 6)"
NOTES: dict[str, str] = {
    "history": "Every measured trial in the order it was run, and the best so far.",
    "parallel": "One line per measured trial, from its value to its settings; amber is the best.",
    "slice": "Every measured trial by one setting at a time; later trials are bluer.",
    "importance": "How much each setting decides whether a trial is among the best (PED-ANOVA).",
}


def sweep_figure(sweep: StoredSweep, kind: str) -> go.Figure:
    """Optuna's plot of a sweep."""
    plot = DRAWN[one_of("plot", kind, DRAWN)]
    values = sorted((t.value for t in sweep.trials() if t.value is not None), reverse=True)
    if not values:
        raise ConfigError("Nothing has been measured yet.")
    with database_errors():
        figure = plot(sweep, OBJECTIVES[sweep.plan.chooser.objective][0], values)
    figure.layout.title = None
    if kind in ("history", "slice"):  # a difference of a thousandth is no cliff
        figure.update_yaxes(rangemode="tozero")
    return styled(figure, height=300)


def _numbers(sweep: StoredSweep, records: Iterable[int]) -> list[int]:
    """Numbers of trials, by Optuna's numbers of them."""
    trials = by_record(sweep.study.get_trials(deepcopy=False))
    return [trials[record].number for record in records]


def _fields(sweep: StoredSweep) -> list[str]:
    return [vary.field for vary in sweep.plan.chooser.varied]


def _history(sweep: StoredSweep, title: str, values: list[float]) -> go.Figure:
    figure = draw.plot_optimization_history(sweep.study, target_name=title)
    figure.data = [trace for trace in figure.data if trace.name != "Infeasible Trial"]
    for trace in figure.data:
        trace.x = _numbers(sweep, trace.x)
    figure.update_traces(marker_color=SCALE[1][1], selector={"mode": "markers"})
    figure.update_traces(name="best so far", line_color=BEST, selector={"mode": "lines"})
    return figure


def _parallel(sweep: StoredSweep, title: str, values: list[float]) -> go.Figure:
    figure = draw.plot_parallel_coordinate(sweep.study, params=_fields(sweep), target_name=title)
    figure.layout.xaxis.ticktext = (title, *sorted(_fields(sweep)))  # it cuts long names
    figure.update_traces(marker_colorscale=SCALE, marker_reversescale=False)
    for trace in figure.data:
        if trace.mode == "lines":
            best, (color,) = trace.y[0] == 1.0, sample_colorscale(SCALE, trace.y[0])
            trace.line.color, trace.line.width = (BEST, 3) if best else (color, 1.2)
    return figure


def _slice(sweep: StoredSweep, title: str, values: list[float]) -> go.Figure:
    figure = draw.plot_slice(sweep.study, params=_fields(sweep), target_name=title)
    for trace in figure.data:
        trace.marker.color = _numbers(sweep, trace.marker.color)
    return figure.update_traces(marker_colorscale=SCALE)


def _importance(sweep: StoredSweep, title: str, values: list[float]) -> go.Figure:
    if len(values) < MIN_FOR_IMPORTANCE:
        raise ConfigError(
            f"Importance needs {MIN_FOR_IMPORTANCE} measured trials; there are {len(values)}."
        )
    share = min(0.5, max(0.1, TOP / len(values)))
    if values[math.ceil(share * len(values)) - 1] == values[-1]:
        raise ConfigError("All trials came out equal, so no setting matters more than another.")
    judge = PedAnovaImportanceEvaluator(target_quantile=share)
    figure = draw.plot_param_importances(sweep.study, evaluator=judge, target_name=title)
    return figure.update_traces(marker_color=SCALE[1][1])


DRAWN: dict[str, Callable[[StoredSweep, str, list[float]], go.Figure]] = {
    "history": _history,
    "parallel": _parallel,
    "slice": _slice,
    "importance": _importance,
}
