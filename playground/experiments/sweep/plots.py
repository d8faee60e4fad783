"""Optuna's own plots of a sweep, readable in light and dark."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import optuna
import optuna.visualization as draw
import plotly.graph_objects as go
from optuna.importance import PedAnovaImportanceEvaluator
from optuna.trial import TrialState
from plotly.colors import sample_colorscale

from engine.errors import ConfigError, validate_choice
from playground.experiments.report.columns import COLUMNS
from playground.experiments.sweep.report import SweepResults
from playground.experiments.sweep.trials import study_of
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


def sweep_figure(sweep: SweepResults, kind: str) -> go.Figure:
    """Optuna's plot of a sweep."""
    plot = PLOTS[validate_choice("plot", kind, PLOTS)]
    if sweep.best is None:
        raise ConfigError("Nothing has been measured yet.")
    study = study_of(sweep.plan, sweep.trials)
    fields = [vary.field for vary in sweep.plan.chooser.varied]
    figure = plot(study, fields, COLUMNS[sweep.plan.chooser.objective].title)
    figure.layout.title = None
    if kind in ("history", "slice"):  # a difference of a thousandth is no cliff
        figure.update_yaxes(rangemode="tozero")
    return styled(figure, height=300)


def _from_one(numbers: Sequence[int]) -> list[int]:
    """Optuna counts trials from 0."""
    return [number + 1 for number in numbers]


def _history(study: optuna.Study, fields: list[str], title: str) -> go.Figure:
    figure = draw.plot_optimization_history(study, target_name=title)
    figure.data = [trace for trace in figure.data if trace.name != "Infeasible Trial"]
    for trace in figure.data:
        trace.x = _from_one(trace.x)
    figure.update_traces(marker_color=SCALE[1][1], selector={"mode": "markers"})
    figure.update_traces(name="best so far", line_color=BEST, selector={"mode": "lines"})
    return figure


def _parallel(study: optuna.Study, fields: list[str], title: str) -> go.Figure:
    figure = draw.plot_parallel_coordinate(study, params=fields, target_name=title)
    figure.layout.xaxis.ticktext = (title, *sorted(fields))  # it cuts long names
    figure.update_traces(marker_colorscale=SCALE, marker_reversescale=False)
    for trace in figure.data:
        if trace.mode == "lines":
            best, (color,) = trace.y[0] == 1.0, sample_colorscale(SCALE, trace.y[0])
            trace.line.color, trace.line.width = (BEST, 3) if best else (color, 1.2)
    return figure


def _slice(study: optuna.Study, fields: list[str], title: str) -> go.Figure:
    figure = draw.plot_slice(study, params=fields, target_name=title)
    for trace in figure.data:
        trace.marker.color = _from_one(trace.marker.color)
    return figure.update_traces(marker_colorscale=SCALE)


def _importance(study: optuna.Study, fields: list[str], title: str) -> go.Figure:
    measured = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    values = sorted((one.value or 0.0 for one in measured), reverse=True)
    if len(values) < MIN_FOR_IMPORTANCE:
        raise ConfigError(
            f"Importance needs {MIN_FOR_IMPORTANCE} measured trials; there are {len(values)}."
        )
    share = min(0.5, max(0.1, TOP / len(values)))
    if values[math.ceil(share * len(values)) - 1] == values[-1]:
        raise ConfigError("All trials came out equal, so no setting matters more than another.")
    judge = PedAnovaImportanceEvaluator(target_quantile=share)
    figure = draw.plot_param_importances(study, evaluator=judge, target_name=title)
    return figure.update_traces(marker_color=SCALE[1][1])


PLOTS: dict[str, Callable[[optuna.Study, list[str], str], go.Figure]] = {
    "history": _history,
    "parallel": _parallel,
    "slice": _slice,
    "importance": _importance,
}
