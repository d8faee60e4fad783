"""Settings as a form of Gradio's components: a slider per bounded number, and so on per field.

A form is drawn from what `controls.controls_of` says of the settings' fields, so that one function
draws the settings of every method, and whoever fills a form does not hold components. Every edit is
read as a run would read it: what is wrong is said at its control, what has no effect is hidden, and
a method is called lossy as soon as its settings make it so.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

import gradio as gr
from gradio.blocks import BlocksConfig
from pydantic import ConfigDict, Field

from engine.config import Limits, Sampling, Settings
from engine.errors import ConfigError
from playground.errors import Fault, attempt
from playground.host.catalog import Catalog
from playground.host.controls import (
    KIND_WITHIN,
    Control,
    FormState,
    controls_within,
    state_of,
)
from playground.host.request import HeldForm
from playground.web.fields import Fields

QUIET: dict[str, Any] = {"show_progress": "hidden", "queue": False, "api_visibility": "private"}
RAW: dict[str, Any] = {**QUIET, "preprocess": False}
"""For listeners that check what they are sent. Gradio's own check refuses with a 500 a value that
has just left a picker's choices."""
HOLD_JS = """(form) => ({ method: form.method ?? null,
  groups: form.groups.map((group) => [group.name, group.method ?? null]),
  values: Object.fromEntries(form.groups.map(({ name, fields }) => [name, Object.fromEntries(
    fields.map((field) => [field.name, form.values?.[name]?.[field.name] ?? field.value]))])) })"""
REMOVE_JS = """(form, held) => ({ ...form, values: held.values,
  groups: form.groups.filter((group) => group.name !== %s) })"""
EDIT_JS = """(held, ...values) => {
  const fields = %s.map((name, i) => [name, values[i]]);
  return { ...held, values: { ...held.values, [%s]: Object.fromEntries(fields) } };
}"""

TREE_JS = """(held) => ({ rev: Math.random(), method: %s ?? held.method ?? null,
  tree: held.values[%s][%s] })"""

BARE: dict[str, Any] = {"show_label": False, "container": False}
NO_EXAMPLE = ""
MOST_WALKS = 100


def _patiently(attach: Callable[..., None]) -> Callable[..., None]:
    """Gradio's walk through a session's components after a drawing, begun again where it fails.

    Other events of the session change what it walks through, and a form would stay empty. A walk
    that fails has attached nothing: no component of ours has a value that loads.
    """

    def walk(*of: Any) -> None:
        for is_last in (*(False,) * MOST_WALKS, True):
            try:
                return attach(*of)
            except RuntimeError:
                if is_last:
                    raise

    return walk


setattr(BlocksConfig, "attach_load_events", _patiently(BlocksConfig.attach_load_events))  # noqa: B010


class Group(Settings):
    """Controls under a title.

    Attributes:
        settings: name of the class that what they hold is read as; None if it is not looked at.
        method: key of the method, where the group can be left out.
    """

    model_config = ConfigDict(extra="ignore", strict=False)

    name: str
    title: str
    open: bool
    fields: list[Control] = Field(max_length=200)
    settings: str | None = None
    note: str | None = None
    method: str | None = None

    def values(self, held: Mapping[str, Mapping[str, Any]] | None) -> dict[str, Any]:
        """What every control holds."""
        own = (held or {}).get(self.name, {})
        return {one.name: own.get(one.name, one.value) for one in self.fields}

    def plain(self) -> dict[str, Any]:
        """As `Asked` takes it."""
        return {**self.model_dump(), "fields": [asdict(one) for one in self.fields]}

    def swapped(self, setting: str, controls: list[Control]) -> Group:
        """The group with the controls of another method in a setting that holds one."""
        inside = [one.name.startswith(f"{setting}.") for one in self.fields]
        if True not in inside:
            raise ConfigError(f"{setting} holds no method.")
        rest = [one for one, is_inside in zip(self.fields, inside, strict=True) if not is_inside]
        at = inside.index(True)
        return self.model_copy(update={"fields": [*rest[:at], *controls, *rest[at:]]})


