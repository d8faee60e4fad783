"""Controls as Gradio's components: the main ones, the folded ones, and the text under each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

import gradio as gr

from engine.grammar import TITLES
from engine.safe_text import visible
from playground.host.controls import Control, FormState
from playground.web.tree_picture import tree_picture


class Fields:
    """Controls, drawn in the current context: the main ones, the others in an accordion.

    Attributes:
        parts: the component of every control, by name.
        edits: buttons that open a tree on the Tree page, by the control that holds it.
        outputs: the components of `updates`.
    """

    def __init__(
        self, controls: Sequence[Control], values: Mapping[str, Any], state: FormState
    ) -> None:
        self.parts: dict[str, Any] = {}
        self.edits: dict[str, gr.Button] = {}
        self._controls = {control.name: control for control in controls}
        self._pictures: dict[str, gr.HTML] = {}
        self._boxes: list[tuple[gr.Column | gr.Accordion, list[str]]] = []
        self._fault = gr.HTML(**self._fault_text(state), padding=False)
        for section in dict.fromkeys(control.section for control in controls):
            inside = [control for control in controls if control.section == section]
            if section:
                with gr.Accordion(section, elem_classes="pg-section"):
                    self._section(inside, values, state)
            else:
                self._section(inside, values, state)
        boxes = [box for box, _ in self._boxes]
        self.outputs = [self._fault, *self.parts.values(), *self._pictures.values(), *boxes]

    def _section(
        self, controls: Sequence[Control], values: Mapping[str, Any], state: FormState
    ) -> None:
        for control in controls:
            if control.main:
                self._control(control, values[control.name], state)
        more = [control for control in controls if not control.main]
        if not more:
            return
        names = [control.name for control in more]
        fold = {"open": False, **fold_of(names, state)}
        with gr.Accordion("More settings", elem_classes="pg-more", **fold) as accordion:
            for control in more:
                self._control(control, values[control.name], state)
        self._boxes.append((accordion, names))

    def _control(self, control: Control, value: Any, state: FormState) -> None:
        if control.kind != "tree":
            self.parts[control.name] = component(control, value, state)
            return
        with gr.Column(elem_classes="pg-tree-field", **visibility([control.name], state)) as box:
            self._pictures[control.name] = gr.HTML(
                tree_picture(control.label, value), padding=False
            )
            if not control.section:
                edit = gr.Button("Edit on the Tree page", size="sm", elem_classes="pg-edit-tree")
                self.edits[control.name] = edit
            fold = {"open": False, **fold_of([control.name], state)}
            with gr.Accordion("List of paths", elem_classes="pg-more", **fold) as paths:
                self.parts[control.name] = component(control, value, state)
        self._boxes += [(box, [control.name]), (paths, [control.name])]

    def updates(self, values: Mapping[str, Any], state: FormState) -> list[Any]:
        """Updates of `outputs`; visibility does not change while values are refused."""
        controls = self._controls
        updates = [self._fault_text(state)]
        updates += [about(controls[name], state) for name in self.parts]
        for name in self._pictures:
            updates.append({"value": tree_picture(controls[name].label, values[name])})
        for box, names in self._boxes:
            is_fold = isinstance(box, gr.Accordion)
            updates.append(fold_of(names, state) if is_fold else visibility(names, state))
        return [gr.update(**update) for update in updates]

    def _fault_text(self, state: FormState) -> dict[str, Any]:
        """Faults that no control is to blame for."""
        text = " ".join(text for name, text in state.faults.items() if name not in self._controls)
        return {"value": f'<p class="pg-alert">{escape(visible(text))}</p>', "visible": bool(text)}


def component(control: Control, value: Any, state: FormState) -> Any:
    """Gradio's component for a control, with a value."""
    common = {"label": control.label, "interactive": True, **about(control, state)}
    kind = control.kind
    bounds: dict[str, Any] = {"minimum": control.min, "maximum": control.max}
    if kind == "flag":
        return gr.Checkbox(value, **common)
    if kind == "choice":
        choices = [(in_words(one), one) for one in control.choices]
        return gr.Dropdown(choices, value=value, **common)
    if kind == "ticks":
        titles = [str(choice) for choice in control.choices]
        return gr.CheckboxGroup(titles, value=value, **common)
    if kind == "slider":
        return gr.Slider(value=value, step=control.step, **bounds, **common)
    if kind == "number":
        return gr.Number(value, **bounds, **common)
    lines = 2 if kind in ("lines", "tree") else 1
    return gr.Textbox(value, lines=lines, placeholder=control.placeholder, **common)


def in_words(choice: object) -> str:
    """The label of a choice; names of methods are unchanged."""
    if choice is None:
        return "none"
    text = str(choice)
    return TITLES.get(text) or (text.replace("_", " ") if text.islower() else text)


def about(control: Control, state: FormState) -> dict[str, Any]:
    """The text under a control, and its visibility."""
    fault = state.faults.get(control.name)
    text = unlinked(fault or control.help)
    classes = ["pg-field", f"pg-field-{control.name.replace('.', '-')}"]
    return {
        "info": text if fault or control.label == control.name else f"{text} `{control.name}`",
        "elem_classes": [*classes, "faulty"] if fault else classes,
        **visibility([control.name], state),
    }


def fold_of(names: Sequence[str], state: FormState) -> dict[str, Any]:
    """An accordion is hidden when all controls in it are, and open when one of them is at fault."""
    is_open = {"open": True} if state.faults.keys() & {*names} else {}
    return {**is_open, **visibility(names, state)}


def visibility(names: Iterable[str], state: FormState) -> dict[str, Any]:
    """Hidden controls stay on the page with their values; no change while values are refused."""
    if state.hidden is None:
        return {}
    return {"visible": "hidden" if state.hidden.issuperset(names) else True}


def unlinked(text: str) -> str:
    """Text without Markdown links, which Gradio's descriptions render: it may quote user input."""
    return text.replace("](", "] (")
