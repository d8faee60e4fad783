"""The Generate page: pick target and method, prompt, watch the tokens, inspect the steps."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any

import gradio as gr

from engine.model.chat_template import read_options
from engine.model.facts import chat_template_of
from playground.errors import Fault, attempt, attempt_aside
from playground.experiments.fastest import OWNER, plan_of
from playground.experiments.service import Experiments
from playground.host.catalog import Catalog
from playground.host.controls import FormValues, changed_by
from playground.host.doctor import diagnose
from playground.host.live import API_OWNER
from playground.host.request import DTYPES, read_request, read_run_id
from playground.host.result import as_set_sentence
from playground.host.runner import EngineHost
from playground.host.stream import RunStream, follow, refusal
from playground.runs.reading import History
from playground.web.address import address_js, link_params
from playground.web.components import static_text, token_panels
from playground.web.forms import (
    QUEUED,
    RAW,
    RAW_LATEST,
    RAW_QUEUED,
    UNQUEUED,
    PromptForm,
    SettingsForm,
    Updates,
    on_fault,
    skip_on_fault,
)
from playground.web.generate_form import (
    Examples,
    GenerateForm,
    MethodFile,
    ThinkingSwitch,
    method_form,
    with_text_drafting,
)
from playground.web.memory import chat_of, keep_form, last_run_of, last_shown_js, owner_of
from playground.web.navigator import Navigator
from playground.web.results import HTML, definitions_html, sentence_html
from playground.web.target import TargetOpener
from storage import RunDetail

PLACEHOLDER = "Write a prompt above and generate. Every token is coloured by where it came from."
FIELDS = ("target", "dtype", "method", "mode", "system", "prompt")
UNAVAILABLE = HTML.from_string(
    "<details><summary>{{ count }} methods are not available for this target</summary>{{ rows }}"
    "</details>"
)

CLEAR_CHAT_PROMPT = """(mode) => {
  const typed = document.querySelector("#pg-prompt textarea")?.value ?? "";
  const sent = document.querySelector("#pg-panel .panels")?.dataset.prompt ?? "";
  return mode === "chat" && typed.trim() === sent.trim() ? "" : typed;
}"""
"""Clears the box of the prompt that was sent, and keeps what was typed since."""
SHOW_SEARCH = """() => setTimeout(() => {
  const report = document.querySelector("#pg-benchmark .pg-main");
  if (report?.getBoundingClientRect().top > innerHeight / 2) report.scrollIntoView();
}, 300)"""
"""Scrolls past the form of the Benchmark page, where that is above the report."""


class GeneratePage:
    """Components and listeners of the page.

    Attributes:
        fields: components whose values `read_request` reads, by name.
        open_outputs: components that `open` updates.
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
        self.host, self.tab, self.nav = host, tab, nav
        self.experiments = experiments
        self.catalog: Catalog = host.catalog
        self.history = history
        self.form_values = GenerateForm(host)
        with gr.Row():
            with gr.Column(elem_id="pg-side"):
                self._side()
            with gr.Column(scale=4, elem_id="pg-main"):
                self._main()
        self.fields = {name: getattr(self, name) for name in FIELDS}
        self.fields |= {"form": self.form.values, "run_form": self.run_form.values}
        self.open_outputs = [self.target, self.method, self.form.spec, self.dtype]
        self.open_outputs += [self.run_form.spec, self.mode, self.system, self.prompt]
        self.method_inputs = [self.target, self.method, self.form.values]
        self.status_outputs = [self.target_state, self.method, self.expected]
        self._listen()
        self._listen_to_links()

    # ---- layout

    def _side(self) -> None:
        targets = self.catalog.target_choices()
        first = targets[0][1]
        methods = self.host.menu.choices(first)
        with gr.Group():
            self.target = gr.Dropdown(targets, label="Target", elem_id="pg-target")
            self.opener = TargetOpener(self.host)
            self.dtype = gr.Dropdown(DTYPES, label="dtype", elem_id="pg-dtype")
            self.target_state = gr.HTML(self.describe_target(), elem_id="pg-target-state")
            picked = self.catalog.first_method(first)
            self.method = gr.Dropdown(methods, value=picked, label="Method", elem_id="pg-method")
            self.unavailable = gr.HTML(self.describe_unavailable(first), elem_id="pg-unavailable")
            self.file = MethodFile()
            self.machine = gr.Accordion("This machine", open=False, elem_id="pg-machine")
            with self.machine:
                self.diagnosis = gr.HTML()
        types = self.catalog.types.values()
        self.form = SettingsForm(None, elem_id="pg-method-form", classes=types)
        self.expected = gr.HTML(elem_id="pg-expected")
        self.run_form = SettingsForm(None, elem_id="pg-run-form")

    def _main(self) -> None:
        self.prompts = PromptForm(self.catalog, "pg")
        with gr.Row(elem_id="pg-kind"):
            self.prompts.head()
            self.switch = ThinkingSwitch()
        self.prompts.body(about_system="optional; kept throughout a chat", lines=3, autofocus=True)
        self.mode = self.prompts.mode
        self.system, self.prompt = self.prompts.system, self.prompts.prompt
        self.mode_note = gr.HTML()
        self.mode_parts = [self.target, self.mode, self.mode_note]
        self._buttons()
        self.examples = Examples(self.catalog, self.target)
        gr.HTML(static_text("welcome.html"), elem_id="pg-welcome")
        self.panel = token_panels(
            self.history, placeholder=PLACEHOLDER, elem_id="pg-panel", tab="generate"
        )

    def _buttons(self) -> None:
        with gr.Row(elem_id="pg-buttons"):
            self.generate = gr.Button("Generate", variant="primary", elem_id="pg-generate")
            self.stop = gr.Button("Stop", elem_id="pg-stop")
            self.search = gr.Button("Find the fastest", elem_id="pg-fastest-start")
            self.again = gr.Button("Run again", elem_id="pg-again")
            self.new_chat = gr.Button("New chat", elem_id="pg-new")
            gr.HTML("Ctrl+Enter generates · Esc stops · Ctrl+K goes anywhere", elem_id="pg-keys")

    # ---- listeners

    def _listen(self) -> None:
        inputs = [*self.fields.values(), self.panel, self.tab]

        def by_text(raw: dict[str, Any]) -> dict[str, Any]:
            return {**raw, "form": with_text_drafting(raw["form"])}

        runs = [
            (self.generate.click, "run", self.run()),
            (self.again.click, "run_again", self.run(again=True)),
            (self.panel.by_text, "run_by_text", self.run(again=True, adapt=by_text)),
        ]
        for button, draws_tree in self.examples.buttons.items():
            adapt = partial(self.examples.request, draws_tree)
            runs.append((button.click, "run_example", self.run(adapt=adapt)))
        switch_inputs: list[Any] = [self.target, self.mode, self.run_form.values]
        changes = [part.change for part in switch_inputs]
        gr.on(changes, self.fit_switch, switch_inputs, self.switch.outputs, **RAW_LATEST)
        self.switch.listen(self.run_form)
        self.streams = [
            event(run, inputs, self.panel, api_name=name, **RAW_QUEUED) for event, name, run in runs
        ]
        for stream in self.streams:
            stream.then(self.describe_status, self.method_inputs, self.status_outputs, **RAW)
            stream.then(self.fit_mode, self.mode_parts, self.mode_parts[1:], **RAW)
            stream.then(self.fit_switch, switch_inputs, self.switch.outputs, **RAW)

        def draft_by_text(spec: Any, form: Any) -> Any:
            match spec, with_text_drafting(form):
                case {"groups": _}, {"values": values}:
                    return {**spec, "values": values}
            return gr.skip()

        form = [self.form.spec, self.form.values]
        self.panel.by_text(draft_by_text, form, self.form.spec, **UNQUEUED)
        self.examples.listen(self.open, self.open_outputs)
        self.panel.begun(None, self.mode, self.prompt, js=CLEAR_CHAT_PROMPT, **UNQUEUED)
        self.stop.click(self.stop_runs, [self.tab, self.panel], None, api_name="stop", **UNQUEUED)
        self._listen_to_pickers()

    def _listen_to_pickers(self) -> None:
        self.machine.expand(self.describe_machine, None, self.diagnosis, **UNQUEUED)
        picked, js = [self.target, self.method], address_js("generate", "target", "method")
        gr.on([part.change for part in picked], None, picked, None, js=js, **UNQUEUED)
        self.target.change(
            self.pick_target,
            [self.target, self.method],
            [self.method, self.unavailable],
            **RAW,
        )
        self.target.change(self.fit_mode, self.mode_parts, self.mode_parts[1:], **RAW)
        self.mode.input(lambda: "", None, self.mode_note, **UNQUEUED)
        form = [self.method, self.form.spec]
        self.method.change(self.pick_method, form, self.form.spec, **RAW)
        changes = [self.target.change, self.form.values.change]
        gr.on(changes, self.describe_expected, self.method_inputs, self.expected, **RAW)
        self.file.listen(self.target, self.form_values.of_file, form)

    def run(
        self, *, again: bool = False, adapt: Callable[[dict[str, Any]], Any] = lambda raw: raw
    ) -> Callable[..., AsyncIterator[dict[str, Any]]]:
        """A listener that streams a run. Leaving the page closes its generator, not the run.

        Args:
            again: run the last prompt again, with the current settings.
            adapt: changes the input of `read_request` for this run.
        """

        async def stream(request: gr.Request, *values: Any) -> AsyncIterator[dict[str, Any]]:
            *own, panel, tab = values
            past = {"repeats": last_run_of(panel)} if again else {"parent": chat_of(panel)}
            raw, owner = dict(zip(self.fields, own, strict=True)) | past, owner_of(tab, request)
            started = await attempt_aside(
                lambda: self.host.generate(read_request(self.catalog, adapt(raw)), owner=owner),
                where="starting a run",
            )
            if isinstance(started, Fault):
                yield refusal(started.sentence, chat_of(panel))
                return
            async for message in follow(RunStream([started])):
                yield message

        return stream

    def _search_request(self, *values: Any) -> dict[str, Any]:
        """Input of `read_request`; the chat's last question if sending it has emptied the box."""
        *own, panel = values
        raw, chat = dict(zip(self.fields, own, strict=True)), chat_of(panel)
        if str(raw["prompt"] or "").strip() or not isinstance(chat, str):
            return raw
        live = self.host.runs.get(chat)
        run = self.host.log.get(live.log_id or "" if live else chat)
        return raw if run is None else raw | {"prompt": run.prompt_text}

    async def follow_link(
        self, tab: Any, own: Any, last: Any, request: gr.Request
    ) -> AsyncIterator[dict[str, Any]]:
        """Show the URL's run, and follow it while it is running.

        Args:
            own: the run that this tab showed last, for a URL without one.
            last: the run that this browser showed last; followed only if it is still running and
                no other tab shows it.
        """
        link = link_params("generate", request.query_params)
        linked_id = link["run"] if "run" in link else own
        run_id = attempt(lambda: read_run_id(linked_id or last or "none"), where="following a link")
        run = None if isinstance(run_id, Fault) else self.history.unfinished(run_id)
        earlier: Sequence[str] | Fault = ()
        if run is not None:  # before its watchers are counted
            read = partial(self.history.earlier_runs, run.id)
            earlier = await attempt_aside(read, where="reading a chat")
        if run is not None and (linked_id or not run.watchers):
            if not run.watchers and not run.owner.startswith(API_OWNER):
                run.owner = owner_of(tab, request)
            known = () if isinstance(earlier, Fault) else earlier
            stream = RunStream([run], earlier=known)
            async for message in follow(stream, resync=True):
                yield message
        elif linked_id:
            opened = await attempt_aside(
                lambda: self.history.show(read_run_id(linked_id)), where="opening a run"
            )
            if isinstance(opened, Fault):
                yield refusal(opened.sentence, None)
            else:
                yield {**opened, "chat": linked_id}
        else:  # Gradio clears an output that a generator yields nothing for
            yield gr.skip()

    def describe_target(self) -> str:
        """The loaded target in one line."""
        loaded = self.host.loaded
        if loaded is None:
            return sentence_html("Nothing is loaded yet; the first run loads its target.")
        spec = self.catalog.targets.get(loaded.name)
        facts = [spec.title if spec and spec.title else loaded.name, loaded.dtype_name]
        return sentence_html(
            " · ".join([*facts, loaded.device_name, f"context {loaded.context_len}"])
        )

    def describe_status(self, target: Any, method: Any, form: Any) -> tuple[str, Any, str]:
        """The loaded target, the method menu with measured speedups, and the expected cost."""
        menu = gr.update(choices=self.host.menu.choices(target))
        return self.describe_target(), menu, self.describe_expected(target, method, form)

    @on_fault(lambda _: "", where="predicting a run")
    def describe_expected(self, target: Any, method: Any, form: Any) -> str:
        """The expected cost of `drafting: as set`; empty for `drafting: auto`."""
        values = FormValues.of(form).values.get("method", {})
        config = changed_by(self.catalog.method(method).config, values)
        name = self.catalog.target(target).name
        sentence = as_set_sentence(self.host.experience, name, config)
        return sentence_html(sentence) if sentence else ""

    @on_fault(sentence_html, where="looking at the machine")
    def describe_machine(self) -> str:
        """What this machine offers for decoding, and what is slow on it."""
        machine = diagnose(self.host.cache_dir, self.host.device)
        return definitions_html([*machine.facts, *(("slow", advice) for advice in machine.advice)])

    def stop_runs(self, tab: Any, panel: Any, request: gr.Request) -> None:
        """Stop the tab's runs and the displayed one, which may be of another tab."""
        self.host.cancel_owner(owner_of(tab, request))
        chat = chat_of(panel)
        run = self.history.unfinished(chat) if isinstance(chat, str) else None
        if run is not None:
            run.cancel()

    def clear(self, tab: Any, panel: Any, request: gr.Request) -> tuple[None, str]:
        self.stop_runs(tab, panel, request)
        return None, ""

    def pick_target(self, target: Any, method: Any) -> tuple[Any, str]:
        """An update of the method picker for a target, and the unavailable methods as HTML."""
        choices = self.host.menu.choices(target)
        keys = [key for _, key in choices]
        value = method if method in keys else self.catalog.first_method(str(target))
        return gr.update(choices=choices, value=value), self.describe_unavailable(target)

    def fit_mode(self, target: Any, mode: Any, note: Any) -> tuple[Any, Any]:
        """Switch to Completion for a target without a chat template, and later back to Chat.

        Args:
            note: says that the page, not the user, chose the mode.

        Returns:
            Values of mode and note.
        """
        template = self._chat_template(target)
        if template == "" and mode == "chat":
            text = "This model has no chat template, so its prompt is continued as it is."
            return "raw", sentence_html(text)
        return ("chat", "") if note and template != "" else (gr.skip(), gr.skip())

    @skip_on_fault("reading a chat template")
    def fit_switch(self, target: Any, mode: Any, form: Any) -> tuple[Any, Any]:
        """Show the thinking switch for a target whose chat template asks for it."""
        return self.switch.fit(read_options(self._chat_template(target) or ""), mode, form)

    def _chat_template(self, target: Any) -> str | None:
        """The target's chat template; empty without one, None where only loading it tells."""
        spec = self.catalog.targets.get(target) if isinstance(target, str) else None
        loaded = self.host.loaded
        if loaded is not None and loaded.name == target:
            return loaded.chat_template
        return None if spec is None else chat_template_of(spec)

    def describe_unavailable(self, target: Any) -> str:
        """The methods that are not available for the target, and why, as HTML."""
        rows = self.catalog.unavailable(target if isinstance(target, str) else "")
        return UNAVAILABLE.render(count=len(rows), rows=definitions_html(rows, "")) if rows else ""

    @skip_on_fault("picking a method")
    def pick_method(self, key: Any, form: Any) -> Any:
        """The method's form, unless it is displayed already, e.g. filled in from a file."""
        if isinstance(form, dict) and form.get("method") == key:
            return gr.skip()
        return method_form(self.catalog.method(key), key)

    # ---- opened by other pages, by URLs and after a reload

    def open(self, *, run: RunDetail | None = None, **method: Any) -> Updates:
        """Updates of `open_outputs` by `of_run` or `of_method`. Raises ConfigError."""
        form = self.form_values
        filled = form.of_method(**method) if run is None else form.of_run(run)
        return dict(zip(self.open_outputs, filled, strict=False))

    def listen_to_opener(self, page: gr.Blocks, others: Sequence[gr.Dropdown]) -> None:
        """Open targets by path or hub id; a target picked here is picked on all pages."""
        self.opener.listen(self.dtype, self.target, others)
        same = f"(target) => Array({len(others)}).fill(target)"
        self.target.input(None, self.target, list(others), js=same, **UNQUEUED)
        pickers = [self.target, *others]
        page.load(lambda: self.opener.menus(pickers), None, pickers, **UNQUEUED)

    def _listen_to_links(self) -> None:
        """Find the fastest method on the Benchmark page; open a tree, or a run, on its page."""

        def find(*values: Any) -> Updates:
            def start() -> str:
                plan = plan_of(self.catalog, self.host.log, self._search_request(*values))
                return self.experiments.start(plan, owner=OWNER).id

            search = attempt(start, where="finding the fastest")
            if isinstance(search, Fault):
                return {self.panel: refusal(search.sentence, chat_of(values[-1]))}
            return self.nav.to("benchmark", benchmark=search)

        inputs = [*self.fields.values(), self.panel]
        click = self.search.click
        self.nav.link(click, ["benchmark"], find, inputs, self.panel, then_js=SHOW_SEARCH)
        self.nav.link_tree(self.form, self.target)
        self.nav.link_run(self.panel)
        self.nav.at_load(self._listen_to_load)

    def _listen_to_load(self, page: gr.Blocks) -> None:
        """Restore the form, or fill it in from the URL's run; show that run."""
        read = keep_form(page, self.fields, self.form_values.initial_values, self.open_outputs)
        read.then(self.describe_status, self.method_inputs, self.status_outputs, **RAW)
        js = last_shown_js("generate", "run")
        followed = read.then(self.follow_link, [self.tab] * 3, self.panel, js=js, **QUEUED)
        self.new_chat.click(
            self.clear,
            [self.tab, self.panel],
            [self.panel, self.prompt],
            cancels=[*self.streams, followed],
            api_name="new_chat",
            **UNQUEUED,
        )