class Asked(Settings):
    """A form to draw, as the page sends back what it was told."""

    model_config = ConfigDict(extra="ignore")

    groups: list[Group] = Field(max_length=64)
    values: dict[str, dict[str, Any]] | None = None
    method: Any = None


class SettingsForm:
    """A form over groups of settings.

    Attributes:
        asked: set it to draw the form anew. Its value has `groups`, each as `controls.group_of`
            makes it, and what they hold so far as `values`, by group and control. A group that has
            a `method` can be left out by the person who fills the form.
        held: what the form holds, as `values`; the form's `method` comes along, and of every group
            its name and `method`.
        tree: a choice tree that is to be edited elsewhere, and the method's key if it is known.
    """

    def __init__(
        self, value: dict[str, Any], *, elem_id: str, classes: Iterable[type[Settings]] = ()
    ) -> None:
        """`classes`: of the settings in it, beside sampling and limits."""
        self._elem_id = elem_id
        known: list[type[Settings]] = [Sampling, Limits, *classes]
        self._classes = {cls.__name__: cls for cls in known}
        # It speaks for itself when its tab is first opened: a form there costs nothing before.
        self.asked = gr.HTML(
            value, html_template="", js_on_load='trigger("change");', elem_classes="pg-none"
        )
        self.held, self.tree = (
            gr.HTML(None, html_template="", js_on_load="", elem_classes="pg-none") for _ in "12"
        )
        self.asked.change(None, self.asked, self.held, js=HOLD_JS, **QUIET)
        with gr.Column(elem_id=elem_id, elem_classes="pg-form"):
            # One after another: Gradio walks through a session's components while it draws, and
            # fails if a form that is drawn beside it adds some.
            gr.render(
                inputs=self.asked,
                triggers=[self.asked.change],
                concurrency_id="forms",
                concurrency_limit=1,
                show_progress="hidden",
            )(self._draw)

    def _draw(self, value: Any) -> None:
        asked = attempt(lambda: Asked.parse(value), where="drawing a form")
        if isinstance(asked, Fault):
            gr.Markdown(asked.sentence, elem_classes="pg-note")
            return
        if not asked.groups:
            gr.Markdown("Nothing added yet.", elem_classes="pg-note")
        for group in asked.groups:
            values = group.values(asked.values)
            state = self._state(group, values)
            with gr.Accordion(
                heading(group, state), open=group.open, elem_classes="pg-group"
            ) as head:
                if group.method:
                    remove = gr.Button("Remove", size="sm", elem_classes="pg-remove")
                    js = REMOVE_JS % json.dumps(group.name)
                    remove.click(None, [self.asked, self.held], self.asked, js=js, **QUIET)
                if group.note:
                    gr.Markdown(group.note, elem_classes="pg-note")
                if not group.fields:
                    gr.Markdown("It has no settings.", elem_classes="pg-note")
                drawn = Fields(group.fields, values, state)
            self._listen(group, head, drawn)

    def _listen(self, group: Group, head: gr.Accordion, drawn: Fields) -> None:
        """Hold what is edited, then say what it means."""
        if not drawn.parts:
            return
        parts, names = list(drawn.parts.values()), list(drawn.parts)
        edited = gr.on(
            [part.change for part in parts],
            None,
            [self.held, *parts],
            self.held,
            js=EDIT_JS % (json.dumps(names), json.dumps(group.name)),
            **QUIET,
        )
        if group.settings in self._classes:
            look = partial(self._look, group, drawn)
            # Of a form that is drawn anew, the old fields may still ask: they reach the new one.
            key = (self._elem_id, group.name)
            edited.then(look, self.held, [head, *drawn.outputs], key=key, **RAW)
        for name, edit in drawn.edits.items():
            js = TREE_JS % tuple(map(json.dumps, (group.method, group.name, name)))
            edit.click(None, self.held, self.tree, js=js, **QUIET)
        for name, part in drawn.parts.items():
            setting, _, inner = name.rpartition(".")
            if inner == KIND_WITHIN:
                swap = partial(self._swap, group.name, setting)
                part.input(swap, [part, self.asked, self.held], self.asked, **RAW)

    def _state(self, group: Group, values: Mapping[str, Any]) -> FormState:
        cls = self._classes.get(group.settings or "")
        if cls is None:
            return FormState()
        own = {k: v for k, v in values.items() if k.partition(".")[0] in cls.model_fields}
        return state_of(cls, own)

    def _look(self, group: Group, drawn: Fields, held: Any) -> list[Any]:
        """Updates of what is drawn of a group."""

        def read() -> list[Any]:
            values = group.values(HeldForm.of(held).values)
            state = self._state(group, values)
            title = gr.skip() if state.hidden is None else gr.update(label=heading(group, state))
            return [title, *drawn.updates(values, state)]

        found = attempt(read, where="looking at a form")
        return [gr.skip()] * (1 + len(drawn.outputs)) if isinstance(found, Fault) else found

    def _swap(self, name: str, setting: str, kind: Any, asked: Any, held: Any) -> Any:
        """The form with another method in a setting that holds one."""

        def swapped() -> dict[str, Any]:
            form, values = Asked.parse(asked), HeldForm.of(held).values
            group = next(group for group in form.groups if group.name == name)
            cls = self._classes[group.settings or ""]
            new = group.swapped(setting, controls_within(cls, setting, kind))
            kept = {
                k: v for k, v in values.get(name, {}).items() if not k.startswith(f"{setting}.")
            }
            groups = [new if one is group else one for one in form.groups]
            return {
                "method": form.method,
                "groups": [one.plain() for one in groups],
                "values": {**values, name: kept},
            }

        found = attempt(swapped, where="choosing a method within another")
        return gr.skip() if isinstance(found, Fault) else found


