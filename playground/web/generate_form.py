"""The Generate page's form: its values, and what fills it: runs, files, examples, the browser."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import gradio as gr

from engine.config import EFFORT, THINKING, Limits, Sampling
from engine.drafters.method import MethodConfig
from engine.errors import ConfigError
from engine.model.chat_template import TemplateOptions
from engine.safe_text import read_text
from playground.deploy import ENGINES
from playground.deploy.files import MAX_CHARS
from playground.errors import Fault, attempt
from playground.experiments.forms import closest_method
from playground.host.catalog import Catalog
from playground.host.controls import (
    INNER_TYPE,
    FormSpec,
    FormValues,
    Group,
    Values,
    changed_by,
    fields_of,
    settings_from,
    spec_of,
)
from playground.host.methods import read_method
from playground.host.request import (
    DTYPES,
    MAX_PROMPT_CHARS,
    MAX_SYSTEM_CHARS,
    read_run_id,
)
from playground.host.runner import EngineHost
from playground.runs.details import request_of
from playground.runs.reading import stored_run
from playground.web.address import link_params
from playground.web.fields import without_links
from playground.web.forms import (
    QUEUED,
    RAW,
    RAW_LATEST,
    UNLABELLED,
    SettingsForm,
    Updates,
    skip_on_fault,
)
from playground.web.memory import memory_choice, memory_settings, memory_text
from playground.web.results import show_fault_in
from presets import MethodPreset
from storage import RunDetail

OWN_FORMAT = "A method file, or speculative_config of TensorRT-LLM or vLLM"
TEMPLATE = "chat_template_kwargs"
SWITCH_VALUES = {"on": True, "off": False}
SAMPLE = """speculative_config:
  decoding_type: NGram
  max_draft_len: 4"""


def method_form(
    method: MethodPreset, key: str, settings: Values | None = None, values: Any = None
) -> dict[str, Any]:
    """The form of a method: `settings` that differ from its own, `values` of controls by group."""
    config = changed_by(method.config, settings or {})
    group = Group.of("method", type(config).title, config, note=method.description)
    return spec_of(group, values=values, method=key)


def run_form(sampling: Sampling, limits: Limits, values: Any = None) -> dict[str, Any]:
    """The form of sampling and limits; `values` of controls by group."""
    groups = Group.of("sampling", "Sampling", sampling), Group.of("limits", "Limits", limits)
    return spec_of(*groups, values=values)


def with_text_drafting(form: Any) -> Any:
    """The form's values with `vocabulary: text`, so that a draft model of any vocabulary fits."""
    match form:
        case {"values": {"method": dict(settings)} as groups}:
            names = [name for name in settings if name.rpartition(".")[2] == "vocabulary"]
            return {**form, "values": {**groups, "method": settings | dict.fromkeys(names, "text")}}
    return form


class GenerateForm:
    """Values of the components that make up the form, in this order.

    Target, method, the method's form, dtype, the form of sampling and limits, prompt format, system
    prompt, prompt.
    """

    def __init__(self, host: EngineHost) -> None:
        self._host, self._catalog = host, host.catalog

    def initial_values(self, memory: Any, request: gr.Request) -> list[Any]:
        """Values of the URL's run, else those that the browser stored, else the initial ones."""
        memory = memory if isinstance(memory, dict) else {}
        link = link_params("generate", request.query_params)
        if link.get("run") and memory.get("foreign"):
            run = attempt(
                lambda: self.of_run(stored_run(self._host.log, read_run_id(link["run"]))),
                where="opening a run's settings",
            )
            if not isinstance(run, Fault):
                return list(run)
        picked: dict[str, Any] = {n: link[n] for n in ("target", "method") if n in link}
        return self._remembered({**memory, **picked})

    def _remembered(self, memory: Mapping[str, Any]) -> list[Any]:
        """Values that a browser stored; the initial value for what is invalid."""
        names = list(self._catalog.targets)
        target = memory_choice(memory, "target", names, names[0])
        choices = self._host.menu.choices(target)
        keys = [key for _, key in choices]
        key = memory_choice(memory, "method", keys, self._catalog.first_method(target))
        method = self._catalog.method(key)
        form = memory.get("form")
        old_key = form.get("method") if isinstance(form, dict) else None
        own = memory_settings(form, "method", method.config) if old_key == key else {}
        inner = {name: value for name, value in own.items() if name.endswith(f".{INNER_TYPE}")}
        shared = {
            group: memory_settings(memory.get("run_form"), group, start)
            for group, start in (("sampling", Sampling()), ("limits", Limits()))
        }
        return [
            gr.update(choices=self._catalog.target_choices(), value=target),
            gr.update(choices=choices, value=key),
            method_form(method, key, inner, {"method": own}),
            memory_choice(memory, "dtype", DTYPES, "auto"),
            run_form(Sampling(), Limits(), shared),
            memory_choice(memory, "mode", ("chat", "raw"), "chat"),
            memory_text(memory, "system", MAX_SYSTEM_CHARS),
            memory_text(
                {"prompt": self._catalog.first_prompt(), **memory}, "prompt", MAX_PROMPT_CHARS
            ),
        ]

    def of_run(self, run: RunDetail) -> tuple[Any, ...]:
        """Values that repeat a stored run.

        Raises ConfigError: its target or method is not offered here.
        """
        request = request_of(self._catalog, run)
        key = closest_method(self._catalog, request.config, request.target.name)
        settings = request.config.model_dump(exclude={"decoding_type"})
        picked = self.of_method(request.target.name, key, settings)
        shared = run_form(request.sampling, request.limits)
        return *picked, request.dtype, shared, request.mode, request.system, request.prompt

    def of_file(self, target: Any, config: MethodConfig) -> tuple[Any, Any]:
        """Values of method and form for settings from a file.

        Raises ConfigError: the target or the method is not offered here.
        """
        name = self._catalog.target(target).name
        key = closest_method(self._catalog, config, name)
        return self.of_method(name, key, config.model_dump(exclude={"decoding_type"}))[1:]

    def of_method(self, target: str, method: str, settings: Values) -> tuple[Any, ...]:
        """Values of target, method and form for a method with these settings.

        Raises ConfigError: target or method is not offered here.
        """
        choices = self._host.menu.choices(self._catalog.target(target).name)
        form = method_form(self._catalog.method(method), method, settings)
        return target, gr.update(choices=choices, value=method), form


