"""Ctrl+K: methods and runs by name. The browser adds the tabs and the pages' buttons."""

from __future__ import annotations

from typing import Any

import gradio as gr

from playground.web.address import switch_to
from playground.web.components import drawn_by
from playground.web.forms import RAW, or_skip
from playground.web.generate import GeneratePage
from playground.web.runs import RunsPage
from storage import RunQuery, RunSummary

MOST_RUNS = 50


class Palette:
    """Component and listeners; methods go to Generate, runs are opened on Runs."""

    def __init__(self, tabs: gr.HTML, generate: GeneratePage, runs: RunsPage) -> None:
        self._generate, self._runs = generate, runs
        box = drawn_by(
            "palette.js",
            template="",
            css=[],
            events=["opened", "method", "run"],
            value={},
            elem_id="pg-palette-box",
        )
        details = runs.open_run
        box.opened(self._offer, generate.target, box, **RAW)
        box.method(self._pick, [box, generate.target], [tabs, generate.method], **RAW)
        outputs = [tabs, runs.table, details.panel, *details.outputs]
        box.run(self._open, [box, *runs.inputs], outputs, **RAW)

    def _offer(self, target: Any) -> dict[str, Any]:
        """Methods for the picked target, and the newest runs: titles and keys."""
        rows = self._runs.log.rows(RunQuery(limit=MOST_RUNS))
        return {
            "methods": self._generate.host.menu.choices(target),
            "runs": [(self._title(row), row.id) for row in rows],
        }

    def _title(self, row: RunSummary) -> str:
        words = " ".join((row.name or row.prompt_text).split())
        return f"{row.method_title} · {words:.60} · {row.created_at:%d %b %H:%M}"

    def _pick(self, value: Any, target: Any) -> list[Any]:
        picked = _picked(value)
        if picked not in [key for _, key in self._generate.host.menu.choices(target)]:
            return [gr.skip(), gr.skip()]
        return [switch_to("generate"), picked]

    def _open(self, value: Any, *table: Any) -> list[Any]:
        run = _picked(value)
        rows = or_skip(lambda: self._runs.draw_repeated(run, *table), where="opening a run")
        return [switch_to("runs"), rows, *self._runs.open_run.opened(run)]


def _picked(value: Any) -> str:
    picked = value.get("picked") if isinstance(value, dict) else None
    return picked if isinstance(picked, str) else ""
