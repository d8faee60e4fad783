"""Settings as a form of Gradio's components: a slider per bounded number, a box per text.

A form is drawn from a `controls.FormSpec`, and its values are read from one component, so one class
serves the settings of every method. Every edit is parsed as a run would parse it: faults appear
at their controls, controls without effect are hidden, and the title says whether the settings make
the method lossy.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial, wraps
from typing import Any

import gradio as gr
from gradio.renderable import Renderable

from engine.config import Limits, Sampling, Settings
from engine.errors import validate_choice
from playground.errors import Fault, attempt
from playground.host.catalog import Catalog
from playground.host.controls import (
    INNER_TYPE,
    FormSpec,
    FormState,
    FormValues,
    Group,
    state_of,
)
from playground.web.components import hidden_value
from playground.web.fields import Fields

QUEUED: dict[str, Any] = {
    "show_progress": "hidden",
    "show_progress_on": [],
    "api_visibility": "private",
    "concurrency_limit": None,
}
"""For listeners that wait in Gradio's queue. The empty list keeps Gradio from updating the progress
of all outputs of all listeners at each message of a stream."""
UNQUEUED: dict[str, Any] = {**QUEUED, "queue": False}
RAW: dict[str, Any] = {**UNQUEUED, "preprocess": False}
RAW_QUEUED: dict[str, Any] = {**QUEUED, "preprocess": False}
"""For listeners that check their inputs themselves. Gradio's preprocessing responds with 500 to a
value that is not among a dropdown's choices, as the server knows them: it has just been removed, or
two events at once, as while a page loads, have changed the choices in another order there."""
LATEST: dict[str, Any] = {**UNQUEUED, "trigger_mode": "always_last"}
RAW_LATEST: dict[str, Any] = {**LATEST, "preprocess": False}
"""For listeners to user input. While one event is in flight, Gradio drops further ones (except
`change`), and the page would keep showing the result of the first."""
VALUES_JS = """(spec) => ({ method: spec.method ?? null,
  groups: spec.groups.map((group) => [group.name, group.method ?? null]),
  values: Object.fromEntries(spec.groups.map(({ name, values }) => [name, Object.fromEntries(
    Object.entries(values).map(([key, v]) => [key, spec.values?.[name]?.[key] ?? v]))])) })"""
REMOVE_JS = """(spec, form) => ({ ...spec, values: form.values,
  groups: spec.groups.filter((group) => group.name !== %s) })"""
EDIT_JS = """(form, ...values) => {
  const names = %s, group = %s, current = form.values[group] ?? {};
  const isCurrent = (form.method ?? null) === %s && names.every((name) => name in current);
  if (!isCurrent) return form;
  const fields = Object.fromEntries(names.map((name, i) => [name, values[i]]));
  return { ...form, values: { ...form.values, [group]: fields } };
}"""
"""A late event of fields that were drawn for another method changes nothing."""

TREE_JS = """(form) => ({ rev: Math.random(), method: %s ?? form.method ?? null,
  tree: form.values[%s][%s] })"""

FOLLOW_JS = """(typed) => {
  const prompt = document.querySelector("#%s .panels")?.dataset.prompt;
  const carried = sessionStorage.getItem("pg-carried") ?? %s;
  if ((typed ?? "") !== carried || !prompt?.trim()) return typed;
  sessionStorage.setItem("pg-carried", prompt);
  return prompt;
}"""
"""Copies another page's prompt into the box until the user types something else there."""

UNLABELLED: dict[str, Any] = {"show_label": False, "container": False}

Listener = Callable[..., Any]
Updates = dict[Any, Any]
"""New values by component; the other outputs of a listener stay as they are."""


def dropdown_of(choices: Sequence[tuple[str, Any]], value: Any) -> Any:
    """An update of a dropdown; a value that is not among the choices becomes the first one."""
    keys = [key for _, key in choices]
    return gr.Dropdown(choices, value=value if value in keys else keys[0])


def on_fault(answer: Callable[[Fault], Any], *, where: str) -> Callable[[Listener], Listener]:
    """Decorates a listener: if it fails, its result is the `answer` to the fault."""

    def decorate(listener: Listener) -> Listener:
        @wraps(listener)
        def listen(*values: Any) -> Any:
            result = attempt(lambda: listener(*values), where=where)
            return answer(result) if isinstance(result, Fault) else result

        return listen

    return decorate