class MethodFile:
    """A text box under the method picker; the config pasted or opened there fills the form."""

    def __init__(self) -> None:
        with gr.Accordion(
            "Read a config …", open=False, elem_id="pg-method-file", elem_classes="pg-group"
        ):
            self._engine = gr.Dropdown(
                [(OWN_FORMAT, ""), *((engine.title, engine.name) for engine in ENGINES.values())],
                value="",
                label="Format",
                elem_id="pg-method-file-format",
            )
            self._text = gr.Textbox(
                label="Its text, or the command that starts the engine",
                lines=4,
                max_lines=12,
                placeholder=SAMPLE,
                elem_id="pg-method-file-text",
                info="",
                elem_classes=["pg-field", "pg-field-method_file"],
            )
            self._open = gr.UploadButton("Open file", size="sm", elem_id="pg-method-file-open")

    def listen(
        self, target: gr.Dropdown, fill: Callable[[Any, MethodConfig], Any], outputs: Sequence[Any]
    ) -> None:
        """Read the box whenever it or the format changes.

        Args:
            fill: returns values of `outputs` for the picked target and a method's settings.
        """

        @show_fault_in(self._text, where="reading a method file", render=_remark)
        def read(text: Any, engine: Any, picked: Any) -> Updates:
            if not isinstance(text, str) or not text.strip():
                return {self._text: _remark("")}
            config, remarks = read_method(text, engine)
            summary = f"Read as {type(config).title}; its settings are in the form below."
            summary = " ".join([summary, *(remark.removeprefix("note: ") for remark in remarks)])
            updates = dict(zip(outputs, fill(picked, config), strict=True))
            return {self._text: _remark(summary), **updates}

        @show_fault_in(self._text, where="opening a file", render=_remark)
        def read_file(path: Any) -> Updates:
            return {self._text: uploaded_text(path)}

        self._open.upload(read_file, self._open, self._text, **QUEUED)
        gr.on(
            [self._text.change, self._engine.input],
            read,
            [self._text, self._engine, target],
            [self._text, *outputs],
            **RAW,
        )


def uploaded_text(path: object) -> str:
    """The text of an uploaded file. Raises ConfigError, naming it without its temporary folder."""
    if not isinstance(path, str):
        raise ConfigError("Open a file.")
    return read_text(Path(path), most=MAX_CHARS, what=Path(path).name)


def _remark(remark: str | Fault) -> Any:
    """An update of the text under the box."""
    faulty = isinstance(remark, Fault)
    text = remark.sentence if isinstance(remark, Fault) else remark
    classes = ["pg-field", "pg-field-method_file", *["faulty"] * faulty]
    return gr.update(info=without_links(text), elem_classes=classes)


