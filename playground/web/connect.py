"""The Connect page: the counters of a running engine, live and under load."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

import gradio as gr
from anyio.to_thread import run_sync
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from engine.config import Settings
from engine.errors import ConfigError, validate_choice
from playground.connect.client import Client
from playground.connect.readings import ENGINES, Reading, between
from playground.connect.replay import MAX_CONCURRENCY, Load, read_concurrencies
from playground.connect.report import COLUMNS, Report, reading_figures
from playground.connect.session import Address, measure
from playground.errors import fault_of
from playground.experiments.prompts import first_turns
from playground.host.catalog import Catalog
from playground.web.components import hidden_value
from playground.web.forms import QUEUED, UNQUEUED, Updates
from playground.web.results import HTML, Cell, sentence_html, table_html
from storage import RunLog

POLL_S = 2.0
WHERE = "connecting to an engine"
MAX_PROMPTS, MAX_TOKENS = 200, 2048
LAST_READING = TypeAdapter(tuple[float, Reading])
"""When the counters were read, in seconds since the epoch, and what they were."""
ABOUT = (
    "Watches or measures a running engine: "
    + ", ".join(engine.title for engine in ENGINES)
    + ". Requests are sent only to the address that you enter."
)
LIVE = HTML.from_string("""
<dl class="pg-live" role="status">
{% for title, value, about in figures %}
<div><dt>{{ title | term(about) }}</dt><dd>{{ value }}</dd></div>
{% endfor %}
</dl>
{% if note %}<p class="pg-said">{{ note }}</p>{% endif %}
""")
SENTENCES = HTML.from_string("""
<div class="pg-verdict">{% for text in texts %}<p>{{ text }}</p>{% endfor %}</div>
""")


class EngineFields(Settings):
    """Form fields: the engine."""

    model_config = ConfigDict(str_strip_whitespace=True, str_max_length=2000)

    url: str
    key: str = ""
    model: str = ""


class MeasureFields(EngineFields):
    """Form fields: the engine and the load."""

    model_config = ConfigDict(strict=False)

    plain: str = ""
    suite: str
    count: int = Field(ge=1, le=MAX_PROMPTS)
    tokens: int = Field(ge=1, le=MAX_TOKENS)
    levels: str
    seconds: float = Field(ge=1, le=3600)


class ConnectPage:
    """Components and listeners of the page."""

    def __init__(self, catalog: Catalog, log: RunLog) -> None:
        self._catalog, self._log = catalog, log
        with gr.Row():
            with gr.Column(elem_classes="pg-side"):
                self._engine()
                self._load()
            with gr.Column(scale=4, elem_classes="pg-main"):
                self._results()
        self.last_reading = hidden_value()
        self.timer = gr.Timer(POLL_S, active=False)
        self._listen()

    # ---- layout

    def _engine(self) -> None:
        gr.Markdown(ABOUT, elem_classes="pg-note")
        with gr.Group():
            self.url = gr.Textbox(
                label="Address", placeholder="http://127.0.0.1:8000", elem_id="pg-connect-url"
            )
            self.key = gr.Textbox(
                label="API key", type="password", info="only if required", max_lines=1
            )
            self.model = gr.Textbox(
                label="Model", info="empty = the first model that the engine lists", max_lines=1
            )
        with gr.Row():
            self.watch = gr.Button("Watch", variant="primary")
            self.unwatch = gr.Button("Stop watching")

    def _load(self) -> None:
        suites = [(suite.title, name) for name, suite in self._catalog.suites.items()]
        with gr.Accordion("Measure under load", open=True):
            self.plain = gr.Textbox(
                label="Address without speculation",
                info="same model and engine with drafting off; needed for speedups and advice",
            )
            self.suite = gr.Dropdown(suites, label="Prompts")
            self.count = gr.Slider(1, MAX_PROMPTS, value=12, step=1, label="Number of prompts")
            self.tokens = gr.Slider(1, MAX_TOKENS, value=128, step=1, label="New tokens per answer")
            self.levels = gr.Textbox(
                "1,2,4,8,16",
                label="Concurrency",
                info=f"one level after another, each at most {MAX_CONCURRENCY}",
            )
            self.seconds = gr.Slider(10, 1800, value=120, step=10, label="Time limit per level (s)")
            with gr.Row():
                self.start = gr.Button("Measure", variant="primary")
                self.stop = gr.Button("Stop")

    def _results(self) -> None:
        self.message = gr.HTML(sentence_html("Not connected."))
        self.live = gr.HTML()
        self.sentences = gr.HTML()
        self.table = gr.HTML()

    # ---- listeners

    def _listen(self) -> None:
        engine = [self.url, self.key, self.model]
        watched = [self.message, self.live, self.last_reading, self.timer]
        gr.on([self.watch.click, self.url.submit], self.poll, engine, watched, **QUEUED)
        self.timer.tick(self.poll, [*engine, self.last_reading], watched, **UNQUEUED)
        self.unwatch.click(lambda: gr.Timer(active=False), None, self.timer, **UNQUEUED)
        load = [self.plain, self.suite, self.count, self.tokens, self.levels, self.seconds]
        results = [self.message, self.sentences, self.table]
        running = self.start.click(self.measure, [*engine, *load], results, **QUEUED)
        self.stop.click(
            lambda: sentence_html("Stopped. The answers received so far are in the log."),
            None,
            self.message,
            cancels=[running],
            **UNQUEUED,
        )

    async def poll(self, url: Any, key: Any, model: Any, last: Any = None) -> Updates:
        """Show how much the counters grew since the last reading, or since the engine's start.

        The figures stay as they are if nothing was decoded in between.
        """
        try:
            before = _earlier(last)
            where, reading = await _read_counters(url, key, model)
        except Exception as error:
            return {self.message: sentence_html(fault_of(error, where=WHERE))} | (
                {} if last else {self.live: "", self.timer: gr.Timer(active=False)}
            )
        now_s = time.time()
        kept = LAST_READING.dump_python((now_s, reading), mode="json")
        updates: Updates = {self.message: sentence_html(where), self.last_reading: kept}
        if not before:
            live = LIVE.render(figures=reading_figures(reading, None), note="Since its start.")
            return updates | {self.live: live, self.timer: gr.Timer(active=True)}
        last_s, last_reading = before
        growth, restarted = between(last_reading, reading)
        if growth.steps or growth.generated or restarted:
            seconds = now_s - last_s
            note = "The engine was restarted." if restarted else f"In the last {seconds:.0f} s."
            live = LIVE.render(figures=reading_figures(growth, seconds), note=note)
            updates[self.live] = live
        return updates

    async def measure(self, *values: Any) -> AsyncIterator[tuple[Any, ...]]:
        """Yield message, sentences and table whenever a concurrency has been measured."""
        yield sentence_html("Measuring …"), "", ""
        try:
            fields = MeasureFields.parse(
                dict(zip(MeasureFields.model_fields, values, strict=False))
            )
            suites = self._catalog.suites
            suite = suites[validate_choice("Prompts", fields.suite, suites)]
            prompts, levels = first_turns(suite, fields.count), read_concurrencies(fields.levels)
            load = Load(prompts, levels, fields.tokens, fields.seconds)
            address = Address(fields.url, fields.key, fields.model, fields.plain)
            async for report in measure(address, load, self._log):
                done = f"{len(report.drafting)} of {len(load.concurrencies)} levels measured"
                yield sentence_html(done), *(await run_sync(_results, report))
        except Exception as error:
            yield sentence_html(fault_of(error, where=WHERE)), gr.skip(), gr.skip()


def _earlier(last: Any) -> tuple[float, Reading] | None:
    """The last reading, as the tab keeps it; ConfigError for anything else."""
    try:
        return LAST_READING.validate_python(last) if last else None
    except ValidationError as error:
        raise ConfigError("The last reading must be this page's own. Reload the page.") from error


async def _read_counters(url: Any, key: Any, model: Any) -> tuple[str, Reading]:
    """An engine's description and its current counters."""
    fields = EngineFields.parse({"url": url, "key": key, "model": model})
    async with Client.connect(fields.url, fields.key, fields.model) as client:
        return f"{client.engine.title} at {client.url} · {client.model}", await client.read()


def _results(report: Report) -> tuple[str, str]:
    rows = [[Cell(text) for text in row] for row in report.rows()]
    return SENTENCES.render(texts=report.sentences()), table_html("Levels", COLUMNS, rows)
