"""The Generate page: pick a target and a method, prompt, watch the tokens, walk the steps."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Any

import gradio as gr

from engine.config import Limits, Sampling
from engine.drafters.method import MethodConfig
from playground.errors import Fault, attempt
from playground.host.catalog import Catalog, Method
from playground.host.controls import changed_controls, group_of
from playground.host.request import DTYPES, read_dtype, read_request
from playground.host.runner import EngineHost
from playground.host.stream import History, RunStream, follow, refusal
from playground.web.components import token_panels
from playground.web.forms import PromptForm, SettingsForm
from playground.web.results import HTML, saying

PLACEHOLDER = "Write a prompt above and generate. Every token is coloured by where it came from."
FIELDS = ("target", "dtype", "method", "mode", "system", "prompt")
UNFIT = HTML.from_string("""
{% if rows %}
<details><summary>{{ rows | length }} methods do not fit this target</summary><dl>
{% for name, why in rows %}<dt>{{ name }}</dt><dd>{{ why }}</dd>{% endfor %}
</dl></details>
{% endif %}
""")
QUIET: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}


def method_form(method: Method, key: str, held: dict[str, Any] | None = None) -> dict[str, Any]:
    """The form's value for a method's settings; `held` are settings of another value."""
    config = method.config
    group = group_of("method", type(config).title, config, note=method.summary)
    return {"groups": [group], "values": {"method": held} if held else {}, "method": key}


def run_form() -> dict[str, Any]:
    """The form's value for sampling and limits."""
    groups = [
        group_of("sampling", "Sampling", Sampling()),
        group_of("limits", "Limits", Limits()),
    ]
    return {"groups": groups, "values": {}}


CLEAR_CHAT_PROMPT = """(mode) => {
  const box = document.querySelector("#pg-prompt textarea");
  return mode === "chat" ? "" : box?.value ?? "";
}"""