def skip_on_fault(where: str) -> Callable[[Listener], Listener]:
    """Decorates a listener: if it fails, all its outputs stay as they are."""
    return on_fault(lambda _: gr.skip(), where=where)


class FormRenderer(Renderable):
    """`gr.render` on the server's event loop.

    Elsewhere than in its thread, Gradio's loop over a session's components fails when another event
    of the session adds one, and the form stays empty.
    """

    async def apply(self, *args: Any, **kwargs: Any) -> None:
        super().apply(*args, **kwargs)  # type: ignore[no-untyped-call]


class SettingsForm:
    """A form of groups of settings.

    Attributes:
        spec: a `FormSpec` as JSON; set it to draw the form anew. A group that has a `method` can be
            removed by the user.
        values: a `FormValues` as JSON, by group and control; besides, the form's `method`, and of
            every group its name and `method`.
        tree: a choice tree to edit on the Tree page, and the method's key.
    """

    def __init__(
        self, spec: dict[str, Any] | None, *, elem_id: str, classes: Iterable[type[Settings]] = ()
    ) -> None:
        """`classes`: the settings classes of its groups, besides sampling and limits.

        `spec`: None = a listener of the page's load sets it; what is drawn before would be drawn
        anew in the user's hands.
        """
        self._elem_id = elem_id
        every: list[type[Settings]] = [Sampling, Limits, *classes]
        self._classes = {cls.__name__: cls for cls in every}
        if spec is not None:
            self._read(spec)
        # The form is drawn when its tab is first opened; until then it costs nothing.
        js = 'if (props.value) trigger("change");'
        self.spec = hidden_value(spec, js=js)
        self.values, self.tree = hidden_value(), hidden_value()
        self.spec.change(None, self.spec, self.values, js=VALUES_JS, **UNQUEUED)
        # The style sheet reserves space by the number of groups until the form is drawn.
        space = f"pg-groups-{len(spec['groups']) if spec else 1}"
        with gr.Column(elem_id=elem_id, elem_classes=["pg-form", space]):
            FormRenderer(
                self._draw,
                [self.spec],
                [(self.spec, "change")],
                concurrency_limit=None,
                concurrency_id=None,
                trigger_mode="always_last",
                queue=True,
                show_progress="hidden",
            )

    def _draw(self, value: Any) -> None:
        spec = attempt(lambda: self._read(value), where="drawing a form")
        if isinstance(spec, Fault):
            gr.Markdown(spec.sentence, elem_classes="pg-note")
            return
        if not spec.groups:
            gr.Markdown("Nothing added yet.", elem_classes="pg-note")
        for group in spec.groups:
            values = group.current(spec.values)
            controls = group.controls(self._classes.get(group.settings or ""))
            state = self._state(group, values)
            with gr.Accordion(
                heading(group, state), open=group.open, elem_classes="pg-group"
            ) as accordion:
                if group.method:
                    remove = gr.Button("Remove", size="sm", elem_classes="pg-remove")
                    js = REMOVE_JS % json.dumps(group.name)
                    remove.click(None, [self.spec, self.values], self.spec, js=js, **UNQUEUED)
                if group.note:
                    gr.Markdown(group.note, elem_classes="pg-note")
                if not controls:
                    gr.Markdown("This method has no settings.", elem_classes="pg-note")
                fields = Fields(controls, values, state)
            self._listen(group, accordion, fields, spec.method)

    def _listen(self, group: Group, accordion: gr.Accordion, fields: Fields, method: Any) -> None:
        """Store every edit, then update the group."""
        if not fields.components:
            return
        parts, names = [*fields.components.values()], [*fields.components]
        edit = gr.on(
            [part.change for part in parts],
            None,
            [self.values, *parts],
            self.values,
            js=EDIT_JS % tuple(map(json.dumps, (names, group.name, method))),
            **UNQUEUED,
        )
        if group.settings in self._classes:
            update = partial(self._update, group, fields)
            # A late event of fields that were since drawn anew reaches the new ones by this key.
            key, outputs = (self._elem_id, group.name), [accordion, *fields.outputs]
            edit.then(update, self.values, outputs, key=key, **RAW_LATEST)
        for name, button in fields.edit_buttons.items():
            js = TREE_JS % tuple(map(json.dumps, (group.method, group.name, name)))
            button.click(None, self.values, self.tree, js=js, **UNQUEUED)
        for name, part in fields.components.items():
            setting, _, inner = name.rpartition(".")
            if inner == INNER_TYPE:
                swap = partial(self._swap, group.name, setting)
                part.input(swap, [part, self.spec, self.values], self.spec, **RAW_LATEST)

    def _read(self, value: Any) -> FormSpec:
        """Raises ConfigError: no `FormSpec`, or one with settings that this form does not know."""
        spec = FormSpec.parse(value)
        for group in spec.groups:
            if group.settings is not None:
                validate_choice("settings", group.settings, self._classes)
        return spec

    def _state(self, group: Group, values: Mapping[str, Any]) -> FormState:
        cls = self._classes.get(group.settings or "")
        if cls is None:
            return FormState()
        return state_of(cls, {k: v for k, v in values.items() if k not in group.texts})

    @skip_on_fault("updating a form")
    def _update(self, group: Group, fields: Fields, form: Any) -> list[Any]:
        """Updates of a group's components after an edit."""
        values = group.current(FormValues.of(form).values)
        state = self._state(group, values)
        title = gr.skip() if state.hidden is None else gr.update(label=heading(group, state))
        return [title, *fields.updates(values, state)]

    @skip_on_fault("choosing an inner method")
    def _swap(self, name: str, setting: str, decoding_type: Any, spec: Any, form: Any) -> Any:
        """The spec with another method in a setting that holds one."""
        old, values = FormSpec.parse(spec), FormValues.of(form).values
        group = next(group for group in old.groups if group.name == name)
        cls = self._classes[group.settings or ""]
        new = group.with_inner(cls, setting, decoding_type)
        own = {k: v for k, v in values.get(name, {}).items() if not k.startswith(f"{setting}.")}
        groups = [new if one is group else one for one in old.groups]
        return old.replace(groups=groups, values={**values, name: own}).model_dump()


