"""The curves of a training: loss, right guesses by position, MAT and speed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from playground.plots import GREY, HUES, styled
from playground.training.work import predicted_mat

Curve = Mapping[str, Sequence[Mapping[str, Any]]]
CHAIN = 5
"""Draft tokens that a drafter with one share for all depths is predicted with."""
HEIGHT = 250


def loss_figure(curve: Curve) -> go.Figure:
    """The mean loss of each pack by optimizer step."""
    figure = go.Figure()
    points = curve.get("loss", ())
    _line(figure, "loss", points, [point["loss"] for point in points], HUES[0])
    return _finished(figure)


def guesses_figure(curve: Curve) -> go.Figure:
    """Per position of the draft, how often its best guess is right on held-out texts."""
    figure = go.Figure()
    points = _held_out(curve)
    for depth in range(max((len(point["top1"]) for point in points), default=0)):
        values = [100 * point["top1"][depth] for point in points]
        _line(figure, f"position {depth + 1}", points, values, HUES[depth % len(HUES)])
    figure.update_yaxes(ticksuffix=" %", rangemode="tozero")
    return _finished(figure)


def gain_figure(curve: Curve) -> go.Figure:
    """MAT as predicted for a chain and as measured with a tree, and the speedup, as they rise."""
    figure = go.Figure()
    points, measured = _held_out(curve), curve.get("measured", ())
    chain = [predicted_mat(point["top1"], max(len(point["top1"]), CHAIN)) for point in points]
    _line(figure, "MAT predicted (chain)", points, chain, GREY)
    _line(
        figure, "MAT measured", measured, [point["mat"] for point in measured], HUES[0], dots=True
    )
    speedups = [point["speedup"] for point in measured]
    _line(figure, "speedup here", measured, speedups, HUES[1], dots=True)
    figure.add_hline(y=1, line={"width": 1, "dash": "dot", "color": GREY})
    return _finished(figure)


def _held_out(curve: Curve) -> list[Mapping[str, Any]]:
    points = [*curve.get("held out", ()), *curve.get("measured", ())]
    return sorted({point["step"]: point for point in points}.values(), key=lambda p: p["step"])


def _line(
    figure: go.Figure,
    name: str,
    points: Sequence[Mapping[str, Any]],
    values: Sequence[float | None],
    colour: str,
    *,
    dots: bool = False,
) -> None:
    if not points:
        return
    mode = "lines+markers" if dots or len(points) < 3 else "lines"
    steps = [point["step"] for point in points]
    style = {"color": colour}
    figure.add_scatter(name=name, x=steps, y=values, mode=mode, line=style, marker=style)


def _finished(figure: go.Figure) -> go.Figure:
    styled(figure, height=HEIGHT)
    figure.update_xaxes(title="step")
    figure.update_layout(hovermode="x unified", showlegend=len(figure.data) > 1)
    return figure
