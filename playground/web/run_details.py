"""The open run of the Runs page: its text and steps, name, tags and note, and running it again."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import gradio as gr

from playground.errors import Fault, attempt, attempt_aside
from playground.host.live import LiveRun
from playground.host.request import read_run_id
from playground.host.runner import EngineHost
from playground.host.stream import History, RunStream, follow, refusal
from playground.runs.details import Annotation, facts, request_again, split_tags, stored_run
from playground.web.address import switch_to
from playground.web.components import token_panels
from playground.web.forms import QUIET
from playground.web.generate import GeneratePage
from playground.web.memory import owner_of
from playground.web.results import HTML

MESSAGE = HTML.from_string(
    '{% if alert %}<div class="alert" role="alert">{{ alert }}</div>{% endif %}'
    '<span class="said" role="status">{{ said }}</span>'
)
FACTS = HTML.from_string("""
<div class="facts">
{% for title, rows in tables.items() %}
  <div><h3>{{ title }}</h3><dl>
  {% for name, text in rows %}<dt>{{ name }}</dt><dd>{{ text }}</dd>{% endfor %}
  </dl></div>
{% endfor %}
</div>
""")
PLACEHOLDER = "Open a run in the table to read its text and go through its steps."


class OpenRun:
    """Components of one run.

    Attributes:
        outputs: what `show` fills, in its order.
    """

    def __init__(self, host: EngineHost, history: History) -> None:
        self.host, self.history = host, history
        with gr.Column(visible=False, elem_id="pg-run-details") as self.details:
            self._layout()
        self.panel = token_panels(history, placeholder=PLACEHOLDER, elem_id="pg-run-panel")
        self.texts = [self.id, self.name, self.tags, self.note]
        self.outputs = [*self.texts, self.details, self.facts]

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

    def show(self, run_id: str | None) -> list[Any]:
        """Updates of `shown`; nothing is open without a run."""
        run = self.host.log.get(run_id) if run_id else None
        if run is None:
            return ["", "", "", "", gr.Column(visible=False), ""]
        texts = [run.id, run.name, ", ".join(run.tags), run.note]
        return [*texts, gr.Column(visible=True), FACTS.render(tables=facts(run))]

    def opened(self, run_id: object) -> list[Any]:
        """Updates of the panel and of `shown` for a run, or the sentence why there is none."""
        read = attempt(lambda: self.history.opened(read_run_id(run_id)), where="opening a run")
        if isinstance(read, Fault):
            return [refusal(read.sentence, None), *self.show(None)]
        return [read, *self.show(str(run_id))]

    def save(self, run_id: str, name: str, tags: str, note: str) -> Any:
        """Keep what was written on a run; nothing is said where nothing was changed."""

        def write() -> str:
            run = stored_run(self.host.log, read_run_id(run_id))
            new = {"name": name.strip(), "note": note.strip(), "tags": split_tags(tags)}
            old = {"name": run.name, "note": run.note, "tags": tuple(sorted(run.tags))}
            changed = {k: v for k, v in new.items() if v != old[k]}
            Annotation.parse({"id": run_id, **changed}).apply(self.host.log)
            return "Saved." if changed else ""

        done = attempt(write, where="writing on a run")
        return message_html(done) if done else gr.skip()

    async def run_again(
        self, run_id: str, tab: Any, request: gr.Request
    ) -> AsyncIterator[tuple[Any, ...]]:
        """Stream a stored run once more; at its end it is the open one."""
        idle = gr.Button(visible=True), gr.Button(visible=False)

        def start() -> LiveRun:
            stored = stored_run(self.host.log, read_run_id(run_id))
            again = request_again(self.host.catalog, stored)
            return self.host.generate(again, owner=owner_of(tab, request))

        started = await attempt_aside(start, where="running a run again")
        if isinstance(started, Fault):
            yield refusal(started.sentence, None), *idle, gr.skip()
            return
        busy = gr.Button(visible=False), gr.Button(visible=True)
        async for message in follow(RunStream([started], self.host.ahead_of)):
            yield message, *busy, gr.skip()
        yield gr.skip(), *idle, started.log_id

    def stop_runs(self, tab: Any, request: gr.Request) -> None:
        self.host.cancel_owner(owner_of(tab, request))

    # ---- the way to the Generate page

    def listen_to_generate(self, tabs: gr.HTML, generate: GeneratePage, message: gr.HTML) -> None:
        """Take a run's settings and prompt to the Generate page."""
        outputs = [message, tabs, *generate.form_parts]

        def take(run_id: str) -> tuple[Any, ...]:
            values = attempt(
                lambda: generate.form_values.of_run(stored_run(self.host.log, read_run_id(run_id))),
                where="opening a run in Generate",
            )
            if isinstance(values, Fault):
                return message_html(values), *[gr.skip()] * len(outputs[1:])
            return gr.skip(), switch_to("generate"), *values

        self.generate.click(take, self.id, outputs, **QUIET)


def message_html(done: str | Fault, alert: Fault | None = None) -> str:
    """A sentence under the buttons; a fault in a frame."""
    return MESSAGE.render(
        said="" if isinstance(done, Fault) else done,
        alert=done.sentence if isinstance(done, Fault) else alert and alert.sentence,
    )
