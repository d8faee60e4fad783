"""Under a comparison: the predicted speedups at larger batch sizes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import gradio as gr
from anyio.to_thread import run_sync

from engine import formats
from engine.metrics import SAME
from playground.errors import Fault, fault_of
from playground.host.request import read_run_id
from playground.host.runner import EngineHost
from playground.trees.batches import BatchReport, batch_report, measure_for
from playground.trees.measurements import Jobs
from playground.web.forms import QUEUED
from playground.web.memory import owner_of
from playground.web.results import Cell, saying, table_html

POLL_S = 0.4
ABOUT = (
    "Predicted speedup over plain decoding of equally many texts, from this comparison's steps. "
    "Lock-step batching: all texts draft, then one forward verifies all drafts ({by}; measured). "
    "A drafting network is assumed to slow down as the target does."
)
FORMULA = (
    "MAT · step of plain decoding / (draft + verify + other), each for that many texts at once"
)


class Concurrency:
    """A button and the table that it makes.

    Args:
        compare_of: the id of the comparison that the panels show; empty where there is none.
    """

    def __init__(self, host: EngineHost, compare_of: Callable[[Any], str]) -> None:
        self._host, self._compare_of, self._jobs = host, compare_of, Jobs(host)
        self.button = gr.Button(
            "Predict the speedup at larger batch sizes", size="sm", elem_id="pg-cmp-batch-button"
        )
        self.prediction = gr.HTML(elem_id="pg-cmp-batch")

    def listen(self, panels: gr.HTML, tab: gr.HTML) -> None:
        """`panels`: what shows the comparison."""
        self.button.click(
            self.show, [panels, tab], self.prediction, concurrency_limit=None, **QUEUED
        )

    async def show(self, panels: Any, tab: Any, request: gr.Request) -> AsyncIterator[str]:
        owner, compare_id = f"{owner_of(tab, request)}/batch", self._compare_of(panels)
        async for html in batch_report_messages(self._host, self._jobs, compare_id, owner):
            yield html


async def batch_report_messages(
    host: EngineHost, jobs: Jobs, compare_id: str, owner: str
) -> AsyncIterator[str]:
    """The table, or the progress of what is measured for it first, in half a minute."""
    try:
        read = partial(batch_report, host.log, host.catalog, read_run_id(compare_id))
        report = await run_sync(read)
        if report is None:
            job = await run_sync(partial(measure_for, host, jobs, compare_id, owner=owner))
            while not (state := jobs.state(job))["over"]:
                yield saying(f"{state['text']} …")
                await asyncio.sleep(POLL_S)
            if state["error"]:
                yield saying(Fault(state["error"], expected=True))
                return
            report = await run_sync(read)
    except Exception as error:
        yield saying(fault_of(error, where="predicting speedups of batches"))
        return
    yield saying("Stopped.") if report is None else batch_report_html(report)


def batch_report_html(report: BatchReport) -> str:
    """A row per configuration, a column per batch size."""
    heads = {"speedup with": "", **{f"{b} at once": FORMULA for b in report.batches}}
    rows = [[Cell(name), *map(_times, row)] for name, row in report.speedups.items()]
    about = saying(ABOUT.format(by=report.by))
    return table_html("Speedup by number of texts at once", heads, rows) + about


def _times(speedup: float) -> Cell:
    mood = "good" if speedup > 1 + SAME else "bad" if speedup < 1 - SAME else ""
    return Cell(formats.speedup(speedup), mood=mood)
