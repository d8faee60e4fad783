"""Figures of a report, built by plotly: one style that is readable on light and on dark.

Plain decoding is grey; every other configuration keeps its colour from plot to plot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import plotly.graph_objects as go

from engine.errors import one_of
from playground.experiments.finished import FinishedRequest
from playground.experiments.report.report import Report, Section
from playground.experiments.report.statistics import Speedup
from playground.plots import GREY, HUES, TEXT, styled

TALLEST = 2.0
"""Height of the picture over a bar's, at most."""
LEVELS = (1, 2, 4)
"""Speedups whose lines are drawn where MAT meets the cost of a step."""
NARROW_PX, LINE_PX, SYMBOL_PX, CHAR_PX = 640, 19, 46, 6
"""Of a legend: the width that is reckoned with, and what a line, a symbol and a letter take."""
Requests = Sequence[FinishedRequest]


@dataclass(frozen=True, slots=True)
class Plot:
    """A figure that can be asked for, with its title and a note on what it shows."""

    title: str
    note: str
    draw: Callable[[Report, Requests], go.Figure]


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
    highest = max((_top(one) for one in drawn), default=1.0)
    return figure.update_layout(barmode="group", bargap=0.25, yaxis={"range": [0, 1.08 * highest]})


def _top(fast: Speedup) -> float:
    """Where its bar is drawn to; the whisker of two prompts may reach out of any picture."""
    ratio = fast.ratio or 0.0
    return max(1.0, ratio if fast.high is None else min(fast.high, TALLEST * ratio))


def _cost(report: Report, requests: Requests) -> go.Figure:
    figure = go.Figure()
    points = [
        (section, section.overall.mat, section.overall.step_ms)
        for section in report.configurations
        if section.overall.mat is not None and section.overall.step_ms
    ]
    longest = 1.12 * max((step_ms or 0 for *_, step_ms in points), default=1)
    highest = 1.15 * max((mat or 0 for _, mat, _ in points), default=1.5)
    for section, mat, step_ms in points:
        figure.add_scatter(
            name=section.name,
            x=[step_ms],
            y=[mat],
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
    points: Callable[[Section], Sequence[tuple[float, float | None]]],
    x_title: str,
    y_title: str,
    report: Report,
    requests: Requests,
) -> go.Figure:
    """A line per configuration that has points."""
    figure = go.Figure()
    for section in report.configurations:
        drawn = [(x, y) for x, y in points(section) if y is not None]
        if drawn:
            figure.add_scatter(
                name=section.name,
                x=[x for x, _ in drawn],
                y=[y for _, y in drawn],
                mode="lines+markers",
                line={"color": _colour(report, section), "width": 2},
                marker={"size": 5},
            )
    figure.update_xaxes(title=x_title)
    return figure.update_yaxes(title=y_title, rangemode="tozero")


def _split(report: Report, requests: Requests) -> go.Figure:
    figure = go.Figure()
    splits = {s.name: s.time_split.ms for s in report.configurations if s.time_split}
    colours = {"draft": HUES[2], "verify": HUES[0], "accept": HUES[3], "other": GREY}
    colours["roll-back"] = HUES[4]
    for part in dict.fromkeys(name for split in splits.values() for name in split):
        figure.add_bar(
            name=part,
            y=list(splits),
            x=[split.get(part, 0.0) for split in splits.values()],
            orientation="h",
            marker_color=colours[part],
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


BINNED = "requests binned by prompt length + half the answer length"
PLOTS: dict[str, Plot] = {
    "speedup": Plot(
        "Speedup over plain decoding",
        "bars: speedup; whiskers: its 95% interval, where there are enough answers for one",
        _speedups,
    ),
    "cost": Plot("MAT against step time", "dotted lines: speedup = MAT × plain step / step", _cost),
    "positions": Plot(
        "Acceptance by position",
        "share of steps that accepted at least this many draft tokens",
        partial(
            _lines,
            lambda s: [(i, 100 * rate) for i, rate in enumerate(s.position_rates, start=1)],
            "draft tokens accepted (at least)",
            "% of steps",
        ),
    ),
    "split": Plot("Where a step's time goes", "mean milliseconds of a step", _split),
    "latency": Plot(
        "Request latency", "box: quartiles; whiskers: 1.5 × the interquartile range", _latency
    ),
    "context": Plot(
        "tok/s over context length",
        BINNED,
        partial(
            _lines,
            lambda s: [(one.context_len, one.tok_s) for one in s.by_context],
            "tokens of context",
            "tok/s",
        ),
    ),
    "mat_by_context": Plot(
        "MAT over context length",
        BINNED,
        partial(
            _lines,
            lambda s: [] if s.reference else [(one.context_len, one.mat) for one in s.by_context],
            "tokens of context",
            "MAT",
        ),
    ),
}


def report_figure(report: Report, requests: Requests, kind: str) -> go.Figure:
    """One of `PLOTS`."""
    figure = styled(PLOTS[one_of("plot", kind, PLOTS)].draw(report, requests))
    return _with_legend_below(figure)


def _with_legend_below(figure: go.Figure) -> go.Figure:
    """The figure, higher by what its legend takes where the page is narrow: it covers no whisker.

    A wider page needs fewer lines, and the plot takes what they leave; a legend that needs more
    lines scrolls.
    """
    names = [trace.name for trace in figure.data]
    if not names or figure.layout.showlegend is False:
        return figure
    columns = max(1, NARROW_PX // (SYMBOL_PX + CHAR_PX * max(map(len, names))))
    lines = max(min(3, len(names)), -(-len(names) // columns))
    taken_px = LINE_PX * (lines + 1)  # one for what is around them
    legend = {"yref": "container", "y": 0, "yanchor": "bottom", "maxheight": taken_px}
    return figure.update_layout(height=figure.layout.height + taken_px, legend=legend)
