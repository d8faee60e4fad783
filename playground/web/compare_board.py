"""The Compare page's board: panels, race and table in one component, and what it asks for."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import gradio as gr

from engine.errors import ConfigError
from playground.experiments.compare.figures import FIGURE_FORMULAS
from playground.experiments.compare.race import MAX_RUNS, Clocks
from playground.host.request import read_run_id
from playground.host.stream import History
from playground.web.components import PANEL_SCRIPTS, static_text
from playground.web.panel_server import answer, panel_server

SCRIPTS = (*PANEL_SCRIPTS, "race.js", "compare_table.js", "compare.js")
PLACEHOLDER = (
    "Choose configurations and a prompt, then compare: plain decoding and every configuration "
    "write the same text in turn, and race on their recorded clocks."
)
TEMPLATE = (
    '<div class="compare-head"></div><div class="compare-race"></div>'
    '<div class="panels" data-count="1"></div><div class="compare-results"></div>'
)


def compare_board(history: History, clocks_of: Clocks, *, elem_id: str) -> gr.HTML:
    """Its value is a message of `playground.experiments.compare.stream`."""
    functions = [*panel_server(history), *race_server(history, clocks_of)]
    return gr.HTML(
        value=None,
        html_template=TEMPLATE,
        css_template=static_text("panel.css", "compare.css"),
        js_on_load=f"{_given()}\n{static_text(*SCRIPTS)}",
        apply_default_css=False,
        server_functions=functions,
        elem_id=elem_id,
    )


def _given() -> str:
    """Constants for the scripts.

    A component in a tab that is opened later is not given its own props, so these travel in the
    script itself.
    """
    given = {"formulas": FIGURE_FORMULAS, "placeholder": PLACEHOLDER}
    return "".join(f"props.{name} = {json.dumps(value)};" for name, value in given.items())


def race_server(
    history: History, clocks_of: Clocks
) -> tuple[Callable[[Any], dict[str, Any]], Callable[[Any], dict[str, Any]]]:
    """The functions `clocks` and `metas`; a fault comes back as `{"error": …}`."""

    def clocks(asked: Any) -> dict[str, Any]:
        """When every commit of some runs happened."""
        return answer(lambda: {"clocks": clocks_of.of(_runs(asked))}, where="reading the clocks")

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
