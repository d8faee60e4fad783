"""The Compare page: two to four configurations on the same prompts, a race, and the reasons."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import gradio as gr

from playground.deploy import Question
from playground.errors import Fault, attempt
from playground.experiments.compare.form import FIELDS, MAX_CONFIGURATIONS, read_held, read_plan
from playground.experiments.compare.job import CompareJob
from playground.experiments.compare.links import first_methods, method_form, run_form
from playground.experiments.compare.stream import fault_message, stream
from playground.experiments.job import Jobs
from playground.host.catalog import Catalog
from playground.host.request import DTYPES, read_run_id
from playground.host.runner import EngineHost
from playground.host.stream import History
from playground.web.compare_links import updates_of
from playground.web.compare_panels import compare_panels
from playground.web.deploy import DeployPage, Updates
from playground.web.forms import SettingsForm

OWN_PROMPT = ""
NO_EXAMPLE = ""
STARTS_WITH = 2
QUIET: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}


class ComparePage:
    """Components and listeners of the page.

    Attributes:
        outputs: what a link sets, in the order of `compare_links.updates_of`.
    """

    def __init__(self, host: EngineHost, history: History) -> None:
        self.host = host
        self.catalog: Catalog = host.catalog
        self.history = history
        self.jobs = Jobs()
        with gr.Row(equal_height=False):
            with gr.Column(scale=1, elem_id="pg-cmp-side"):
                self._side()
            with gr.Column(scale=4, elem_id="pg-cmp-main"):
                self._main()
        self.held = [getattr(self, name) for name in FIELDS]
        forms = list(zip(self.methods, self.forms, strict=True))
        self.slots = [part for method, form in forms for part in (method, form.asked)]
        self.slots_held = [part for method, form in forms for part in (method, form.held)]
        self.outputs = [*self.held, *self.slots, *self.columns, self.run_form.asked, self.panels]
        self._listen()

    def listen_to_links(self, page: gr.Blocks, tabs: gr.Tabs) -> None:
        """Open the page for addresses with `compare` or `runs`."""

        def load(request: gr.Request) -> list[Any]:
            found = updates_of(self, dict(request.query_params))
            if found is None:
                return [gr.skip() for _ in (tabs, *self.outputs)]
            return [gr.Tabs(selected="compare"), *found]

        page.load(load, None, [tabs, *self.outputs], queue=False, **QUIET)

    def listen_to_deploy(self, tabs: gr.Tabs, deploy: DeployPage) -> None:
        """Take a configuration to the Deploy page, by a run of it."""

        def hand_over(event: gr.EventData = None) -> Updates:  # type: ignore[assignment]
            data = None if event is None else event._data
            run = attempt(
                lambda: read_run_id(data.get("id") if isinstance(data, dict) else None),
                where="handing over a configuration",
            )
            if isinstance(run, Fault):
                return {tabs: gr.skip()}
            return {tabs: gr.Tabs(selected="deploy"), **deploy.open(Question(run=run))}

        self.panels.deploy(hand_over, None, [tabs, *deploy.outputs], queue=False, **QUIET)

    # ---- layout

    def _side(self) -> None:
        targets = self.catalog.target_choices()
        with gr.Group():
            self.target = gr.Dropdown(
                targets, value=targets[0][1], label="Target", elem_id="pg-cmp-target"
            )
            self.dtype = gr.Dropdown(
                list(DTYPES), value="auto", label="dtype", elem_id="pg-cmp-dtype"
            )
        self.run_form = SettingsForm(run_form(), elem_id="pg-cmp-run-form")

    def _main(self) -> None:
        with gr.Row(elem_id="pg-cmp-head"):
            self.count = gr.Radio(
                list(range(1, MAX_CONFIGURATIONS + 1)),
                value=STARTS_WITH,
                label="configurations beside plain decoding",
                elem_id="pg-cmp-count",
                show_label=False,
                container=False,
            )
            gr.HTML(
                "configurations beside plain decoding, which always runs", elem_id="pg-cmp-note"
            )
        with gr.Row(elem_id="pg-cmp-slots", equal_height=False):
            self._slots()
        self._prompt()
        with gr.Row(elem_id="pg-cmp-buttons"):
            self.start = gr.Button("Compare", variant="primary", elem_id="pg-cmp-run")
            self.stop = gr.Button("Stop", elem_id="pg-cmp-stop")
            gr.HTML("Ctrl+Enter compares · Esc stops", elem_id="pg-cmp-keys")
        self.panels = compare_panels(self.host, self.history, elem_id="pg-cmp-board")

    def _slots(self) -> None:
        choices = self.catalog.method_choices(self.target.value)
        starts = first_methods(self.catalog, choices)
        self.columns: list[gr.Column] = []
        self.methods: list[gr.Dropdown] = []
        self.forms: list[SettingsForm] = []
        for i, start in enumerate(starts):
            with gr.Column(visible=i < STARTS_WITH, min_width=200) as column:
                method = gr.Dropdown(
                    choices,
                    value=start,
                    label=f"Configuration {i + 1}",
                    elem_id=f"pg-cmp-method-{i}",
                )
                form = SettingsForm(
                    method_form(self.catalog.method(start)), elem_id=f"pg-cmp-form-{i}"
                )
            self.columns.append(column)
            self.methods.append(method)
            self.forms.append(form)

    def _prompt(self) -> None:
        plain: dict[str, Any] = {"show_label": False, "container": False}
        suites = [
            (f"{suite.title} ({len(suite.prompts)} prompts)", name)
            for name, suite in self.catalog.suites.items()
        ]
        with gr.Row(elem_id="pg-cmp-kind"):
            self.suite = gr.Dropdown(
                [("One prompt", OWN_PROMPT), *suites],
                value=OWN_PROMPT,
                elem_id="pg-cmp-suite",
                label="prompts",
                **plain,
            )
            self.mode = gr.Radio(
                [("Chat", "chat"), ("Completion", "raw")],
                value="chat",
                elem_id="pg-cmp-mode",
                label="kind of prompt",
                **plain,
            )
            self.example = gr.Dropdown(
                [("Example prompts …", NO_EXAMPLE), *self.catalog.examples()],
                value=NO_EXAMPLE,
                elem_id="pg-cmp-example",
                label="example prompts",
                **plain,
            )
        self.system = gr.Textbox(
            lines=1,
            max_lines=6,
            elem_id="pg-cmp-system",
            label="system prompt",
            placeholder="System prompt (optional)",
            **plain,
        )
        self.prompt = gr.Textbox(
            lines=2,
            max_lines=12,
            elem_id="pg-cmp-prompt",
            label="prompt",
            placeholder="Prompt",
            **plain,
        )

    # ---- listeners

    def _listen(self) -> None:
        self.start.click(
            self.run,
            [*self.held, *self.slots_held, self.run_form.held, self.panels],
            self.panels,
            concurrency_limit=None,
            api_name="compare",
            **QUIET,
        )
        self.stop.click(self.stop_run, None, None, queue=False, api_name="stop_compare", **QUIET)
        self.count.change(self.pick_count, self.count, self.columns, queue=False, **QUIET)
        self.target.change(
            self.pick_target, [self.target, *self.methods], self.slots, queue=False, **QUIET
        )
        for method, form in zip(self.methods, self.forms, strict=True):
            method.input(self.pick_method, method, form.asked, queue=False, **QUIET)
        self.suite.change(
            self.pick_suite,
            [self.suite, self.mode],
            [self.mode, self.example, self.system, self.prompt],
            queue=False,
            **QUIET,
        )
        self.mode.change(
            lambda mode, suite: gr.update(visible=mode == "chat" and not suite),
            [self.mode, self.suite],
            self.system,
            queue=False,
            **QUIET,
        )
        self.example.input(
            self.pick_example, self.example, [self.prompt, self.mode], queue=False, **QUIET
        )

    async def run(self, request: gr.Request, *held: Any) -> AsyncIterator[dict[str, Any]]:
        """Stream one comparison. Leaving the page closes this generator: it is cancelled.

        Args:
            held: what the components hold, in the order of the inputs; the panels come last.
        """
        owner, shown = owner_of(request), held[-1] if held else None
        started = attempt(
            lambda: CompareJob.start(
                self.host,
                self.jobs,
                read_plan(self.catalog, read_held(held[:-1])),
                owner=owner,
            ),
            where="starting a comparison",
        )
        if isinstance(started, Fault):
            yield fault_message(started.sentence, shown)
            return
        try:
            async for message in stream(started, self.history):
                yield message
        finally:
            if not started.over.is_set():
                started.cancel()

    def stop_run(self, request: gr.Request) -> None:
        self.jobs.cancel_owner(owner_of(request))

    def pick_count(self, count: Any) -> list[Any]:
        shown = count if isinstance(count, int) else STARTS_WITH
        return [gr.update(visible=i < shown) for i in range(MAX_CONFIGURATIONS)]

    def pick_target(self, target: Any, *methods: Any) -> list[Any]:
        """Methods that fit the target; the picked ones stay if they do, with their settings."""
        choices = self.catalog.method_choices(target if isinstance(target, str) else "")
        keys = {key for _, key in choices}
        updates: list[Any] = []
        for method, start in zip(methods, first_methods(self.catalog, choices), strict=False):
            fits = isinstance(method, str) and method in keys
            updates.append(gr.update(choices=choices, value=method if fits else start))
            updates.append(gr.skip() if fits else method_form(self.catalog.method(start)))
        return updates

    def pick_method(self, key: Any) -> Any:
        picked = attempt(lambda: method_form(self.catalog.method(key)), where="picking a method")
        return gr.skip() if isinstance(picked, Fault) else picked

    def pick_suite(self, suite: Any, mode: Any) -> list[Any]:
        own = not suite
        shown = (own, own, own and mode == "chat", own)
        return [gr.update(visible=visible) for visible in shown]

    def pick_example(self, key: Any) -> Any:
        if key == NO_EXAMPLE:
            return gr.skip(), gr.skip()
        picked = attempt(lambda: self.catalog.example(key), where="picking an example")
        if isinstance(picked, Fault):
            return gr.skip(), gr.skip()
        text, is_raw = picked
        return text, "raw" if is_raw else "chat"


def owner_of(request: gr.Request) -> str:
    """Apart from the tab's other runs, which neither stop a comparison nor are stopped by it."""
    session = getattr(request, "session_hash", None) or "no session"
    return f"{session}/compare"
