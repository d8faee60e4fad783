"""The Generate page: pick a target and a method, prompt, watch the tokens, walk the steps."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict
from typing import Any

import gradio as gr

from engine import formats
from engine.model.facts import has_chat_template
from playground.errors import Fault, attempt, attempt_aside
from playground.experiments.service import Experiments
from playground.host.catalog import Catalog
from playground.host.doctor import diagnose
from playground.host.request import (
    DTYPES,
    FormValues,
    config_of,
    read_dtype,
    read_request,
    read_run_id,
)
from playground.host.result import as_set_sentence
from playground.host.runner import EngineHost
from playground.host.stream import History, RunStream, adopt, follow, refusal
from playground.web.address import address_js, link_to
from playground.web.components import static_text, token_panels
from playground.web.examples import Examples
from playground.web.fastest import FastestPanel
from playground.web.forms import QUEUED, QUIET, PromptForm, SettingsForm, or_skip
from playground.web.generate_form import GenerateForm, by_text, join_forms, method_form, run_form
from playground.web.memory import Memory, chat_of, last_of, owner_of
from playground.web.method_file import MethodFile
from playground.web.results import HTML, saying
from playground.web.target import TargetOpener

PLACEHOLDER = "Write a prompt above and generate. Every token is coloured by where it came from."
FIELDS = ("target", "dtype", "method", "mode", "system", "prompt")
UNFIT = HTML.from_string("""
{% if rows %}
<details><summary>{{ rows | length }} methods are not available for this target</summary><dl>
{% for name, why in rows %}<dt>{{ name }}</dt><dd>{{ why }}</dd>{% endfor %}
</dl></details>
{% endif %}
""")
MACHINE = HTML.from_string("""
<dl class="pg-machine">
{% for name, text in found.facts %}<dt>{{ name }}</dt><dd>{{ text }}</dd>{% endfor %}
{% for text in found.advice %}<dt class="bad">slow</dt><dd>{{ text }}</dd>{% endfor %}
</dl>
""")

CLEAR_CHAT_PROMPT = """(mode) => {
  const typed = document.querySelector("#pg-prompt textarea")?.value ?? "";
  const sent = document.querySelector("#pg-panel .panels")?.dataset.asked ?? "";
  return mode === "chat" && typed.trim() === sent.trim() ? "" : typed;
}"""
"""Clears the box of a prompt that was sent, and keeps what was typed since then."""


class GeneratePage:
    """Components and listeners of the page."""

    def __init__(
        self, host: EngineHost, experiments: Experiments, history: History, tab: gr.HTML
    ) -> None:
        """`tab`: tells browser tabs apart."""
        self.host = host
        self.tab = tab
        self.catalog: Catalog = host.catalog
        self.history = history
        self.form_values = GenerateForm(host)
        self.fastest = FastestPanel(host, experiments)
        with gr.Row(equal_height=False):
            with gr.Column(scale=1, elem_id="pg-side"):
                self._side()
            with gr.Column(scale=4, elem_id="pg-main"):
                self._main()
        self.form_parts = [self.target, self.method, self.form.spec, self.dtype]
        self.form_parts += [self.run_form.spec, self.mode, self.system, self.prompt]
        memorized = {name: getattr(self, name) for name in FIELDS}
        memorized |= {"form": self.form.values, "run_form": self.run_form.values}
        self.memory = Memory("generate", memorized, parameter="run")
        self._listen()

    # ---- layout

    def _side(self) -> None:
        targets = self.catalog.target_choices()
        first = targets[0][1]
        methods = self.host.menu.choices(first)
        with gr.Group():
            self.target = gr.Dropdown(targets, value=first, label="Target", elem_id="pg-target")
            self.opener = TargetOpener(self.host)
            with gr.Row(elem_id="pg-load-row"):
                self.dtype = gr.Dropdown(
                    list(DTYPES), value="auto", label="dtype", elem_id="pg-dtype", min_width=120
                )
                self.load = gr.Button("Load now", elem_id="pg-load", min_width=80)
            self.target_state = gr.HTML(self.describe_target(), elem_id="pg-target-state")
            picked = self.catalog.first_method(first)
            self.method = gr.Dropdown(methods, value=picked, label="Method", elem_id="pg-method")
            self.unfit = gr.HTML(self.describe_unfit(first), elem_id="pg-unfit")
            self.file = MethodFile()
            self.machine = gr.Accordion("This machine", open=False, elem_id="pg-machine")
            with self.machine:
                self.diagnosis = gr.HTML()
        start = self.catalog.method(picked)
        form = method_form(start, picked)
        types = self.catalog.types.values()
        self.form = SettingsForm(form, elem_id="pg-method-form", classes=types)
        self.expected = gr.HTML(elem_id="pg-expected")
        self.run_form = SettingsForm(run_form(), elem_id="pg-run-form")

    def _main(self) -> None:
        self.prompts = PromptForm(self.catalog, "pg")
        with gr.Row(elem_id="pg-kind"):
            self.prompts.head()
        self.prompts.body(about_system="optional; kept throughout a chat", lines=3, autofocus=True)
        self.mode = self.prompts.mode
        self.system, self.prompt = self.prompts.system, self.prompts.prompt
        self.mode_note = gr.HTML(elem_id="pg-mode-note", padding=False)
        self.mode_parts = [self.target, self.mode, gr.State(False), self.mode_note]
        """The third: whether the page chose Completion, and not the user."""
        self._buttons()
        self.examples = Examples(self.catalog, self.target)
        self.fastest.panel()
        gr.HTML(static_text("welcome.html"), elem_id="pg-welcome", padding=False)
        self.panel = token_panels(
            self.history, placeholder=PLACEHOLDER, elem_id="pg-panel", tab="generate"
        )

    def _buttons(self) -> None:
        with gr.Row(elem_id="pg-buttons"):
            self.generate = gr.Button("Generate", variant="primary", elem_id="pg-generate")
            self.stop = gr.Button("Stop", elem_id="pg-stop")
            self.fastest.button()
            self.again = gr.Button("Run again", elem_id="pg-again")
            self.new_chat = gr.Button("New chat", elem_id="pg-new")
            gr.HTML("Ctrl+Enter generates · Esc stops · Ctrl+K goes anywhere", elem_id="pg-keys")

    # ---- listeners

    def _listen(self) -> None:
        fields = [getattr(self, name) for name in FIELDS]
        inputs = [*fields, self.form.values, self.run_form.values, self.panel, self.tab]
        here = [self.tab, self.panel]
        self.streams: list[Any] = []
        for event, name, run in (
            (self.generate.click, "run", self.run()),
            (self.again.click, "run_again", self.run(again=True)),
            (self.panel.by_text, "run_by_text", self.run(again=True, adapt=by_text)),
        ):
            about = {"concurrency_limit": None, "api_name": name, **QUEUED}
            self._append_stream(event(run, inputs, self.panel, **about))

        def draft_by_text(spec: Any, form: Any) -> Any:
            match spec, by_text(form):
                case {"groups": _}, {"values": values}:
                    return {**spec, "values": values}
            return gr.skip()

        form = [self.form.spec, self.form.values]
        self.panel.by_text(draft_by_text, form, self.form.spec, **QUIET)
        examples = self.examples.listen(
            [self.target, self.dtype, self.mode, self.prompt, self.panel, self.tab],
            self.panel,
            [self.target, self.method, self.form.spec],
            take=self.form_values.of_method,
            begin=self._follow_new,
        )
        for stream in examples:
            self._append_stream(stream)
        self.panel.begun(None, self.mode, self.prompt, js=CLEAR_CHAT_PROMPT, **QUIET)
        self.stop.click(self.stop_runs, here, None, api_name="stop", **QUIET)
        self.fastest.listen(inputs[:-1], self._search_request)
        self._listen_to_pickers()

    def _append_stream(self, stream: Any) -> None:
        """An event that runs; afterwards it is known what is loaded, and how fast."""
        self.streams.append(stream)
        after = stream.then(self.describe_target, None, self.target_state, **QUIET)
        after.then(self.renew_menu, self.target, self.method, **QUIET)
        drafting = [self.target, self.method, self.form.values]
        after.then(self.describe_expected, drafting, self.expected, **QUIET)

    def _listen_to_pickers(self) -> None:
        loaded = self.load.click(
            self.load_target,
            [self.target, self.dtype, self.tab],
            self.target_state,
            concurrency_limit=None,
            api_name="load",
            **QUEUED,
        )
        self.machine.expand(self.describe_machine, None, self.diagnosis, **QUIET)
        picked = [self.target, self.method]
        gr.on(
            [part.change for part in picked],
            None,
            picked,
            None,
            js=address_js("generate", "target", "method"),
            **QUIET,
        )
        self.target.change(self.pick_target, [self.target, self.method], self.method, **QUIET)
        for event in (self.target.change, loaded.then):
            event(self.fit_mode, self.mode_parts[:3], self.mode_parts[1:], **QUIET)
        self.mode.input(lambda: (False, ""), None, self.mode_parts[2:], **QUIET)
        self.target.change(self.describe_unfit, self.target, self.unfit, **QUIET)
        self.target.input(self.fastest.forget, None, self.fastest.column, **QUIET)
        self.method.change(self.pick_method, [self.method, self.form.spec], self.form.spec, **QUIET)
        drafting = [self.target, self.method, self.form.values]
        gr.on(
            [self.target.change, self.form.values.change],
            self.describe_expected,
            drafting,
            self.expected,
            **QUIET,
        )
        self.file.listen(self.target, self.form_values.of_file, [self.method, self.form.spec])
        self.mode.change(
            lambda mode: gr.update(visible=mode == "chat"), self.mode, self.system, **QUIET
        )

    def run(
        self, *, again: bool = False, adapt: Callable[[Any], Any] = lambda form: form
    ) -> Callable[..., AsyncIterator[dict[str, Any]]]:
        """A listener that streams a run. Leaving the page closes its generator; the run goes on.

        Args:
            again: of the last prompt once more, with the current settings.
            adapt: makes of the values of the method's form those that it runs with.
        """

        async def stream(request: gr.Request, *values: Any) -> AsyncIterator[dict[str, Any]]:
            *fields, form, run_form, panel, tab = values
            past = {"repeats": last_of(panel)} if again else {"parent": chat_of(panel)}
            raw = self._raw_request(*fields, adapt(form), run_form) | past
            async for message in self._follow_new(request, raw, panel, tab):
                yield message

        return stream

    async def _follow_new(
        self, request: gr.Request, raw: dict[str, Any], panel: Any, tab: Any
    ) -> AsyncIterator[dict[str, Any]]:
        """Begin a run, and yield its messages."""
        owner = owner_of(tab, request)
        started = await attempt_aside(
            lambda: self.host.generate(read_request(self.catalog, raw), owner=owner),
            where="starting a run",
        )
        if isinstance(started, Fault):
            yield refusal(started.sentence, chat_of(panel))
            return
        async for message in follow(RunStream([started], self.host.ahead_of)):
            yield message

    def _raw_request(self, *values: Any) -> dict[str, Any]:
        """Input of `read_request`, from the values of the fields and the two forms."""
        *fields, form, run_form = values
        return {**dict(zip(FIELDS, fields, strict=True)), "form": join_forms(form, run_form)}

    def _search_request(self, *values: Any) -> dict[str, Any]:
        """The same; with the chat's last question where the chat has emptied the prompt box."""
        *fields, panel = values
        raw, chat = self._raw_request(*fields), chat_of(panel)
        if str(raw["prompt"] or "").strip() or not isinstance(chat, str):
            return raw
        live = self.host.runs.get(chat)
        run = self.host.log.get(live.log_id or "" if live else chat)
        return raw if run is None else raw | {"prompt": run.prompt_text}

    async def follow_link(
        self, tab: Any, own: Any, last: Any, request: gr.Request
    ) -> AsyncIterator[dict[str, Any]]:
        """Show the address's run, and follow it if it goes on.

        Args:
            own: the run that this tab showed last, for an address without one.
            last: the run that this browser showed last; followed only if it goes on and no other
                tab shows it.
        """
        link = link_to("generate", request.query_params)
        linked_id = link["run"] if "run" in link else own
        run_id = attempt(lambda: read_run_id(linked_id or last or "none"), where="following a link")
        run = None if isinstance(run_id, Fault) else self.history.unfinished(run_id)
        if run is not None and (linked_id or not run.watchers):
            adopt(run, owner_of(tab, request))
            async for message in follow(RunStream([run], self.host.ahead_of), resync=True):
                yield message
        elif linked_id:
            opened = await attempt_aside(
                lambda: self.history.opened(read_run_id(linked_id)), where="opening a run"
            )
            if isinstance(opened, Fault):
                yield refusal(opened.sentence, None)
            else:
                yield {**opened, "chat": linked_id}
        else:  # Gradio clears an output that a generator yields nothing for
            yield gr.skip()

    async def load_target(
        self, target: Any, dtype: Any, tab: Any, request: gr.Request
    ) -> AsyncIterator[str]:
        """Stream the progress of the loading as text."""
        started = await attempt_aside(
            lambda: self.host.load(
                self.catalog.target(target), read_dtype(dtype), owner=owner_of(tab, request)
            ),
            where="loading the target",
        )
        if isinstance(started, Fault):
            yield saying(started)
            return
        async for message in follow(RunStream([started], self.host.ahead_of)):
            status = message["status"][started.id]
            share = status["progress"]
            done = "" if share is None else f" … {formats.percent(share)}"
            yield saying(f"{status['text']}{done}")
        yield saying(started.error) if started.error else self.describe_target()

    def describe_target(self) -> str:
        """The loaded target in one line."""
        loaded = self.host.loaded
        if loaded is None:
            return saying("Nothing is loaded yet; the first run loads its target.")
        facts = asdict(loaded)
        return saying("{name} · {dtype} · {device} · context {context_len}".format(**facts))

    def describe_expected(self, target: Any, method: Any, form: Any) -> str:
        """What drafting as set is expected to cost; empty where drafting decides for itself."""

        def read() -> str:
            values = FormValues.of(form).values.get("method", {})
            config = config_of(self.catalog.method(method), values)
            return as_set_sentence(self.host.experience, self.catalog.target(target).name, config)

        sentence = attempt(read, where="predicting a run")
        return "" if isinstance(sentence, Fault) or not sentence else saying(sentence)

    def describe_machine(self) -> str:
        """What this machine brings for decoding, and what is slow on it."""
        found = attempt(
            lambda: diagnose(self.host.cache_dir, self.host.device), where="looking at the machine"
        )
        return saying(found) if isinstance(found, Fault) else MACHINE.render(found=found)

    def stop_runs(self, tab: Any, panel: Any, request: gr.Request) -> None:
        """Stop the tab's runs, and the displayed one, which may be of another tab."""
        self.host.cancel_owner(owner_of(tab, request))
        chat = chat_of(panel)
        run = self.history.unfinished(chat) if isinstance(chat, str) else None
        if run is not None:
            run.cancel()

    def clear(self, tab: Any, panel: Any, request: gr.Request) -> tuple[None, str]:
        self.stop_runs(tab, panel, request)
        return None, ""

    def pick_target(self, target: Any, method: Any) -> Any:
        """Methods for the target; the picked one stays if it is among them."""
        choices = self.host.menu.choices(target)
        keys = [key for _, key in choices]
        value = method if method in keys else self.catalog.first_method(str(target))
        return gr.update(choices=choices, value=value)

    def fit_mode(self, target: Any, mode: Any, chosen_here: Any) -> tuple[Any, bool, str]:
        """Completion for a target without a chat template, and back to Chat after one.

        Args:
            chosen_here: whether the page chose the mode, and not the user.

        Returns:
            Values of `mode_parts` without the target.
        """
        spec, loaded = self.catalog.targets.get(target), self.host.loaded
        if loaded is not None and loaded.key == target:
            chats: bool | None = loaded.chat
        else:
            chats = None if spec is None else has_chat_template(spec)
        if chats is False and mode == "chat":
            note = "This model has no chat template, so its prompt is continued as it is."
            return "raw", True, saying(note)
        if chats is not False and chosen_here:
            return "chat", False, ""
        return gr.skip(), bool(chosen_here), gr.skip()

    def renew_menu(self, target: Any) -> Any:
        """The same methods, with the speedups measured since."""
        return gr.update(choices=self.host.menu.choices(target))

    def describe_unfit(self, target: Any) -> str:
        """The methods that are not available for the target, and why."""
        rows = self.catalog.unfit(target if isinstance(target, str) else "")
        return UNFIT.render(rows=rows)

    def pick_method(self, key: Any, form: Any) -> Any:
        """The method's form, unless it is displayed already: `take` filled it in."""
        if isinstance(form, dict) and form.get("method") == key:
            return gr.skip()
        picked = lambda: method_form(self.catalog.method(key), key)  # noqa: E731
        return or_skip(picked, where="picking a method")

    # ---- what an address and this browser bring back

    def listen_to_opener(self, page: gr.Blocks, others: Sequence[gr.Dropdown]) -> None:
        """Open targets by their place; what is picked here is picked on the other pages too."""
        opened = self.opener.listen(self.dtype, self.target, others)
        loaded = opened.success(
            self.load_target,
            [self.target, self.dtype, self.tab],
            self.target_state,
            concurrency_limit=None,
            **QUEUED,
        )
        loaded.then(self.fit_mode, self.mode_parts[:3], self.mode_parts[1:], **QUIET)
        same = f"(target) => Array({len(others)}).fill(target)"
        self.target.input(None, self.target, list(others), js=same, **QUIET)
        pickers = [self.target, *others]
        page.load(lambda: self.opener.menus(pickers), None, pickers, **QUIET)

    def listen_to_links(self, page: gr.Blocks) -> None:
        """Fill the form with what it held, or as the address's run had it; show that run."""
        read = self.memory.listen(page, self.form_values.reopened, self.form_parts)
        read.then(self.describe_target, None, self.target_state, **QUIET)
        read.then(self.renew_menu, self.target, self.method, **QUIET)
        followed = read.then(
            self.follow_link,
            [self.tab] * 3,
            self.panel,
            js=self.memory.last_js,
            concurrency_limit=None,
            **QUEUED,
        )
        self.new_chat.click(
            self.clear,
            [self.tab, self.panel],
            [self.panel, self.prompt],
            cancels=[*self.streams, followed],
            api_name="new_chat",
            **QUIET,
        )
