"""The style of every plotly figure: readable on light and on dark ground."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import plotly.graph_objects as go

HUES = (
    *("#3b82f6", "#22a55a", "#e08a1e", "#a855f7", "#ef4444", "#0ea5b7"),
    *("#d946a0", "#7cb518", "#8b5cf6", "#14b8a6", "#c2702a", "#64748b"),
)
GREY = "#8b8b94"
TEXT, GRID = "#82828c", "rgba(130, 130, 140, 0.25)"
"""Of text and lines: in contrast with white as with black."""


def styled(figure: go.Figure, *, height: int = 280) -> go.Figure:
    """The figure without a background of its own, in colours between light and dark."""
    figure.update_layout(
        template="none",
        height=height,
        margin={"l": 56, "r": 16, "t": 12, "b": 44},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"size": 11, "color": TEXT},
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom"},
        hovermode="closest",
    )
    for axes in (figure.update_xaxes, figure.update_yaxes):
        axes(gridcolor=GRID, linecolor=GRID, zerolinecolor=GRID, automargin=True)
    return figure
