"""The Compare page's panels, race and table: one component, and what it asks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gradio as gr

from engine.errors import ConfigError
from engine.metrics import FORMULAS as RUN_FORMULAS
from playground.experiments.compare.stream import MAX_RUNS, race_clocks
from playground.experiments.report.report import FORMULAS
from playground.host.request import read_run_id
from playground.host.runner import EngineHost
from playground.host.stream import History
from playground.web.components import drawn_by
from playground.web.panel_server import answer, panel_server

PLACEHOLDER = (
    "Choose configurations and a prompt, then compare: plain decoding and every configuration "
    "write the same text in turn, and race on their recorded clocks."
)
TEMPLATE = (
    '<div class="compare-head"></div><div class="compare-race"></div>'
    '<div class="panels" data-count="1"></div><div class="compare-results"></div>'
)


def compare_panels(host: EngineHost, history: History, *, elem_id: str) -> gr.HTML:
    """Its value is a message of `playground.experiments.compare.stream`."""
    return drawn_by(
        "compare/board.js",
        template=TEMPLATE,
        css=["panel/panel.css", "compare/compare.css"],
        functions=[*panel_server(history), *race_server(host, history)],
        events=["begun", "deploy"],
        given={"formulas": {**RUN_FORMULAS, **FORMULAS}, "placeholder": PLACEHOLDER},
        elem_id=elem_id,
    )


def race_server(
    host: EngineHost, history: History
) -> tuple[Callable[[Any], dict[str, Any]], Callable[[Any], dict[str, Any]]]:
    """The functions `clocks` and `metas`; a fault comes back as `{"error": …}`."""

    def clocks(asked: Any) -> dict[str, Any]:
        """When every commit of some runs happened."""
        return answer(
            lambda: {"clocks": race_clocks(host.runs, host.log, _runs(asked))},
            where="reading the clocks",
        )

    def metas(asked: Any) -> dict[str, Any]:
        """What panels show of some runs besides their text."""

        def read() -> dict[str, Any]:
            opened = [history.opened(run)["runs"] for run in _runs(asked)]
            return {"runs": [meta for runs in opened for meta in runs]}

        return answer(read, where="opening runs")

    return clocks, metas


def _runs(asked: Any) -> Sequence[str]:
    runs = asked.get("runs") if isinstance(asked, dict) else None
    if not isinstance(runs, list) or not 1 <= len(runs) <= MAX_RUNS:
        raise ConfigError(f"runs must be a list of 1 to {MAX_RUNS} ids, got {asked!r:.80}.")
    return [read_run_id(run) for run in runs]
