"""Plotly figures of a report, readable in light and dark mode.

Plain decoding is grey; every other configuration keeps its colour from plot to plot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import plotly.graph_objects as go

from engine.errors import validate_choice
from playground.experiments.report.report import Report, Section
from playground.experiments.statistics import FinishedRequest
from playground.host.speedup import Speedup
from playground.plots import GREY, HUES, TEXT, styled

TALLEST = 2.0
"""Largest height of the plot over that of the tallest bar."""
LEVELS = (1, 2, 4)
"""Speedups whose lines are drawn in the plot of MAT against step time."""
NARROW_PX, LINE_PX, SYMBOL_PX, CHAR_PX = 640, 19, 46, 6
"""Assumed width of a legend, and sizes of its lines, symbols and letters."""
CONTEXT = "tokens of context: prompt + half of the answer"
Requests = Sequence[FinishedRequest]
Points = Sequence[tuple[float, float]]


def _colour(report: Report, section: Section) -> str:
    place = report.configurations.index(section) - 1
    return GREY if place < 0 else HUES[place % len(HUES)]


def _speedups(report: Report, requests: Requests) -> go.Figure:
    figure, drawn = go.Figure(), list[Speedup]()
    for section in report.configurations[1:]:
        cells = [*(section.groups.get(group) for group in report.groups), section.overall]
        fast = [None if cell is None else cell.speedup for cell in cells]
        drawn += filter(None, fast)
        figure.add_bar(
            name=section.name,
            x=[*report.groups, "overall"],
            y=[f and f.ratio for f in fast],
            marker_color=_colour(report, section),
            error_y={
                "type": "data",
                "symmetric": False,
                "array": [f.high - f.ratio if f and f.ratio and f.high else 0 for f in fast],
                "arrayminus": [f.ratio - f.low if f and f.ratio and f.low else 0 for f in fast],
                "thickness": 1,
                "width": 0,  # caps are drawn where there is no interval, too
                "color": TEXT,
            },
            hovertemplate=f"{section.name} %{{x}}: %{{y:.2f}}×<extra></extra>",
        )
    figure.add_hline(y=1, line={"width": 1, "dash": "dot", "color": GREY})
    # The interval of two prompts may exceed any plot.
    tops = [min(one.high or 0.0, TALLEST * one.ratio) for one in drawn if one.ratio]
    highest = max([1.0, *(one.ratio or 0.0 for one in drawn), *tops])
    return figure.update_layout(barmode="group", bargap=0.25, yaxis={"range": [0, 1.08 * highest]})


def _cost(report: Report, requests: Requests) -> go.Figure:
    figure = go.Figure()
    measured = [section for section in report.configurations if section.overall.num_steps]
    longest = 1.12 * max((one.overall.step_ms or 0 for one in measured), default=1)
    highest = 1.15 * max((one.overall.mat or 0 for one in measured), default=1.5)
    for section in measured:
        figure.add_scatter(
            name=section.name,
            x=[section.overall.step_ms],
            y=[section.overall.mat],
            mode="markers",
            marker={"size": 11, "color": _colour(report, section)},
            hovertemplate=f"{section.name}: MAT %{{y:.2f}}, %{{x:.2f}} ms a step<extra></extra>",
        )
    plain = report.configurations[0].overall.step_ms or 0.0
    for level in LEVELS if plain else ():
        end = min(longest, highest * plain / level)
        line = {"width": 1, "dash": "dot", "color": GREY}
        height = level * end / plain
        figure.add_shape(type="line", x0=0, y0=0, x1=end, y1=height, line=line, layer="below")
        figure.add_annotation(x=end, y=height, text=f"{level}×", showarrow=False, xanchor="right")
    figure.update_xaxes(title="ms per step", range=[0, longest])
    return figure.update_yaxes(title="MAT", range=[0, highest])


def _lines(
    x_title: str, y_title: str, points_of: Callable[[Section], Points]
) -> Callable[[Report, Requests], go.Figure]:
    """Draws a line per configuration that has points."""

    def draw(report: Report, requests: Requests) -> go.Figure:
        figure = go.Figure()
        for section in report.configurations:
            if points := points_of(section):
                figure.add_scatter(
                    name=section.name,
                    x=[x for x, _ in points],
                    y=[y for _, y in points],
                    mode="lines+markers",
                    line={"color": _colour(report, section), "width": 2},
                    marker={"size": 5},
                )
        figure.update_xaxes(title=x_title)
        return figure.update_yaxes(title=y_title, rangemode="tozero")

    return draw


_positions = _lines(
    "draft tokens accepted (at least)",
    "% of steps",
    lambda section: [(at, 100 * rate) for at, rate in enumerate(section.position_rates, 1)],
)
_tok_s_by_context = _lines(
    CONTEXT, "tok/s", lambda section: [(one.context_len, one.tok_s) for one in section.by_context]
)
_mat_by_context = _lines(
    CONTEXT,
    "MAT",
    lambda section: [
        (one.context_len, one.mat)
        for one in section.by_context
        if one.mat is not None and not section.reference
    ],
)


def _split(report: Report, requests: Requests) -> go.Figure:
    figure = go.Figure()
    splits = {s.name: s.time_split.ms for s in report.configurations if s.time_split}
    colours = {"draft": HUES[2], "verify": HUES[0], "accept": HUES[3], "roll-back": HUES[4]}
    for part in dict.fromkeys(name for split in splits.values() for name in split):
        figure.add_bar(
            name=part,
            y=list(splits),
            x=[split.get(part, 0.0) for split in splits.values()],
            orientation="h",
            marker_color=colours.get(part, GREY),
        )
    figure.update_layout(barmode="stack", yaxis={"autorange": "reversed"})
    return figure.update_xaxes(title="ms per step")


def _latency(report: Report, requests: Requests) -> go.Figure:
    figure = go.Figure()
    for section in report.configurations:
        own = [1000 * r.latency_s for r in requests if r.configuration == section.name]
        colour = _colour(report, section)
        figure.add_box(name=section.name, y=own, marker_color=colour, boxpoints="outliers")
    figure.update_yaxes(title="request latency (ms)", rangemode="tozero")
    return figure.update_layout(showlegend=False)


PLOTS: dict[str, tuple[str, Callable[[Report, Requests], go.Figure]]] = {
    "speedup": ("Speedup over plain decoding", _speedups),
    "cost": ("MAT against step time", _cost),
    "positions": ("Acceptance by position", _positions),
    "split": ("Where a step's time goes", _split),
    "latency": ("Request latency", _latency),
    "context": ("tok/s over context length", _tok_s_by_context),
    "mat_by_context": ("MAT over context length", _mat_by_context),
}
"""Title of each figure, and how it is drawn."""


def report_figure(report: Report, requests: Requests, kind: str) -> go.Figure:
    """One of `PLOTS`."""
    _, draw = PLOTS[validate_choice("plot", kind, PLOTS)]
    return _with_legend_below(styled(draw(report, requests)))


def _with_legend_below(figure: go.Figure) -> go.Figure:
    """The figure with its legend below, and high enough for it on a narrow page.

    On a wider page the legend needs fewer lines and the plot fills the rest; a longer legend
    scrolls.
    """
    names = [trace.name for trace in figure.data]
    if not names or figure.layout.showlegend is False:
        return figure
    columns = max(1, NARROW_PX // (SYMBOL_PX + CHAR_PX * max(map(len, names))))
    lines = max(min(3, len(names)), -(-len(names) // columns))
    legend_px = LINE_PX * (lines + 1)  # one for the margins
    legend = {"yref": "container", "y": 0, "yanchor": "bottom", "maxheight": legend_px}
    return figure.update_layout(height=figure.layout.height + legend_px, legend=legend)
