"""The open run of the Runs page: text, steps, name, tags and note; running it again."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import gradio as gr

from playground.errors import Fault, attempt, attempt_aside
from playground.host.live import LiveRun
from playground.host.request import read_run_id
from playground.host.runner import EngineHost
from playground.host.stream import RunStream, follow, refusal
from playground.runs.details import Annotation, facts, request_again, split_tags
from playground.runs.reading import History, stored_run
from playground.web.components import token_panels
from playground.web.forms import Updates, on_fault
from playground.web.memory import owner_of
from playground.web.navigator import Navigator
from playground.web.results import HTML, definitions_html, sentence_html, show_fault_in

FACTS = HTML.from_string("""
<div class="facts">
{% for title, rows in tables.items() %}
  <div><h3>{{ title }}</h3>{{ rows }}</div>
{% endfor %}
</div>
""")
PLACEHOLDER = "Open a run in the table to read its text and go through its steps."


class OpenRun:
    """Components and listeners of the open run.

    Attributes:
        outputs: components that `opened` updates.
    """

    def __init__(self, host: EngineHost, history: History) -> None:
        self.host, self.history = host, history
        with gr.Column(visible=False) as self.details:
            self._layout()
        self.panel = token_panels(history, placeholder=PLACEHOLDER, elem_id="pg-run-panel")
        texts = [self.id, self.name, self.tags, self.note]
        self.outputs = [self.panel, *texts, self.details, self.facts]

    def _layout(self) -> None:
        self.id = gr.Textbox(visible=False)
        with gr.Row(elem_id="pg-run-head"):
            self.name = gr.Textbox(label="Name", elem_id="pg-run-name")
            self.tags = gr.Textbox(label="Tags (comma-separated)", elem_id="pg-run-tags")
            self.note = gr.Textbox(label="Note", lines=1, max_lines=8, elem_id="pg-run-note")
        with gr.Row(elem_id="pg-run-buttons"):
            self.again = gr.Button("Run again", elem_id="pg-run-again", size="sm")
            self.stop = gr.Button("Stop", elem_id="pg-run-stop", visible=False, size="sm")
            self.generate = gr.Button("Open in Generate", elem_id="pg-run-generate", size="sm")
        with gr.Accordion("Settings and machine", open=False, elem_id="pg-run-all"):
            self.facts = gr.HTML(elem_id="pg-run-facts", apply_default_css=False)

    def show(self, run_id: str | None) -> Updates:
        """Updates of everything but the panel; None = no run is open."""
        run = self.host.log.get(run_id) if run_id else None
        if run is None:
            return {self.id: "", self.details: gr.Column(visible=False)}
        return {
            self.id: run.id,
            self.name: run.name,
            self.tags: ", ".join(run.tags),
            self.note: run.note,
            self.details: gr.Column(visible=True),
            self.facts: FACTS.render(
                tables={title: definitions_html(rows) for title, rows in facts(run).items()}
            ),
        }

    def opened(self, run_id: object) -> Updates:
        """Updates of `outputs` for a run; an error in the panel if it cannot be opened."""
        read = attempt(lambda: self.history.show(read_run_id(run_id)), where="opening a run")
        if isinstance(read, Fault):
            return {self.panel: refusal(read.sentence, None), **self.show(None)}
        return {self.panel: read, **self.show(str(run_id))}

    @on_fault(sentence_html, where="writing on a run")
    def save(self, field: str, run_id: str, text: str) -> Any:
        """Store one text of a run, and only that one: edits of others may be in flight."""
        run = stored_run(self.host.log, read_run_id(run_id))
        new = split_tags(text) if field == "tags" else text.strip()
        if new == {"name": run.name, "note": run.note, "tags": tuple(sorted(run.tags))}[field]:
            return gr.skip()
        Annotation.parse({"id": run_id, field: new}).apply(self.host.log)
        return sentence_html("Saved.")

    async def run_again(self, run_id: str, tab: Any, request: gr.Request) -> AsyncIterator[Updates]:
        """Run a stored run again and stream it; afterwards the new run is the open one."""

        def start() -> LiveRun:
            stored = stored_run(self.host.log, read_run_id(run_id))
            again = request_again(self.host.catalog, stored)
            return self.host.generate(again, owner=owner_of(tab, request))

        started = await attempt_aside(start, where="running a run again")
        if isinstance(started, Fault):
            yield {self.panel: refusal(started.sentence, None)}
            return
        busy = {self.again: gr.Button(visible=False), self.stop: gr.Button(visible=True)}
        async for message in follow(RunStream([started])):
            yield {self.panel: message, **busy}
        idle = {self.again: gr.Button(visible=True), self.stop: gr.Button(visible=False)}
        yield {self.id: started.log_id, **idle}

    def stop_runs(self, tab: Any, request: gr.Request) -> None:
        self.host.cancel_owner(owner_of(tab, request))

    # ---- links to other pages

    def link(self, nav: Navigator, message: gr.HTML) -> None:
        """Open the run's settings and prompt on the Generate and Compare pages."""

        @show_fault_in(message, where="opening a run in Generate")
        def take(run_id: str) -> Updates:
            return nav.to("generate", run=stored_run(self.host.log, read_run_id(run_id)))

        nav.link(self.generate.click, ["generate"], take, self.id, message)
        nav.link_run(self.panel)