def heading(group: Group, state: FormState) -> str:
    """A group's title, and what its settings make of the method."""
    return " · ".join(filter(None, (group.title, state.badge)))


class PromptForm:
    """A prompt and what kind it is; `head` and `body` are laid out by the page.

    Attributes:
        mode: `chat`, or `raw` for a text to continue.
        example: fills in `mode` and `prompt`.
    """

    def __init__(self, catalog: Catalog, prefix: str) -> None:
        """`prefix`: of the components' ids."""
        self._catalog, self._prefix = catalog, prefix

    def head(self) -> None:
        """Kind and examples, in the row around it."""
        self.mode = gr.Radio(
            [("Chat", "chat"), ("Completion", "raw")],
            value="chat",
            elem_id=f"{self._prefix}-mode",
            label="prompt format",
            **BARE,
        )
        self.example = gr.Dropdown(
            [("Example prompts …", NO_EXAMPLE), *self._catalog.examples()],
            value=NO_EXAMPLE,
            elem_id=f"{self._prefix}-example",
            label="example prompts",
            **BARE,
        )

    def body(self, *, about_system: str, lines: int, autofocus: bool = False) -> None:
        """System prompt and prompt, of so many lines."""
        self.system = gr.Textbox(
            lines=1,
            max_lines=6,
            elem_id=f"{self._prefix}-system",
            label="system prompt",
            placeholder=f"System prompt ({about_system})",
            **BARE,
        )
        self.prompt = gr.Textbox(
            lines=lines,
            max_lines=14,
            elem_id=f"{self._prefix}-prompt",
            label="prompt",
            placeholder="Prompt",
            value=self._catalog.first_prompt(),
            autofocus=autofocus,
            **BARE,
        )

    def pick_example(self, key: Any) -> Any:
        """Values of prompt and mode."""
        if key == NO_EXAMPLE:
            return gr.skip(), gr.skip()
        picked = attempt(lambda: self._catalog.example(key), where="picking an example")
        if isinstance(picked, Fault):
            return gr.skip(), gr.skip()
        text, is_raw = picked
        return text, "raw" if is_raw else "chat"