class ThinkingSwitch:
    """Whether and how much a reasoning model thinks, for targets whose chat template asks.

    What is chosen is part of the chat template settings in the run's form, which are stored.
    """

    def __init__(self) -> None:
        self.thinking, self.effort = (
            gr.Dropdown(
                [(f"{label}: default", "")],
                value="",
                visible=False,
                elem_id=elem_id,
                label=label,
                **UNLABELLED,
            )
            for label, elem_id in (("Thinking", "pg-thinking"), ("Reasoning effort", "pg-effort"))
        )
        self.outputs = [self.thinking, self.effort]

    def listen(self, run_form: SettingsForm) -> None:
        """Write what is chosen into the form."""
        inputs = [*self.outputs, run_form.spec, run_form.values]
        for part in self.outputs:
            part.input(self.choose, inputs, run_form.spec, **RAW_LATEST)

    @skip_on_fault("choosing whether to think")
    def choose(self, thinking: Any, effort: Any, spec: Any, form: Any) -> Any:
        """The spec of the run's form with the chosen values; `default` leaves a setting out."""
        values = {group: dict(own) for group, own in FormValues.of(form).values.items()}
        template = _template_settings(form)
        chosen = {THINKING: SWITCH_VALUES.get(thinking), EFFORT: effort or None}
        template = {name: v for name, v in {**template, **chosen}.items() if v is not None}
        text = fields_of(Sampling)[TEMPLATE].show(template)
        values.setdefault("sampling", {})[TEMPLATE] = text
        return FormSpec.parse(spec).replace(values=values).model_dump()

    def fit(self, options: TemplateOptions, mode: Any, form: Any) -> tuple[Any, Any]:
        """Updates of `outputs`: those that the template asks for, or that are set."""
        template = _template_settings(form)
        is_on, effort = template.get(THINKING), str(template.get(EFFORT) or "")
        thinking = next((name for name, value in SWITCH_VALUES.items() if value is is_on), "")
        efforts = dict.fromkeys([*options.efforts, *filter(None, [effort])])
        shown = [mode == "chat" and bool(asks) for asks in (options.switches or thinking, efforts)]
        return (
            _picker("Thinking", SWITCH_VALUES, value=thinking, visible=shown[0]),
            _picker("Reasoning effort", efforts, value=effort, visible=shown[1]),
        )


def _picker(label: str, names: Iterable[str], **more: Any) -> Any:
    """An update of a picker of the switch; its first choice is the template's own default."""
    choices = [(f"{label}: {name or 'default'}", name) for name in ("", *names)]
    return gr.update(choices=choices, **more)


def _template_settings(form: Any) -> dict[str, Any]:
    """The chat template settings in the values of a run's form; none if they are invalid."""
    values = FormValues.of(form).values.get("sampling", {})
    own = {TEMPLATE: values[TEMPLATE]} if TEMPLATE in values else {}
    settings = attempt(lambda: settings_from(Sampling, own), where="chat template settings")
    return {} if isinstance(settings, Fault) else dict(settings.chat_template_kwargs)


class Examples:
    """The row of buttons; the style sheet hides it once there is a run.

    Attributes:
        buttons: every button, and whether its example drafts a tree.
    """

    def __init__(self, catalog: Catalog, target: gr.Dropdown) -> None:
        self._catalog, self._target = catalog, target
        with gr.Row(elem_id="pg-examples"):
            gr.HTML("Or see an example run:", elem_id="pg-examples-about")
            fast = gr.Button("The fastest here", size="sm")
            self._tree = gr.Button(
                **self._about(target.value), size="sm", elem_id="pg-example-tree"
            )
        self.buttons = {fast: False, self._tree: True}

    def _about(self, target: Any) -> dict[str, Any]:
        """Text and visibility of the button for a draft tree on a target."""
        key = self._catalog.tree_method(target) if isinstance(target, str) else None
        if key is None:
            return {"value": "A draft tree", "visible": False}
        name = self._catalog.method(key).title.split(" for ")[0]
        return {"value": f"A draft tree ({name} as in the paper)", "visible": True}

    def listen(self, open_method: Callable[..., Updates], outputs: Sequence[Any]) -> None:
        """Fill in the page's form with the settings of an example when it is run."""

        @skip_on_fault("an example")
        def fill(draws_tree: bool, target: Any) -> Updates:
            method, settings = self._method(target, draws_tree)
            return open_method(target=target, method=method, settings=settings)

        for button, draws_tree in self.buttons.items():
            button.click(partial(fill, draws_tree), self._target, list(outputs), **RAW)
        self._target.change(
            lambda target: gr.update(**self._about(target)), self._target, self._tree, **RAW
        )

    def _method(self, target: Any, draws_tree: bool) -> tuple[str, dict[str, Any]]:
        """Method of an example, and the settings that differ from its own."""
        name = self._catalog.target(target).name
        tree = self._catalog.tree_method(name) if draws_tree else None
        return tree or self._catalog.first_method(name), {"drafting": "as set"} if tree else {}

    def request(self, draws_tree: bool, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Input of `read_request` for an example, from that of the page.

        Its prompt is the one in the box or else the first example prompt.
        """
        method, settings = self._method(raw["target"], draws_tree)
        return {
            **{name: raw[name] for name in ("target", "dtype", "mode")},
            "method": method,
            "prompt": str(raw["prompt"] or "").strip() or self._catalog.first_prompt(),
            "form": {"values": {"method": settings}},
        }
