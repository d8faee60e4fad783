"""Figures of compared configurations as plotly charts, readable on light and dark ground."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from playground.plots import HUES, TEXT, styled
from playground.runs.columns import FIGURES, formula
from playground.runs.compare import SPLIT, ComparedRuns, Configuration

if TYPE_CHECKING:
    import plotly.graph_objects as go

DRAWN = ("tok_s", "speedup", "mat", "ttft_s", "step_p50_ms")
AXES = ("draft_acceptance", "mat", "step_p50_ms", "ttft_s", "tok_s")
SPLIT_COLORS = ("#d97706", "#2563eb", "#16a34a", "#94a3b8")
ROW_PX = 22


def color(place: int) -> str:
    """The colour of a configuration, by its place in the comparison."""
    return HUES[place % len(HUES)]


def charts(compared: ComparedRuns) -> list[go.Figure]:
    """A chart per figure that was measured, and one of the time of a step."""
    configurations = compared.configurations
    known = [name for name in DRAWN if any(each.spread(name) for each in configurations)]
    found = [spread_chart(configurations, name) for name in known]
    if any(each.spread("verify_s") for each in configurations):
        found.append(split_chart(configurations))
    return found


def spread_chart(configurations: Sequence[Configuration], name: str) -> go.Figure:
    """A bar and a whisker per configuration: mean and standard deviation; a dot per repeat."""
    figure, spreads = FIGURES[name], [each.spread(name) for each in configurations]
    bars = _bars(
        [figure.scale * spread.mean if spread else None for spread in spreads],
        [
            f"{c.name}: {figure.spread_text(s)}"
            for c, s in zip(configurations, spreads, strict=True)
        ],
        marker={"color": [color(place) for place in range(len(spreads))]},
        opacity=0.6,
    )
    whiskers = [figure.scale * ((spread and spread.std) or 0) for spread in spreads]
    bars["error_x"] = {"array": whiskers, "color": TEXT, "thickness": 1}
    dots = [
        (str(place), figure.scale * value, color(place))
        for place, each in enumerate(configurations)
        for value in each.values[name]
        if value is not None and len(each.run_ids) > 1
    ]
    y, x, colors = zip(*dots, strict=True) if dots else ((), (), ())
    points: dict[str, Any] = {"type": "scatter", "mode": "markers", "y": y, "x": x}
    points |= {"marker": {"size": 6, "color": colors}, "hoverinfo": "x"}
    means = [figure.text(spread.mean if spread else None) for spread in spreads]
    return _chart([bars, points], figure.title, formula(name), means)


def split_chart(configurations: Sequence[Configuration]) -> go.Figure:
    """Where the time of a step goes: one stacked bar per configuration."""
    spreads = [[each.spread(part) for part in SPLIT] for each in configurations]
    means = [[spread.mean if spread else 0.0 for spread in row] for row in spreads]
    bars = []
    for i, part in enumerate(SPLIT):
        texts = [FIGURES[part].text(row[i]) for row in means]
        told = [f"{c.name}: {part[:-2]} {t} ms" for c, t in zip(configurations, texts, strict=True)]
        values = [1000 * row[i] for row in means]
        bars.append(_bars(values, told, name=part[:-2], marker={"color": SPLIT_COLORS[i]}))
    sums = [FIGURES[SPLIT[0]].text(sum(row)) for row in means]
    legend = {"orientation": "h", "x": 1, "xanchor": "right", "y": 1, "yanchor": "bottom"}
    more = {"barmode": "stack", "showlegend": True, "legend": legend}
    return _chart(bars, "ms per step", formula(SPLIT[0]), sums, **more)


def _bars(x: Sequence[float | None], told: Sequence[str], **more: Any) -> dict[str, Any]:
    """A bar per configuration, from left to right, with what is told when it is pointed at."""
    y = [str(place) for place in range(len(x))]
    bars = {"type": "bar", "orientation": "h", "y": y, "x": x}
    return bars | {"hovertext": told, "hoverinfo": "text"} | more


def _chart(
    traces: list[dict[str, Any]], title: str, help: str, labels: list[str], **more: Any
) -> go.Figure:
    """Bars under a title whose tooltip is the formula; `labels` stand at the right."""
    import plotly.graph_objects as go

    heading = {"text": f"<b>{title}</b>", "hovertext": help, "x": 0, "y": 1, "yanchor": "bottom"}
    right = {"side": "right", "ticktext": labels, "tickvals": list(range(len(labels)))}
    layout = {
        "annotations": [heading | {"xref": "paper", "yref": "paper", "showarrow": False}],
        "xaxis": {"rangemode": "tozero", "zeroline": False, "nticks": 6},
        "yaxis": {"autorange": "reversed", "showgrid": False, "zeroline": False} | right,
        "margin": {"l": 8, "r": 56, "t": 30, "b": 26},
        "showlegend": False,
    }
    figure = styled(go.Figure(traces), height=70 + ROW_PX * len(labels))
    return figure.update_layout(layout | more)


def parallel_chart(compared: ComparedRuns) -> go.Figure:
    """A line per run over an axis per setting that differs and per figure."""
    import plotly.graph_objects as go

    configurations = compared.configurations
    dimensions: list[dict[str, Any]] = []
    for axis in compared.axes:
        texts = [text[:20] for text in axis.texts or ()]
        ticks = {"tickvals": list(range(len(texts))), "ticktext": texts} if texts else {}
        label = axis.name.partition(".")[2] or axis.name
        dimensions.append({"label": label, "values": axis.values, **ticks})
    for name in AXES:
        figure, values = FIGURES[name], [v for each in configurations for v in each.values[name]]
        if any(value is not None for value in values):
            scaled = [None if value is None else figure.scale * value for value in values]
            dimensions.append({"label": figure.title, "values": scaled})
    last = max(len(configurations) - 1, 1)
    line = {
        "color": [place for place, each in enumerate(configurations) for _ in each.run_ids],
        "cmin": 0,
        "cmax": last,
        "colorscale": [[place / last, color(place)] for place in range(last + 1)],
    }
    help = "One line per run. Drag along an axis to filter by a range."
    title = {"text": help, "font": {"size": 11}, "x": 0.005, "y": 0.985, "yanchor": "top"}
    margin = {"l": 70, "r": 60, "t": 76, "b": 20}
    lines = {"type": "parcoords", "dimensions": dimensions, "line": line}
    return styled(go.Figure([lines]), height=340).update_layout(margin=margin, title=title)
