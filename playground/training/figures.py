"""The curves of a training by optimizer step: loss, top-1 accuracy by position, MAT and speed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from playground.plots import GREY, HUES, styled
from playground.training.work import predicted_mat

Points = Sequence[Mapping[str, Any]]
Curve = Mapping[str, Points]
CHAIN = 5
"""Chain length for the predicted MAT of a drafter with one accuracy for all depths."""


def gain_figure(curve: Curve) -> go.Figure:
    """Predicted MAT of a chain, measured MAT with a tree, and speedup over the training."""
    figure, points, measured = go.Figure(), _held_out(curve), curve.get("measured", ())
    chain = [predicted_mat(point["top1"], max(len(point["top1"]), CHAIN)) for point in points]
    _line(figure, "MAT predicted (chain)", points, chain, GREY)
    _line(figure, "MAT measured", measured, [point["mat"] for point in measured], HUES[0])
    _line(figure, "speedup here", measured, [point["speedup"] for point in measured], HUES[1])
    figure.add_hline(y=1, line={"width": 1, "dash": "dot", "color": GREY})
    return _finished(figure, "MAT and speedup")


def guesses_figure(curve: Curve) -> go.Figure:
    """Top-1 accuracy of each draft position on held-out texts."""
    figure, points = go.Figure(), _held_out(curve)
    for depth in range(max((len(point["top1"]) for point in points), default=0)):
        shares = [dict(enumerate(point["top1"])).get(depth) for point in points]
        _line(figure, f"position {depth + 1}", points, shares, HUES[depth % len(HUES)])
    figure.update_yaxes(tickformat=".0%", rangemode="tozero")
    return _finished(figure, "right guesses, held-out texts")


def loss_figure(curve: Curve) -> go.Figure:
    """The mean loss of every step."""
    figure, points = go.Figure(), curve.get("loss", ())
    _line(figure, "loss", points, [point["loss"] for point in points], HUES[0])
    return _finished(figure, "loss")


FIGURES: dict[str, Callable[[Curve], go.Figure]] = {
    "gain": gain_figure,
    "guesses": guesses_figure,
    "loss": loss_figure,
}


def _held_out(curve: Curve) -> list[Mapping[str, Any]]:
    points = [*curve.get("held out", ()), *curve.get("measured", ())]
    return sorted({point["step"]: point for point in points}.values(), key=lambda p: p["step"])


def _line(figure: go.Figure, name: str, points: Points, values: list[Any], colour: str) -> None:
    if points:
        mode = "lines+markers" if len(points) < 30 else "lines"
        steps, style = [point["step"] for point in points], {"color": colour}
        figure.add_scatter(name=name, x=steps, y=values, mode=mode, line=style, marker=style)


def _finished(figure: go.Figure, title: str) -> go.Figure:
    styled(figure, height=250)
    figure.update_layout(
        hovermode="x unified",
        showlegend=len(figure.data) > 1,
        xaxis_title="step",
        yaxis_title=title,
    )
    return figure
