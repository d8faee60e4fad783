"""Settings as a form of Gradio's components: a slider per bounded number, and so on per field.

A form is drawn from what `controls.controls_of` says of the settings' fields, so that one function
draws the settings of every method, and whoever fills a form does not hold components.
"""

from __future__ import annotations

import json
from typing import Any

import gradio as gr
from pydantic import ConfigDict, Field

from engine.config import Settings
from playground.errors import Fault, attempt
from playground.host.catalog import Catalog
from playground.host.controls import Control

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

BARE: dict[str, Any] = {"show_label": False, "container": False}
NO_EXAMPLE = ""


class Group(Settings):
    """Controls under a title."""

    model_config = ConfigDict(extra="ignore", strict=False)

    name: str
    title: str
    open: bool
    fields: list[Control] = Field(max_length=200)
    badge: str | None = None
    note: str | None = None
    method: str | None = None


class Asked(Settings):
    """A form to draw, as the page sends back what it was told."""

    model_config = ConfigDict(extra="ignore")

    groups: list[Group] = Field(max_length=64)
    values: dict[str, dict[str, Any]] | None = None


class SettingsForm:
    """A form over groups of settings.

    Attributes:
        asked: set it to draw the form anew. Its value has `groups`, each with `name`, `title` and
            `fields` (controls), and what they hold so far as `values`, by group and field. A
            group that has a `method` can be left out by the person who fills the form.
        held: what the form holds, as `values`; the form's `method` comes along, and of every group
            its name and `method`.
    """

    def __init__(self, value: dict[str, Any], *, elem_id: str) -> None:
        # It speaks for itself when its tab is first opened: a form there costs nothing before.
        self.asked = gr.HTML(
            value, html_template="", js_on_load='trigger("change");', elem_classes="pg-none"
        )
        self.held = gr.HTML(None, html_template="", js_on_load="", elem_classes="pg-none")
        self.asked.change(None, self.asked, self.held, js=HOLD_JS, **QUIET)
        with gr.Column(elem_id=elem_id, elem_classes="pg-form"):
            gr.render(
                inputs=self.asked,
                triggers=[self.asked.change],
                concurrency_limit=None,
                show_progress="hidden",
                queue=False,
            )(self._draw)

    def _draw(self, value: Any) -> None:
        asked = attempt(lambda: Asked.parse(value), where="drawing a form")
        if isinstance(asked, Fault):
            gr.Markdown(asked.sentence, elem_classes="pg-note")
            return
        for group in asked.groups:
            values = (asked.values or {}).get(group.name, {})
            title = f"{group.title} · {group.badge}" if group.badge else group.title
            with gr.Accordion(title, open=group.open, elem_classes="pg-group"):
                if group.method:
                    remove = gr.Button("Leave out", size="sm", elem_classes="pg-remove")
                    js = REMOVE_JS % json.dumps(group.name)
                    remove.click(None, [self.asked, self.held], self.asked, js=js, **QUIET)
                if group.note:
                    gr.Markdown(group.note, elem_classes="pg-note")
                if not group.fields:
                    gr.Markdown("Nothing to set.", elem_classes="pg-note")
                self._fields(group.name, group.fields, values)

    def _fields(self, group: str, fields: list[Control], values: dict[str, Any]) -> None:
        names = [field.name for field in fields]
        parts = [component(field, values.get(field.name, field.value)) for field in fields]
        js = EDIT_JS % (json.dumps(names), json.dumps(group))
        for part in parts:
            part.change(None, [self.held, *parts], self.held, js=js, **QUIET)


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
            label="kind of prompt",
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


def component(field: Control, value: Any) -> Any:
    """Gradio's component for a control, holding a value."""
    common: dict[str, Any] = {
        "label": field.label,
        "info": field.help or None,
        "elem_classes": ["pg-field", f"pg-field-{field.name}"],
        "interactive": True,
    }
    kind = field.kind
    bounds: dict[str, Any] = {"minimum": field.min, "maximum": field.max}
    if kind == "flag":
        return gr.Checkbox(value, **common)
    if kind == "choice":
        choices = [("none" if choice is None else str(choice), choice) for choice in field.choices]
        return gr.Dropdown(choices, value=value, **common)
    if kind == "ticks":
        titles = [str(choice) for choice in field.choices]
        return gr.CheckboxGroup(titles, value=value, **common)
    if kind == "slider":
        return gr.Slider(value=value, step=field.step, **bounds, **common)
    if kind == "number":
        return gr.Number(value, **bounds, **common)
    lines = 2 if kind == "lines" else 1
    return gr.Textbox(value, lines=lines, placeholder=field.placeholder, **common)
