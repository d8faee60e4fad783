"""The Compare page: configurations on the same prompts, a race, and why one is faster."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import gradio as gr
from anyio.to_thread import run_sync

from engine import formats
from engine.config import Limits, Sampling
from engine.errors import ConfigError
from engine.metrics import EQUAL_MARGIN
from engine.safe_text import read_json
from playground.errors import Fault, attempt, attempt_aside, fault_of
from playground.experiments.comparison import (
    Comparison,
    Race,
    fault_message,
    reopen_message,
    stream,
)
from playground.experiments.experiment import Experiment
from playground.experiments.forms import (
    LIMITS,
    CompareForm,
    CompareOptions,
    from_comparison,
    from_run,
)
from playground.experiments.report.page import page_html
from playground.experiments.report.report import Results, read_results
from playground.experiments.service import Experiments
from playground.host.controls import FormValues, Group, spec_of
from playground.host.request import DTYPES, read_run_id, texts
from playground.host.runner import EngineHost
from playground.runs.reading import History
from playground.trees.batches import BatchReport, batch_report, measure_for
from playground.web.address import link_params
from playground.web.components import (
    RunQuestion,
    module_component,
    panel_figures,
    panel_functions,
    server_function,
    text_of,
)
from playground.web.configurations import ConfigurationPicker, read_configurations
from playground.web.forms import (
    QUEUED,
    RAW_QUEUED,
    UNLABELLED,
    UNQUEUED,
    PromptForm,
    SettingsForm,
    Updates,
)
from playground.web.memory import last_shown_js, owner_of
from playground.web.navigator import Navigator
from playground.web.report import report_html
from playground.web.results import Cell, save_on_click, sentence_html, table_html

FIELDS = ("target", "dtype", "mode", "system", "prompt", "suite")
"""Components whose values enter `CompareForm` unchanged."""
PLACEHOLDER = (
    "Choose configurations and a prompt, then compare: plain decoding and every configuration "
    "take turns writing the same text, and race on their recorded clocks."
)
TEMPLATE = (
    '<div class="compare-head"></div><div class="compare-race"></div>'
    '<div class="panels" data-count="1"></div>'
)

POLL_S = 0.4
ABOUT_BATCHES = (
    "Predicted speedup over plain decoding of equally many texts, from this comparison's steps. "
    "Lock-step batching: all texts draft, then one forward verifies all drafts ({by}; measured). "
    "A drafting network is assumed to slow down as the target does."
)
BATCH_FORMULA = (
    "MAT · step of plain decoding / (draft + verify + other), each for that many texts at once"
)


class ComparePage:
    """Components and listeners of the page.

    Attributes:
        open_outputs: components that `open` and links update.
    """

    def __init__(
        self,
        host: EngineHost,
        experiments: Experiments,
        history: History,
        tab: gr.HTML,
        nav: Navigator,
    ) -> None:
        """`tab` identifies the browser tab."""
        self.host, self.tab = host, tab
        self.catalog = host.catalog
        self.history = history
        self.experiments = experiments
        with gr.Row(equal_height=False):
            with gr.Column(scale=1, elem_id="pg-cmp-side"):
                self._side()
            with gr.Column(scale=4, elem_id="pg-cmp-main"):
                self._main()
        self.values = [getattr(self, name) for name in FIELDS]
        self.form = self.configurations.form
        self.results = [self.panels, self.table]
        self.open_outputs = [*self.values, self.form.spec, self.run_form.spec, *self.results]
        self._listen()
        nav.at_load(self._listen_to_load)
        nav.link_tree(self.form, self.target)

    # ---- opened by other pages and by URLs

    def open(self, *, run: str = "", **configuration: Any) -> Updates:
        """Updates of `open_outputs`: by `opened`, or one configuration. Raises ConfigError."""
        if run:
            return self.opened(run)
        target, method = configuration["target"], configuration["method"]
        return {
            self.target: gr.update(choices=self.catalog.target_choices(), value=target),
            self.form.spec: self.configurations.spec([(method, configuration["settings"])]),
        }

    def _listen_to_load(self, page: gr.Blocks) -> None:
        """Fill the page for URLs with `compare`, and follow a comparison that is running."""

        def fill(request: gr.Request) -> Updates:
            link = link_params("compare", request.query_params).get("compare")
            return self.opened(link) if link else {self.table: gr.skip()}

        js = last_shown_js("compare", "compare")
        page.load(fill, None, self.open_outputs, **UNQUEUED).then(
            self.follow_link, [self.tab] * 3, self.open_outputs, js=js, **QUEUED
        )

    async def follow_link(
        self, tab: Any, own: Any, last: Any, request: gr.Request
    ) -> AsyncIterator[Updates]:
        """Follow the URL's comparison while it runs.

        Args:
            own: the one that this tab showed last, for a URL without one.
            last: the one that this browser showed last, used only if it is still running.
        """
        link = link_params("compare", request.query_params)
        keys = texts((link.get("compare"),) if link else (own, last))
        job = next(filter(None, map(self.experiments.job, keys)), None)
        shown = own if job is None else job.id
        if shown and not link:
            updates = await attempt_aside(lambda: self._comparison(shown), where="a comparison")
            if not isinstance(updates, Fault):
                yield updates
        if isinstance(job, Comparison):
            if not job.watchers:
                job.owner = comparison_owner(tab, request)
            async for update in self._follow(job):
                yield update
        else:  # Gradio clears an output that a generator yields nothing for
            yield {self.table: gr.skip()}

    def opened(self, link: str) -> Updates:
        """Updates of `open_outputs` for a comparison, or for the configuration of a run.

        An invalid link leaves the form unchanged; an error appears above the panels.
        """

        def read() -> Updates:
            run = self.host.log.get(link)
            return self._fill(from_run(self.catalog, run)) if run else self._comparison(link)

        updates = attempt(read, where="opening a link")
        if isinstance(updates, Fault):
            return {self.panels: fault_message(updates.sentence)}
        return updates

    def _comparison(self, link: str) -> Updates:
        """The form of a comparison, and its results if it is not running."""
        log, compare_id = self.host.log, read_run_id(link)
        updates: Updates = {}
        if self.experiments.job(compare_id) is None:
            results = self._stored(compare_id)
            updates[self.panels] = reopen_message(Race.of(log, results), self.history)
            updates[self.table] = report_html(results, log)
        try:
            return updates | self._fill(from_comparison(self.catalog, log, compare_id))
        except ConfigError:  # its methods are no longer available; show its results nevertheless
            return updates

    def _stored(self, compare_id: str) -> Results:
        return read_results(self.host.log, compare_id, types=self.catalog.types)

    def _fill(self, values: CompareForm) -> Updates:
        """Updates of the form."""
        return {
            **{getattr(self, name): getattr(values, name) for name in FIELDS},
            self.target: gr.update(choices=self.catalog.target_choices(), value=values.target),
            self.form.spec: self.configurations.spec(
                (one.method, one.settings) for one in values.configurations
            ),
            self.run_form.spec: run_form(values.compare, values.limits, values.sampling),
        }

    # ---- layout

    def _side(self) -> None:
        targets = self.catalog.target_choices()
        with gr.Group():
            self.target = gr.Dropdown(targets, label="Target", elem_id="pg-cmp-target")
            self.dtype = gr.Dropdown(DTYPES, label="dtype", elem_id="pg-cmp-dtype")
        self.configurations = ConfigurationPicker(self.host, self.target, "pg-cmp")
        spec = run_form(CompareOptions(), LIMITS, Sampling())
        self.run_form = SettingsForm(spec, elem_id="pg-cmp-run-form", classes=[CompareOptions])

    def _main(self) -> None:
        self._prompt()
        with gr.Row(elem_id="pg-cmp-buttons"):
            self.start = gr.Button("Compare", variant="primary", elem_id="pg-cmp-run")
            self.stop = gr.Button("Stop", elem_id="pg-cmp-stop")
            self.share = gr.Button("Save as HTML", elem_id="pg-cmp-share")
            gr.HTML("Ctrl+Enter compares · Esc stops", elem_id="pg-cmp-keys")
        self.share_message = gr.HTML(elem_id="pg-cmp-share-message")
        self.panels = module_component(
            "compare/comparison.js",
            template=TEMPLATE,
            css=["panel/panel.css", "compare/compare.css"],
            functions=[
                *panel_functions(self.history),
                server_function("show", RunQuestion, lambda q: self.history.show(q.run)),
            ],
            events=["begun"],
            arguments={"figures": panel_figures(), "placeholder": PLACEHOLDER},
            elem_id="pg-cmp-results",
        )
        self.table = gr.HTML(elem_id="pg-cmp-table")
        self.predict = gr.Button("Predict the speedup at larger batch sizes", size="sm")
        self.prediction = gr.HTML()

    def _prompt(self) -> None:
        self.prompts = PromptForm(self.catalog, "pg-cmp")
        suites = [
            (f"{suite.title} ({len(suite.prompts)} prompts)", name)
            for name, suite in self.catalog.suites.items()
        ]
        with gr.Row(elem_id="pg-cmp-kind"):
            self.suite = gr.Dropdown(
                [("One prompt", ""), *suites],
                elem_id="pg-cmp-suite",
                label="prompts",
                **UNLABELLED,
            )
            self.prompts.head()
        with gr.Column() as self.own_prompt:
            self.prompts.body(about_system="optional", lines=2)
        self.mode = self.prompts.mode
        self.system, self.prompt = self.prompts.system, self.prompts.prompt

    # ---- listeners

    def _listen(self) -> None:
        tab_and_panels = [self.tab, self.panels]
        self.start.click(
            self.run,
            [*self.values, self.form.values, self.run_form.values, *tab_and_panels],
            self.results,
            api_name="compare",
            **RAW_QUEUED,
        )
        self.stop.click(self.stop_run, tab_and_panels, None, api_name="stop_compare", **UNQUEUED)
        save_on_click(self.share, self._page, [self.panels], self.share_message)

        async def predict(tab: Any, panels: Any, request: gr.Request) -> AsyncIterator[str]:
            owner, compare_id = f"{owner_of(tab, request)}/batch", compare_of(panels)
            async for html in batch_report_messages(self.host, compare_id, owner):
                yield html

        self.predict.click(predict, tab_and_panels, self.prediction, **QUEUED)
        own = [self.mode, self.prompts.example, self.own_prompt]
        self.suite.change(
            lambda suite: [gr.update(visible=not suite)] * len(own), self.suite, own, **UNQUEUED
        )

    async def run(self, request: gr.Request, *values: Any) -> AsyncIterator[Updates]:
        """Stream one comparison; it continues if the page is left.

        Args:
            values: values of the components, in the order of the inputs.
        """
        *fields, form, run_form, tab, panels = values

        def start() -> Experiment:
            shared = {"configurations": read_configurations(form), **FormValues.of(run_form).values}
            sent = {**shared, **dict(zip(FIELDS, fields, strict=True))}
            plan = CompareForm.parse(sent).plan(self.catalog)
            return self.experiments.start(plan, owner=comparison_owner(tab, request))

        started = await attempt_aside(start, where="starting a comparison")
        if isinstance(started, Fault):
            yield {self.panels: fault_message(started.sentence, panels)}
            return
        assert isinstance(started, Comparison)
        async for update in self._follow(started):
            yield update

    async def _follow(self, job: Comparison) -> AsyncIterator[Updates]:
        """Updates of panels and table while a comparison runs."""
        report = None
        async for message in stream(job, self.history):
            updates: Updates = {self.panels: message}
            if message["report"] != report:
                report = message["report"]
                results = None if job.race is None else job.race.results
                updates[self.table] = await run_sync(report_html, results, self.host.log)
            yield updates

    def stop_run(self, tab: Any, panels: Any, request: gr.Request) -> None:
        """Stop the tab's comparison and the displayed one, which may be of another tab."""
        self.experiments.cancel_owner(comparison_owner(tab, request))
        job = self.experiments.job(compare_of(panels))
        if job is not None:
            job.cancel()

    def _page(self, panels: Any) -> tuple[str, str]:
        """Name and text of a file with the displayed comparison."""
        compare_id = compare_of(panels)
        if not compare_id:
            raise ConfigError("There is no comparison to save yet. Run one first.")
        return f"comparison-{compare_id}.html", page_html(self._stored(read_run_id(compare_id)))


