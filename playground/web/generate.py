"""The Generate page: pick a target and a method, prompt, watch the tokens, walk the steps."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import gradio as gr

from engine import formats
from engine.config import Limits, Sampling
from engine.drafters.method import MethodConfig
from playground.errors import Fault, attempt, attempt_aside
from playground.experiments.service import Experiments
from playground.host.catalog import Catalog, Method
from playground.host.controls import changed_controls, controls_of, group_of, settings_from
from playground.host.request import (
    DTYPES,
    MAX_PROMPT_CHARS,
    MAX_SYSTEM_CHARS,
    config_of,
    read_dtype,
    read_request,
    read_run_id,
)
from playground.host.runner import EngineHost
from playground.host.stream import History, RunStream, adopt, follow, refusal
from playground.runs.again import nearest_method, request_of
from playground.runs.details import stored_run
from playground.web.components import static_text, token_panels
from playground.web.fastest import FastestPanel
from playground.web.forms import PromptForm, SettingsForm
from playground.web.memory import (
    Memory,
    is_anything,
    kept_choice,
    kept_settings,
    kept_text,
    owner_of,
)
from playground.web.method_file import MethodFile
from playground.web.results import HTML, address_js, saying
from playground.web.target import TargetOpener
from storage import RunDetail

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
    group = group_of("method", type(config).title, config, note=method.summary, held=held)
    return {"groups": [group], "values": {"method": held} if held else {}, "method": key}


def run_form() -> dict[str, Any]:
    """The form's value for sampling and limits."""
    groups = [
        group_of("sampling", "Sampling", Sampling()),
        group_of("limits", "Limits", Limits()),
    ]
    return {"groups": groups, "values": {}}