class GeneratePage:
    """Components and listeners of the page."""

    def __init__(self, host: EngineHost, history: History) -> None:
        self.host = host
        self.catalog: Catalog = host.catalog
        self.history = history
        with gr.Row(equal_height=False):
            with gr.Column(scale=1, elem_id="pg-side"):
                self._side()
            with gr.Column(scale=4, elem_id="pg-main"):
                self._main()
        self._listen()

    # ---- layout

    def _side(self) -> None:
        targets = self.catalog.target_choices()
        first = targets[0][1]
        methods = self.host.menu.choices(first)
        with gr.Group():
            self.target = gr.Dropdown(targets, value=first, label="Target", elem_id="pg-target")
            with gr.Row(elem_id="pg-load-row"):
                self.dtype = gr.Dropdown(
                    list(DTYPES), value="auto", label="dtype", elem_id="pg-dtype", min_width=120
                )
                self.load = gr.Button("Load now", elem_id="pg-load", min_width=80)
            self.target_state = gr.HTML(self.describe_target(), elem_id="pg-target-state")
            picked = self.catalog.first_method(first)
            self.method = gr.Dropdown(methods, value=picked, label="Method", elem_id="pg-method")
            self.unfit = gr.HTML(self.describe_unfit(first), elem_id="pg-unfit")
        start = self.catalog.method(picked)
        form = method_form(start, picked)
        types = self.catalog.types.values()
        self.form = SettingsForm(form, elem_id="pg-method-form", classes=types)
        self.run_form = SettingsForm(run_form(), elem_id="pg-run-form")

    def _main(self) -> None:
        self.prompts = PromptForm(self.catalog, "pg")
        with gr.Row(elem_id="pg-kind"):
            self.prompts.head()
        self.prompts.body(
            about_system="optional; a chat keeps the one it began with", lines=3, autofocus=True
        )
        self.mode, self.example = self.prompts.mode, self.prompts.example
        self.system, self.prompt = self.prompts.system, self.prompts.prompt
        self._buttons()
        self.panel = token_panels(self.history, placeholder=PLACEHOLDER, elem_id="pg-panel")

    def _buttons(self) -> None:
        with gr.Row(elem_id="pg-buttons"):
            self.generate = gr.Button("Generate", variant="primary", elem_id="pg-generate")
            self.stop = gr.Button("Stop", elem_id="pg-stop")
            self.again = gr.Button("Run again", elem_id="pg-again")
            self.new_chat = gr.Button("New chat", elem_id="pg-new")
            gr.HTML("Ctrl+Enter generates · Esc stops", elem_id="pg-keys")

    # ---- listeners

    def _listen(self) -> None:
        fields = [getattr(self, name) for name in FIELDS]
        inputs = [*fields, self.form.held, self.run_form.held, self.panel]
        streams: list[Any] = []
        for button, run in ((self.generate, self.run), (self.again, self.run_again)):
            streams.append(
                button.click(
                    run, inputs, self.panel, concurrency_limit=None, api_name=run.__name__, **QUIET
                )
            )
            streams[-1].then(self.describe_target, None, self.target_state, queue=False, **QUIET)
        self.panel.begun(None, self.mode, self.prompt, js=CLEAR_CHAT_PROMPT, **QUIET)
        self.stop.click(self.stop_runs, None, None, queue=False, api_name="stop", **QUIET)
        self.new_chat.click(
            self.clear,
            None,
            [self.panel, self.prompt],
            cancels=streams,
            queue=False,
            api_name="new_chat",
            **QUIET,
        )
        self._listen_to_pickers()

    def _listen_to_pickers(self) -> None:
        self.load.click(
            self.load_target,
            [self.target, self.dtype],
            self.target_state,
            concurrency_limit=None,
            api_name="load",
            **QUIET,
        )
        self.target.change(
            self.pick_target, [self.target, self.method], self.method, queue=False, **QUIET
        )
        self.target.change(self.describe_unfit, self.target, self.unfit, queue=False, **QUIET)
        self.method.change(
            self.pick_method, [self.method, self.form.asked], self.form.asked, queue=False, **QUIET
        )
        self.example.input(
            self.prompts.pick_example, self.example, [self.prompt, self.mode], queue=False, **QUIET
        )
        self.mode.change(
            lambda mode: gr.update(visible=mode == "chat"),
            self.mode,
            self.system,
            queue=False,
            **QUIET,
        )

    async def run(self, request: gr.Request, *held: Any) -> AsyncIterator[dict[str, Any]]:
        """Stream one run; `held` is what the components hold, in the order of the inputs."""
        async for message in self._stream(request, held, again=False):
            yield message

    async def run_again(self, request: gr.Request, *held: Any) -> AsyncIterator[dict[str, Any]]:
        """Stream the last prompt once more, with the settings as they are now."""
        async for message in self._stream(request, held, again=True):
            yield message

    async def _stream(
        self, request: gr.Request, held: tuple[Any, ...], *, again: bool
    ) -> AsyncIterator[dict[str, Any]]:
        """All messages of one run. Leaving the page closes this generator: the run is cancelled."""
        raw = dict(zip(FIELDS, held, strict=False))
        form, run_form, panel = held[len(FIELDS) :]
        chat = panel.get("chat") if isinstance(panel, dict) else None
        raw |= {"form": join_forms(form, run_form), "repeats" if again else "parent": chat}
        owner = session_of(request)
        started = attempt(
            lambda: self.host.generate(read_request(self.catalog, raw), owner=owner),
            where="starting a run",
        )
        if isinstance(started, Fault):
            yield refusal(started.sentence, chat)
            return
        try:
            async for message in follow(RunStream([started], self.host.ahead_of)):
                yield message
        finally:
            started.cancel()

    async def load_target(self, target: Any, dtype: Any, request: gr.Request) -> AsyncIterator[str]:
        """Stream what the loading is doing, in words."""
        started = attempt(
            lambda: self.host.load(
                self.catalog.target(target), read_dtype(dtype), owner=session_of(request)
            ),
            where="loading the target",
        )
        if isinstance(started, Fault):
            yield saying(started)
            return
        async for message in follow(RunStream([started], self.host.ahead_of)):
            yield saying(progress_text(message["status"][started.id]))
        yield saying(started.error) if started.error else self.describe_target()

    def describe_target(self) -> str:
        """The loaded target in one line."""
        loaded = self.host.loaded
        if loaded is None:
            return saying("Nothing is loaded yet; the first run loads its target.")
        facts = asdict(loaded)
        return saying("{name} · {dtype} · {device} · context {context_len}".format(**facts))

    def stop_runs(self, request: gr.Request) -> None:
        self.host.cancel_owner(session_of(request))

    def clear(self, request: gr.Request) -> tuple[None, str]:
        self.host.cancel_owner(session_of(request))
        return None, ""

    def pick_target(self, target: Any, method: Any) -> Any:
        """Methods that fit the target; the picked one stays if it does."""
        choices = self.host.menu.choices(target)
        keys = [key for _, key in choices]
        value = method if method in keys else self.catalog.first_method(str(target))
        return gr.update(choices=choices, value=value)

    def describe_unfit(self, target: Any) -> str:
        """The methods that this target is not offered, and why."""
        rows = self.catalog.unfit(target if isinstance(target, str) else "")
        return UNFIT.render(rows=rows)

    def pick_method(self, key: Any, form: Any) -> Any:
        """The method's form, unless it is on show already: `take` filled it in."""
        if isinstance(form, dict) and form.get("method") == key:
            return gr.skip()
        picked = attempt(
            lambda: method_form(self.catalog.method(key), key), where="picking a method"
        )
        return gr.skip() if isinstance(picked, Fault) else picked

    def take(self, target: str, method: str, settings: dict[str, Any]) -> tuple[Any, Any, Any]:
        """Values of target, method and form that show a method with settings of another page.

        Raises ConfigError: target or method is not offered here.
        """
        choices = self.host.menu.choices(self.catalog.target(target).name)
        picked = self.catalog.method(method)
        form = method_form(picked, method, held_settings(picked.config, settings))
        return target, gr.update(choices=choices, value=method), form


def join_forms(*forms: Any) -> dict[str, Any]:
    """The groups of several forms in one; what is no form is left for the checks to refuse."""
    values: dict[str, Any] = {}
    for form in forms:
        held = form.get("values") if isinstance(form, dict) else None
        if isinstance(held, dict):
            values |= held
    return {"values": values}


def held_settings(config: MethodConfig, settings: dict[str, Any]) -> dict[str, Any]:
    """Settings as the form's controls hold them.

    Raises ConfigError: one is unknown or out of range.
    """
    return changed_controls(config.replace(**settings), config)


def session_of(request: gr.Request) -> str:
    return str(getattr(request, "session_hash", None) or "no session")


def progress_text(status: dict[str, Any]) -> str:
    share = status["progress"]
    return status["text"] if share is None else f"{status['text']} … {100 * share:.0f} %"
