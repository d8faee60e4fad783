"""The command palette (Ctrl+K): methods and runs by name; the browser adds tabs and buttons."""

from __future__ import annotations

from typing import Any

import gradio as gr

from playground.web.address import switch_to
from playground.web.components import module_component, text_of
from playground.web.forms import RAW, Updates, skip_on_fault
from playground.web.generate import GeneratePage
from playground.web.runs import RunsPage
from storage import RunQuery, RunSummary

MAX_RUNS = 50


class Palette:
    """Component and listeners: methods are picked on Generate, runs are opened on Runs."""

    def __init__(self, generate: GeneratePage, runs: RunsPage) -> None:
        self._generate, self._runs = generate, runs
        box = module_component(
            "palette.js",
            template="",
            css=[],
            events=["opened", "method", "run"],
            value={},
            elem_id="pg-palette-box",
        )
        box.opened(self._entries, generate.target, box, **RAW)
        picked = [generate.tabs, generate.method]
        box.method(self._pick, [box, generate.target], picked, **RAW)
        outputs = [runs.tabs, runs.table, *runs.open_run.outputs]
        box.run(self._open, [box, *runs.inputs], outputs, **RAW)

    def _entries(self, target: Any) -> dict[str, Any]:
        """Titles and keys of the methods for the picked target and of the newest runs."""
        rows = self._runs.log.rows(RunQuery(limit=MAX_RUNS))
        return {
            "methods": self._generate.host.menu.choices(target),
            "runs": [(self._title(row), row.id) for row in rows],
        }

    def _title(self, row: RunSummary) -> str:
        words = " ".join((row.name or row.prompt_text).split())
        return f"{row.method_title} · {words:.60} · {row.created_at:%d %b %H:%M}"

    def _pick(self, value: Any, target: Any) -> list[Any]:
        picked = text_of(value, "picked")
        if picked not in [key for _, key in self._generate.host.menu.choices(target)]:
            return [gr.skip(), gr.skip()]
        return [switch_to("generate"), picked]

    def _open(self, value: Any, *table: Any) -> Updates:
        runs, run = self._runs, text_of(value, "picked")
        rows = skip_on_fault(lambda: runs.draw_repeated(run, *table), where="opening a run")
        return {runs.tabs: switch_to("runs"), runs.table: rows, **runs.open_run.opened(run)}