CLEAR_CHAT_PROMPT = """(mode) => {
  const typed = document.querySelector("#pg-prompt textarea")?.value ?? "";
  const asked = document.querySelector("#pg-panel .panels")?.dataset.asked ?? "";
  return mode === "chat" && typed.trim() === asked.trim() ? "" : typed;
}"""
"""A prompt that was sent leaves its box; what was typed since then stays."""


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
        self.fastest = FastestPanel(host, experiments)
        with gr.Row(equal_height=False):
            with gr.Column(scale=1, elem_id="pg-side"):
                self._side()
            with gr.Column(scale=4, elem_id="pg-main"):
                self._main()
        self.filled = [self.target, self.method, self.form.asked, self.dtype]
        self.filled += [self.run_form.asked, self.mode, self.system, self.prompt]
        kept = {name: getattr(self, name) for name in FIELDS}
        kept |= {"form": self.form.held, "run_form": self.run_form.held}
        self.memory = Memory("generate", kept, shows="run")
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
        start = self.catalog.method(picked)
        form = method_form(start, picked)
        types = self.catalog.types.values()
        self.form = SettingsForm(form, elem_id="pg-method-form", classes=types)
        self.run_form = SettingsForm(run_form(), elem_id="pg-run-form")

    def _main(self) -> None:
        self.prompts = PromptForm(self.catalog, "pg")
        with gr.Row(elem_id="pg-kind"):
            self.prompts.head()
        self.prompts.body(about_system="optional; kept throughout a chat", lines=3, autofocus=True)
        self.mode, self.example = self.prompts.mode, self.prompts.example
        self.system, self.prompt = self.prompts.system, self.prompts.prompt
        self._buttons()
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
            gr.HTML(
                "Ctrl+Enter generates · Esc stops · Ctrl+K goes anywhere",
                elem_id="pg-keys",
            )

    # ---- listeners

    def _listen(self) -> None:
        fields = [getattr(self, name) for name in FIELDS]
        inputs = [*fields, self.form.held, self.run_form.held, self.panel, self.tab]
        here = [self.tab, self.panel]
        self.streams: list[Any] = []
        for button, run in ((self.generate, self.run), (self.again, self.run_again)):
            self.streams.append(
                button.click(
                    run, inputs, self.panel, concurrency_limit=None, api_name=run.__name__, **QUIET
                )
            )
            after = self.streams[-1].then(
                self.describe_target, None, self.target_state, queue=False, **QUIET
            )
            after.then(self.renew_menu, self.target, self.method, queue=False, **QUIET)
        self.panel.begun(None, self.mode, self.prompt, js=CLEAR_CHAT_PROMPT, **QUIET)
        self.stop.click(self.stop_runs, here, None, queue=False, api_name="stop", **QUIET)
        self.fastest.listen(inputs[:-1], self._searched)
        self._listen_to_pickers()

    def _listen_to_pickers(self) -> None:
        self.load.click(
            self.load_target,
            [self.target, self.dtype, self.tab],
            self.target_state,
            concurrency_limit=None,
            api_name="load",
            **QUIET,
        )
        picked = [self.target, self.method]
        gr.on(
            [part.change for part in picked],
            None,
            picked,
            None,
            js=address_js("generate", "target", "method"),
            queue=False,
            **QUIET,
        )
        self.target.change(
            self.pick_target, [self.target, self.method], self.method, queue=False, **QUIET
        )
        self.target.change(self.describe_unfit, self.target, self.unfit, queue=False, **QUIET)
        self.method.change(
            self.pick_method, [self.method, self.form.asked], self.form.asked, queue=False, **QUIET
        )
        self.file.listen(self.target, self.take_read, [self.method, self.form.asked])
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
        """All messages of one run. Leaving the page closes this generator; the run goes on."""
        *asked, panel, tab = held
        chat = chat_of(panel)
        raw = self._asked(*asked) | {"repeats" if again else "parent": chat}
        owner = owner_of(tab, request)
        started = await attempt_aside(
            lambda: self.host.generate(read_request(self.catalog, raw), owner=owner),
            where="starting a run",
        )
        if isinstance(started, Fault):
            yield refusal(started.sentence, chat)
            return
        async for message in follow(RunStream([started], self.host.ahead_of)):
            yield message

    def _asked(self, *held: Any) -> dict[str, Any]:
        """What `read_request` takes, from what the fields and the two forms hold."""
        *fields, form, run_form = held
        return {**dict(zip(FIELDS, fields, strict=True)), "form": join_forms(form, run_form)}

    def _searched(self, *held: Any) -> dict[str, Any]:
        """The same; a chat empties the box, and its last question is meant."""
        *asked, panel = held
        raw, chat = self._asked(*asked), chat_of(panel)
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
            own: the run that this tab had on show last; where the address has none.
            last: the one that this browser had on show last; taken only if it goes on.
        """
        params = dict(request.query_params)
        asked = params.get("run") if params.get("tab") == "generate" else own
        read = attempt(lambda: read_run_id(asked or last or "none"), where="following a link")
        run = None if isinstance(read, Fault) else self.history.unfinished(read)
        if run is not None:
            adopt(run, owner_of(tab, request))
            async for message in follow(RunStream([run], self.host.ahead_of), found=True):
                yield message
        elif asked:
            shown = await attempt_aside(
                lambda: self.history.opened(read_run_id(asked)), where="opening a run"
            )
            if isinstance(shown, Fault):
                yield refusal(shown.sentence, None)
            else:
                yield {**shown, "chat": asked}
        else:  # Gradio empties what a generator says nothing of
            yield gr.skip()

    async def load_target(
        self, target: Any, dtype: Any, tab: Any, request: gr.Request
    ) -> AsyncIterator[str]:
        """Stream what the loading is doing, in words."""
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
            yield saying(progress_text(message["status"][started.id]))
        yield saying(started.error) if started.error else self.describe_target()

    def describe_target(self) -> str:
        """The loaded target in one line."""
        loaded = self.host.loaded
        if loaded is None:
            return saying("Nothing is loaded yet; the first run loads its target.")
        facts = asdict(loaded)
        return saying("{name} · {dtype} · {device} · context {context_len}".format(**facts))

    def stop_runs(self, tab: Any, panel: Any, request: gr.Request) -> None:
        """Stop the tab's runs, and the one on show, which may be of another tab."""
        self.host.cancel_owner(owner_of(tab, request))
        chat = chat_of(panel)
        shown = self.history.unfinished(chat) if isinstance(chat, str) else None
        if shown is not None:
            shown.cancel()

    def clear(self, tab: Any, panel: Any, request: gr.Request) -> tuple[None, str]:
        self.stop_runs(tab, panel, request)
        return None, ""

    def pick_target(self, target: Any, method: Any) -> Any:
        """Methods that fit the target; the picked one stays if it does."""
        choices = self.host.menu.choices(target)
        keys = [key for _, key in choices]
        value = method if method in keys else self.catalog.first_method(str(target))
        return gr.update(choices=choices, value=value)

    def renew_menu(self, target: Any) -> Any:
        """The same methods, with what was measured of them since."""
        return gr.update(choices=self.host.menu.choices(target))

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

    # ---- what an address and this browser bring back

    def listen_to_opener(self, page: gr.Blocks, others: Sequence[gr.Dropdown]) -> None:
        """Open targets by their place; `others` are the target pickers of other pages."""
        opened = self.opener.listen(self.dtype, self.target, others)
        opened.success(
            self.load_target,
            [self.target, self.dtype, self.tab],
            self.target_state,
            concurrency_limit=None,
            **QUIET,
        )
        pickers = [self.target, *others]
        page.load(lambda: self.opener.menus(pickers), None, pickers, queue=False, **QUIET)

    def listen_to_links(self, page: gr.Blocks) -> None:
        """Fill the form with what it held, or as the address's run had it; show that run."""
        read = self.memory.listen(page, self.reopened, self.filled)
        read.then(self.describe_target, None, self.target_state, queue=False, **QUIET)
        read.then(self.renew_menu, self.target, self.method, queue=False, **QUIET)
        followed = read.then(
            self.follow_link,
            [self.tab] * 3,
            self.panel,
            js=self.memory.last_js,
            concurrency_limit=None,
            **QUIET,
        )
        self.new_chat.click(
            self.clear,
            [self.tab, self.panel],
            [self.panel, self.prompt],
            cancels=[*self.streams, followed],
            queue=False,
            api_name="new_chat",
            **QUIET,
        )

    def reopened(self, kept: Mapping[str, Any], params: Mapping[str, str]) -> list[Any]:
        """Values of `filled`: of the address's run, else what was kept, else as they are."""
        asked = params if params.get("tab") == "generate" else {}
        if not is_anything(kept) and not asked:
            return [gr.skip() for _ in self.filled]
        if asked.get("run") and kept.get("foreign"):
            run = attempt(
                lambda: self.of_run(stored_run(self.host.log, read_run_id(asked["run"]))),
                where="opening a run's settings",
            )
            if not isinstance(run, Fault):
                return list(run)
        return self._kept({**kept, **{k: asked[k] for k in ("target", "method") if k in asked}})

    def _kept(self, kept: Mapping[str, Any]) -> list[Any]:
        """Values of `filled` from what a browser kept; what does not fit is as it was at first."""
        names = list(self.catalog.targets)
        target = kept_choice(kept, "target", names, names[0])
        choices = self.host.menu.choices(target)
        keys = [key for _, key in choices]
        key = kept_choice(kept, "method", keys, self.catalog.first_method(target))
        method = self.catalog.method(key)
        form, run = kept.get("form"), run_form()
        was = form.get("method") if isinstance(form, dict) else None
        own = kept_settings(form, "method", partial(config_of, method)) if was == key else {}
        for group, cls in (("sampling", Sampling), ("limits", Limits)):
            run["values"][group] = kept_settings(
                kept.get("run_form"), group, partial(settings_from, cls)
            )
        return [
            gr.update(choices=self.catalog.target_choices(), value=target),
            gr.update(choices=choices, value=key),
            method_form(method, key, own),
            kept_choice(kept, "dtype", DTYPES, "auto"),
            run,
            kept_choice(kept, "mode", ("chat", "raw"), "chat"),
            kept_text(kept, "system", MAX_SYSTEM_CHARS),
            kept_text({"prompt": self.catalog.first_prompt(), **kept}, "prompt", MAX_PROMPT_CHARS),
        ]

    def of_run(self, run: RunDetail) -> tuple[Any, ...]:
        """Values of `filled` that ask for a stored run once more.

        Raises ConfigError: its target or method is not offered here.
        """
        asked = request_of(self.catalog, run)
        form = run_form()
        form["values"] = {
            name: {control["name"]: control["value"] for control in controls_of(chosen)}
            for name, chosen in (("sampling", asked.sampling), ("limits", asked.limits))
        }
        key = nearest_method(self.catalog, asked.target.name, run.method_title, asked.config)
        settings = asked.config.model_dump(exclude={"decoding_type"})
        picked = self.take(asked.target.name, key, settings)
        return *picked, asked.dtype, form, asked.mode, asked.system, asked.prompt

    def take_read(self, target: Any, config: MethodConfig) -> tuple[Any, Any]:
        """Values of method and form that show settings that were read.

        Raises ConfigError: the target or the method is not offered here.
        """
        name = self.catalog.target(target).name
        key = nearest_method(self.catalog, name, "", config)
        return self.take(name, key, config.model_dump(exclude={"decoding_type"}))[1:]

    def take(self, target: str, method: str, settings: dict[str, Any]) -> tuple[Any, Any, Any]:
        """Values of target, method and form that show a method with settings of another page.

        Raises ConfigError: target or method is not offered here.
        """
        choices = self.host.menu.choices(self.catalog.target(target).name)
        picked = self.catalog.method(method)
        form = method_form(picked, method, held_settings(picked.config, settings))
        return target, gr.update(choices=choices, value=method), form


def chat_of(panel: Any) -> Any:
    """The run that a panel shows last; anybody may have sent it."""
    return panel.get("chat") if isinstance(panel, dict) else None


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


def progress_text(status: dict[str, Any]) -> str:
    share = status["progress"]
    return status["text"] if share is None else f"{status['text']} … {formats.percent(share)}"
