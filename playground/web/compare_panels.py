"""The Compare page's panels, race and table: one component, and what it asks for."""

from __future__ import annotations

import gradio as gr
from pydantic import Field

from engine.config import Settings
from engine.metrics import FORMULAS as RUN_FORMULAS
from playground.experiments.compare.stream import MAX_RUNS, race_clocks
from playground.experiments.report.report import FORMULAS
from playground.host.request import RunId
from playground.host.runner import EngineHost
from playground.host.stream import History
from playground.web.components import drawn_by
from playground.web.rpc import Answer, Served, panel_functions, serve

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
        "compare/comparison.js",
        template=TEMPLATE,
        css=["panel/panel.css", "compare/compare.css"],
        functions=[*panel_functions(history), *race_functions(host, history)],
        events=["begun", "deploy"],
        given={"formulas": {**RUN_FORMULAS, **FORMULAS}, "placeholder": PLACEHOLDER},
        elem_id=elem_id,
    )


class RunsOf(Settings):
    """Runs of one race."""

    runs: list[RunId] = Field(min_length=1, max_length=MAX_RUNS)


def race_functions(host: EngineHost, history: History) -> list[Served]:
    """What the race asks: `clocks`, when commits happened, and `metas`, what panels show."""

    def clocks(asked: RunsOf) -> Answer:
        return {"clocks": race_clocks(host.runs, host.log, asked.runs)}

    def metas(asked: RunsOf) -> Answer:
        return {"runs": [meta for run in asked.runs for meta in history.opened(run)["runs"]]}

    return [
        serve("clocks", RunsOf, clocks, where="reading the clocks"),
        serve("metas", RunsOf, metas, where="opening runs"),
    ]
