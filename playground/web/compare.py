"""The Compare page: two to four configurations on the same prompts, a race, and the reasons."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from functools import partial
from typing import Any

import gradio as gr
from anyio.to_thread import run_sync

from engine.config import Limits, Sampling, Settings
from engine.errors import ConfigError
from engine.metrics import FORMULAS
from engine.safe_text import read_json
from playground.errors import Fault, attempt, attempt_aside
from playground.experiments.compare.form import (
    MAX_CONFIGURATIONS,
    CompareForm,
    CompareOptions,
    first_methods,
    from_comparison,
    from_runs,
    method_form,
    run_form,
)
from playground.experiments.compare.live import fault_message, reopened, stream, view_of
from playground.experiments.compare.race import Race
from playground.experiments.experiment import Experiment
from playground.experiments.report.page import page_html
from playground.experiments.report.report import Results, read_results
from playground.experiments.service import Experiments
from playground.host.catalog import Catalog
from playground.host.controls import settings_from
from playground.host.menu import Choices
from playground.host.request import (
    DTYPES,
    MAX_PROMPT_CHARS,
    MAX_SYSTEM_CHARS,
    config_of,
    read_run_id,
    texts,
)
from playground.host.runner import EngineHost
from playground.host.stream import History
from playground.web.address import switch_to
from playground.web.components import drawn_by
from playground.web.concurrency import Concurrency
from playground.web.forms import BARE, QUEUED, QUIET, PromptForm, SettingsForm, or_skip
from playground.web.memory import Memory, is_anything, memory_choice, memory_settings, memory_text
from playground.web.memory import owner_of as tab_of
from playground.web.report import report_html
from playground.web.results import saves
from playground.web.rpc import panel_functions, race_functions

OWN_PROMPT = ""
SHARED: dict[str, type[Settings]] = {
    "compare": CompareOptions,
    "limits": Limits,
    "sampling": Sampling,
}
"""Groups of the form of everything that all configurations share."""
STARTS_WITH = 2
FIELDS = ("target", "dtype", "mode", "system", "prompt", "suite", "count")
"""Components whose values go into the form as they are."""
PLACEHOLDER = (
    "Choose configurations and a prompt, then compare: plain decoding and every configuration "
    "write the same text in turn, and race on their recorded clocks."
)
TEMPLATE = (
    '<div class="compare-head"></div><div class="compare-race"></div>'
    '<div class="panels" data-count="1"></div>'
)


class ComparePage:
    """Components and listeners of the page.

    Attributes:
        outputs: what a link sets, in the order of `opened`.
    """

    def __init__(
        self, host: EngineHost, experiments: Experiments, history: History, tab: gr.HTML
    ) -> None:
        """`tab`: tells browser tabs apart."""
        self.host = host
        self.tab = tab
        self.catalog: Catalog = host.catalog
        self.history = history
        self.experiments = experiments
        with gr.Row(equal_height=False):
            with gr.Column(scale=1, elem_id="pg-cmp-side"):
                self._side()
            with gr.Column(scale=4, elem_id="pg-cmp-main"):
                self._main()
        self.values = [getattr(self, name) for name in FIELDS]
        forms = list(zip(self.methods, self.forms, strict=True))
        self.slots = [part for method, form in forms for part in (method, form.spec)]
        self.slots_values = [part for method, form in forms for part in (method, form.values)]
        self.outputs = [*self.values, *self.slots, *self.columns]
        self.outputs += [self.run_form.spec, self.panels, self.table]
        memory = dict(zip(FIELDS, self.values, strict=True)) | {"form": self.run_form.values}
        for i, (method, form) in enumerate(forms):
            memory |= {f"method {i}": method, f"form {i}": form.values}
        self.memory = Memory("compare", memory, parameter="compare")
        self._listen()

    def listen_to_links(self, page: gr.Blocks) -> None:
        """Fill the page for addresses with `compare` or `runs`."""

        def fill(memory: Mapping[str, Any], params: Mapping[str, str]) -> list[Any]:
            updates = self.opened(params)
            if updates is None:
                form = self._remembered(memory) if is_anything(memory) else self._untouched()
                return [*form, gr.skip(), gr.skip()]
            if is_anything(memory) and not memory.get(
                "foreign"
            ):  # as it was left, not as it was begun
                updates[: len(self.outputs) - 2] = self._remembered(memory)
            return updates

        self.memory.listen(page, fill, self.outputs).then(
            self.follow_link,
            [self.tab] * 3,
            [self.panels, self.table],
            js=self.memory.last_js,
            concurrency_limit=None,
            **QUEUED,
        )

    async def follow_link(
        self, tab: Any, own: Any, last: Any, request: gr.Request
    ) -> AsyncIterator[list[Any]]:
        """Follow the address's comparison while it goes on.

        Args:
            own: the one that this tab had on show last; where the address has none.
            last: the one that this browser had on show last; taken only if it goes on.
        """
        link = dict(request.query_params).get("compare")
        jobs = map(self.experiments.job, texts((link,) if link else (own, last)))
        job = next(filter(None, jobs), None)
        if job is not None and job.view is not None:
            if not job.watchers:
                job.owner = owner_of(tab, request)
            async for update in self._follow(job):
                yield update
            return
        updates = await attempt_aside(lambda: self._results(own), where="opening a comparison")
        if link or not own or isinstance(updates, Fault):
            yield [gr.skip(), gr.skip()]  # Gradio empties what a generator says nothing of
        else:
            yield updates

    def listen_to_runs(self, tabs: gr.HTML, panel: gr.HTML) -> None:
        """Take the prompt, method and settings of a panel's run here."""

        def take(event: gr.EventData = None) -> list[Any]:  # type: ignore[assignment]
            data = {} if event is None else event._data
            run = data.get("run") if isinstance(data, dict) else None
            updates = self.opened({"runs": run}) if isinstance(run, str) and run else None
            if updates is None:
                return [gr.skip() for _ in (tabs, *self.outputs)]
            return [switch_to("compare"), *updates]

        panel.compare(take, None, [tabs, *self.outputs], **QUIET)

    def opened(self, params: Mapping[str, str]) -> list[Any] | None:
        """Updates of `outputs`; None for any address that is not of this page.

        `compare=ID` shows a comparison; `compare=a,b` and `runs=a,b` take the configurations of
        runs (`runs={…}` is the table of the Runs page). A link that leads nowhere leaves the form
        alone and says so above the panels.
        """
        link, runs = params.get("compare") or "", params.get("runs") or ""
        if not link and (not runs or runs.startswith("{")):
            return None
        unchanged = [gr.skip(), gr.skip()]
        is_run = "," in link or (link and self.host.log.get(link) is not None)
        updates = attempt(
            lambda: (
                self._comparison(link)
                if link and not is_run
                else [*self._fill(from_runs(self.catalog, self.host.log, link or runs)), *unchanged]
            ),
            where="opening a link",
        )
        if isinstance(updates, Fault):
            return [*self._untouched(), fault_message(updates.sentence), gr.skip()]
        return updates

    def _comparison(self, link: str) -> list[Any]:
        compare_id, log = read_run_id(link), self.host.log
        going_on = self.experiments.job(compare_id) is not None
        if going_on:  # what is on show of it comes by its stream
            filled = attempt(
                lambda: self._fill(from_comparison(self.catalog, log, compare_id)),
                where="opening a comparison",
            )
            form = self._untouched() if isinstance(filled, Fault) else filled
            return [*form, gr.skip(), gr.skip()]
        results = self._results(compare_id)
        try:
            filled = self._fill(from_comparison(self.catalog, log, compare_id))
        except ConfigError:  # its methods are not on offer any more: show it all the same
            filled = self._untouched()
        return [*filled, *results]

    def _results(self, link: str) -> list[Any]:
        """Values of panels and table for a comparison of the log."""
        results, log = self._stored(link), self.host.log
        return [reopened(Race.of(log, results), self.history), report_html(results, log)]

    def _stored(self, link: str) -> Results:
        return read_results(self.host.log, read_run_id(link), types=self.catalog.types)

    def _untouched(self) -> list[Any]:
        return [gr.skip() for _ in self.outputs[:-2]]

    def _remembered(self, memory: Mapping[str, Any]) -> list[Any]:
        """Updates of every output but the results, from what a browser kept."""
        names = list(self.catalog.targets)
        target = memory_choice(memory, "target", names, names[0])
        choices = self.catalog.method_choices(target)
        keys = [key for _, key in choices]
        count = memory_choice(memory, "count", list(range(1, MAX_CONFIGURATIONS + 1)), STARTS_WITH)
        slots: list[tuple[str, dict[str, Any] | None]] = []
        for i, start in enumerate(first_methods(self.catalog, choices)[:count]):
            key = memory_choice(memory, f"method {i}", keys, start)
            method, form = self.catalog.method(key), memory.get(f"form {i}")
            own = memory_settings(form, "method", partial(config_of, method))
            slots.append((key, method_form(method, own)))
        form = run_form()
        for group, cls in SHARED.items():
            form["values"][group] = memory_settings(
                memory.get("form"), group, partial(settings_from, cls)
            )
        filled = CompareForm(
            target=target,
            dtype=memory_choice(memory, "dtype", DTYPES, "auto"),
            mode=memory_choice(memory, "mode", ("chat", "raw"), "chat"),
            system=memory_text(memory, "system", MAX_SYSTEM_CHARS),
            prompt=memory_text(memory, "prompt", MAX_PROMPT_CHARS),
            suite=memory_choice(memory, "suite", list(self.catalog.suites), OWN_PROMPT),
            slots=slots,
            form=form,
        )
        return self._fill(filled)

    def _fill(self, filled: CompareForm) -> list[Any]:
        """Updates of every output but the results."""
        choices, offered = self._menu(filled.target)
        count = len(filled.slots)
        own, chat = not filled.suite, filled.mode == "chat"
        slots: list[Any] = []
        for i, start in enumerate(first_methods(self.catalog, offered)):
            own_form = method_form(self.catalog.method(start))
            key, form = filled.slots[i] if i < count else (start, own_form)
            slots += [gr.update(choices=choices, value=key), form]
        return [
            gr.update(choices=self.catalog.target_choices(), value=filled.target),
            filled.dtype,
            gr.update(value=filled.mode, visible=own),
            gr.update(value=filled.system, visible=own and chat),
            gr.update(value=filled.prompt, visible=own),
            filled.suite,
            count,
            *slots,
            *(gr.update(visible=i < count) for i in range(MAX_CONFIGURATIONS)),
            filled.form,
        ]

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
        self.run_form = SettingsForm(
            run_form(), elem_id="pg-cmp-run-form", classes=[CompareOptions]
        )

    def _main(self) -> None:
        with gr.Row(elem_id="pg-cmp-head"):
            self.count = gr.Radio(
                list(range(1, MAX_CONFIGURATIONS + 1)),
                value=STARTS_WITH,
                label="configurations besides plain decoding",
                elem_id="pg-cmp-count",
                show_label=False,
                container=False,
            )
            gr.HTML(
                "configurations besides plain decoding, which always runs", elem_id="pg-cmp-note"
            )
        with gr.Row(elem_id="pg-cmp-slots", equal_height=False):
            self._slots()
        self._prompt()
        with gr.Row(elem_id="pg-cmp-buttons"):
            self.start = gr.Button("Compare", variant="primary", elem_id="pg-cmp-run")
            self.stop = gr.Button("Stop", elem_id="pg-cmp-stop")
            self.share = gr.Button("Save as HTML", elem_id="pg-cmp-share")
            gr.HTML("Ctrl+Enter compares · Esc stops", elem_id="pg-cmp-keys")
        self.share_message = gr.HTML(elem_id="pg-cmp-share-message")
        self.panels = drawn_by(
            "compare/comparison.js",
            template=TEMPLATE,
            css=["panel/panel.css", "compare/compare.css"],
            functions=[*panel_functions(self.history), *race_functions(self.host, self.history)],
            events=["begun"],
            arguments={"formulas": FORMULAS, "placeholder": PLACEHOLDER},
            elem_id="pg-cmp-results",
        )
        self.table = gr.HTML(elem_id="pg-cmp-table")
        self.concurrency = Concurrency(self.host, compare_of)
        saves(self.share, self._page, [self.panels], self.share_message)

    def _page(self, panels: Any) -> tuple[str, str]:
        """The comparison on show as a file."""
        compare_id = compare_of(panels)
        if not compare_id:
            raise ConfigError("There is no comparison to save yet. Run one first.")
        return f"comparison-{compare_id}.html", page_html(self._stored(compare_id))

    def _slots(self) -> None:
        choices, offered = self._menu(self.target.value)
        starts = first_methods(self.catalog, offered)
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
                    method_form(self.catalog.method(start)),
                    elem_id=f"pg-cmp-form-{i}",
                    classes=self.catalog.types.values(),
                )
            self.columns.append(column)
            self.methods.append(method)
            self.forms.append(form)

    def _prompt(self) -> None:
        self.prompts = PromptForm(self.catalog, "pg-cmp")
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
                **BARE,
            )
            self.prompts.head()
        self.prompts.body(about_system="optional", lines=2)
        self.mode, self.example = self.prompts.mode, self.prompts.example
        self.system, self.prompt = self.prompts.system, self.prompts.prompt

    # ---- listeners

    def _listen(self) -> None:
        self.start.click(
            self.run,
            [*self.values, *self.slots_values, self.run_form.values, self.panels, self.tab],
            [self.panels, self.table],
            concurrency_limit=None,
            api_name="compare",
            **QUEUED,
        )
        here = [self.tab, self.panels]
        self.concurrency.listen(self.panels, self.tab)
        self.stop.click(self.stop_run, here, None, queue=False, api_name="stop_compare", **QUEUED)
        self.count.change(self.pick_count, self.count, self.columns, **QUIET)
        self.target.change(self.pick_target, [self.target, *self.methods], self.slots, **QUIET)
        for method, form in zip(self.methods, self.forms, strict=True):
            method.input(self.pick_method, method, form.spec, **QUIET)
        self.suite.change(
            self.pick_suite,
            [self.suite, self.mode],
            [self.mode, self.example, self.system, self.prompt],
            **QUIET,
        )
        self.mode.change(
            lambda mode, suite: gr.update(visible=mode == "chat" and not suite),
            [self.mode, self.suite],
            self.system,
            **QUIET,
        )

    async def run(self, request: gr.Request, *values: Any) -> AsyncIterator[list[Any]]:
        """Stream one comparison; it goes on when the page is left.

        Args:
            values: of the components, in the order of the inputs.
        """
        *slots, form, panels, tab = values[len(FIELDS) :]
        fields = dict(zip(FIELDS, values, strict=False))
        fields |= {"slots": list(zip(slots[::2], slots[1::2], strict=True)), "form": form}
        started = await attempt_aside(
            lambda: self.experiments.start(
                CompareForm.parse(fields).plan(self.catalog), owner=owner_of(tab, request)
            ),
            where="starting a comparison",
        )
        if isinstance(started, Fault):
            yield [fault_message(started.sentence, panels), gr.skip()]
            return
        async for update in self._follow(started):
            yield update

    async def _follow(self, job: Experiment) -> AsyncIterator[list[Any]]:
        """What panels and table show of a comparison, in time."""
        report = None
        async for message in stream(job, self.history):
            same = message["report"] == report
            report, race = message["report"], view_of(job).race
            results = None if race is None else race.results
            yield [
                message,
                gr.skip() if same else await run_sync(report_html, results, self.host.log),
            ]

    def stop_run(self, tab: Any, panels: Any, request: gr.Request) -> None:
        """Stop the tab's comparison, and the one on show, which may be of another tab."""
        self.experiments.cancel_owner(owner_of(tab, request))
        job = self.experiments.job(compare_of(panels))
        if job is not None:
            job.cancel()

    def pick_count(self, count: Any) -> list[Any]:
        num_slots = count if isinstance(count, int) else STARTS_WITH
        return [gr.update(visible=i < num_slots) for i in range(MAX_CONFIGURATIONS)]

    def pick_target(self, target: Any, *methods: Any) -> list[Any]:
        """Methods that fit the target; the picked ones stay if they do, with their settings."""
        choices, offered = self._menu(target if isinstance(target, str) else "")
        keys = {key for _, key in choices}
        updates: list[Any] = []
        for method, start in zip(methods, first_methods(self.catalog, offered), strict=False):
            fits = isinstance(method, str) and method in keys
            updates.append(gr.update(choices=choices, value=method if fits else start))
            updates.append(gr.skip() if fits else method_form(self.catalog.method(start)))
        return updates

    def _menu(self, target: str) -> tuple[Choices, Choices]:
        """What a slot's picker offers, and the same as the catalog lists it."""
        return self.host.menu.choices(target), self.catalog.method_choices(target)

    def pick_method(self, key: Any) -> Any:
        return or_skip(lambda: method_form(self.catalog.method(key)), where="picking a method")

    def pick_suite(self, suite: Any, mode: Any) -> list[Any]:
        own = not suite
        visibility = (own, own, own and mode == "chat", own)
        return [gr.update(visible=visible) for visible in visibility]


def owner_of(tab: Any, request: gr.Request) -> str:
    """Apart from the tab's other runs, which neither stop a comparison nor are stopped by it."""
    return f"{tab_of(tab, request)}/compare"


def compare_of(panels: Any) -> str:
    """The id of the comparison that a message shows; empty where there is none."""
    text = panels.get("compare") if isinstance(panels, dict) else None
    state = attempt(lambda: read_json(str(text), what="The comparison"), where="a comparison")
    compare_id = state.get("id") if isinstance(state, dict) else None
    return compare_id if isinstance(compare_id, str) else ""