def run_form(options: CompareOptions, limits: Limits, sampling: Sampling) -> dict[str, Any]:
    """The form of the settings that all configurations share."""
    return spec_of(
        Group.of("compare", "Comparison", options),
        Group.of("limits", "Limits", limits),
        Group.of("sampling", "Sampling", sampling),
    )


def comparison_owner(tab: Any, request: gr.Request) -> str:
    """Owner of the tab's comparisons, so that they and its other runs do not stop each other."""
    return f"{owner_of(tab, request)}/compare"


def compare_of(panels: Any) -> str:
    """The id of the comparison that a panel message shows; empty if there is none."""
    text = text_of(panels, "compare")
    return text_of(attempt(lambda: read_json(text, what="The comparison"), where="a panel"), "id")


async def batch_report_messages(
    host: EngineHost, compare_id: str, owner: str
) -> AsyncIterator[str]:
    """Yields the table; before it, the progress of measuring what it needs (half a minute)."""
    try:
        read = partial(batch_report, host.log, host.catalog, read_run_id(compare_id))
        report = await run_sync(read)
        if report is None:
            job = await run_sync(partial(measure_for, host, compare_id, owner=owner))
            while not job.over.is_set():
                yield sentence_html(f"{job.status_text} …")
                await asyncio.sleep(POLL_S)
            if job.error:
                yield sentence_html(Fault(job.error, expected=True))
                return
            report = await run_sync(read)
    except Exception as error:
        yield sentence_html(fault_of(error, where="predicting speedups of batches"))
        return
    yield sentence_html("Stopped.") if report is None else batch_report_html(report)


def batch_report_html(report: BatchReport) -> str:
    """A row per configuration, a column per batch size."""
    heads = {"speedup with": "", **{f"{b} at once": BATCH_FORMULA for b in report.batches}}
    rows = [[Cell(name), *map(_times, row)] for name, row in report.speedups.items()]
    about = sentence_html(ABOUT_BATCHES.format(by=report.by))
    return table_html("Speedup by number of texts at once", heads, rows) + about


def _times(speedup: float) -> Cell:
    mood = "good" if speedup > 1 + EQUAL_MARGIN else "bad" if speedup < 1 - EQUAL_MARGIN else ""
    return Cell(formats.speedup(speedup), mood=mood)
