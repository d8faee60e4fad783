"""The Runs page's component over its viewer: filters, table, comparison, the open run."""

from __future__ import annotations

import json
from typing import Any

import gradio as gr

from engine.metrics import FORMULAS
from playground.runs.compare import Comparison
from playground.runs.details import details
from playground.runs.edit import edit
from playground.runs.files import export_part, export_start, import_part
from playground.runs.listing import RunList
from playground.runs.settings import Types
from playground.web.components import static_text
from playground.web.panel_server import answer
from storage import RunLog

SCRIPTS = (
    "dom.js",
    "runs_columns.js",
    "runs_filters.js",
    "runs_table.js",
    "runs_actions.js",
    "runs_details.js",
    "runs_charts.js",
    "runs_compare.js",
    "runs.js",
)


def runs_board(log: RunLog, types: Types, *, elem_id: str) -> gr.HTML:
    """The component; its value may hold `opened`, a run, and `query`, as in a link.

    It fires `open`, `again` and `generate` with the id of a run, and `stop`. A value that comes
    while a run is repeated says that this is over.
    """
    runs, comparison = RunList(log, types), Comparison(log, types)
    questions = {
        "find": runs.page,
        "groups": runs.groups,
        "facets": runs.facets,
        "compare": comparison.compare,
        "details": lambda asked: details(log, asked, types),
        "edit": lambda asked: edit(log, asked),
        "export_start": lambda asked: export_start(log, asked),
        "export_part": lambda asked: export_part(log, asked),
        "import_part": lambda asked: import_part(log, asked),
    }
    # A component in a tab that is opened later is not given its props: the formulas travel in the
    # script.
    given = f"const FORMULAS = {json.dumps(FORMULAS)};"
    return gr.HTML(
        value={"opened": None},
        html_template='<div class="runs"></div>',
        css_template=static_text("runs.css", "runs_compare.css"),
        js_on_load=f"{given}\n{static_text(*SCRIPTS)}",
        apply_default_css=False,
        server_functions=[_served(name, ask) for name, ask in questions.items()],
        elem_id=elem_id,
    )


def _served(name: str, ask: Any) -> Any:
    """A function that the script calls as `server.name(one_argument)`; a fault is `error`."""

    def serve(asked: Any) -> dict[str, Any]:
        return answer(lambda: ask(asked), where=f"the run log ({name})")

    serve.__name__ = name
    return serve