def heading(group: Group, state: FormState) -> str:
    """A group's title, and the method's badge under its settings."""
    return " · ".join(filter(None, (group.title, state.badge)))


class PromptForm:
    """A prompt and its format; the page places `head` and `body`.

    Attributes:
        mode: `chat`, or `raw` for a text to continue.
        example: fills in `mode` and `prompt`.
    """

    def __init__(self, catalog: Catalog, prefix: str) -> None:
        """`prefix` of the components' ids."""
        self._catalog, self._prefix = catalog, prefix

    def head(self) -> None:
        """Format and examples, in the current row."""
        self.mode = gr.Radio(
            [("Chat", "chat"), ("Completion", "raw")],
            value="chat",
            elem_id=f"{self._prefix}-mode",
            label="prompt format",
            **UNLABELLED,
        )
        self.example = gr.Dropdown(
            [("Example prompts …", ""), *self._catalog.examples()],
            elem_id=f"{self._prefix}-example",
            label="example prompts",
            **UNLABELLED,
        )

    def body(self, *, about_system: str, lines: int, autofocus: bool = False) -> None:
        """System prompt and prompt."""
        self.system = gr.Textbox(
            max_lines=6,
            elem_id=f"{self._prefix}-system",
            label="system prompt",
            placeholder=f"System prompt ({about_system})",
            **UNLABELLED,
        )
        self.prompt = gr.Textbox(
            lines=lines,
            max_lines=14,
            elem_id=f"{self._prefix}-prompt",
            label="prompt",
            placeholder="Prompt",
            value=self._catalog.first_prompt(),
            autofocus=autofocus,
            **UNLABELLED,
        )
        picked = [self.prompt, self.mode]
        self.example.input(self.pick_example, self.example, picked, **LATEST)
        shown = lambda mode: gr.update(visible=mode == "chat")  # noqa: E731
        self.mode.change(shown, self.mode, self.system, **UNQUEUED)

    def follow(self, panel: Any) -> None:
        """Take over the prompt of another page's token panels whenever a run begins there."""
        js = FOLLOW_JS % (panel.elem_id, json.dumps(self._catalog.first_prompt()))
        panel.begun(None, self.prompt, self.prompt, js=js, **UNQUEUED)

    @skip_on_fault("picking an example")
    def pick_example(self, key: Any) -> Any:
        """Values of prompt and mode."""
        if not key:
            return gr.skip()
        examples = self._catalog.examples()
        prompt = examples[validate_choice("The example", key, examples)]
        return prompt.turns[0], "raw" if prompt.raw else "chat"
