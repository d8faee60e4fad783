"""Controls as Gradio's components: main ones, folded ones, and the text under each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from html import escape
from typing import Any

import gradio as gr
from jinja2 import Environment

from engine.formats import plural
from engine.grammar import TITLES
from engine.safe_text import visible, visible_value
from engine.tree import ChoiceTree
from playground.errors import Fault, attempt
from playground.host.controls import Control, FormState, Values

Update = Callable[[Values, FormState], dict[str, Any]]
"""Properties of a component for a form's values and their state."""
STEP_X, STEP_Y, MARGIN = 26, 7, 5
PICTURE = Environment(autoescape=True, finalize=visible_value).from_string("""
<figure class="pg-tree-picture"><b>{{ label }}</b>
{% if fault %}<figcaption class="faulty">{{ fault }}</figcaption>{% else %}
<svg viewBox="0 0 {{ width }} {{ height }}" width="{{ width }}" role="img" aria-label="{{ text }}">
{% for x1, y1, x2, y2 in edges %}<path d="M{{ x1 }} {{ y1 }}L{{ x2 }} {{ y2 }}"/>{% endfor %}
{% for x, y in nodes %}<circle cx="{{ x }}" cy="{{ y }}" r="2.5"/>{% endfor %}
</svg><figcaption>{{ text }}</figcaption>{% endif %}
</figure>
""")


class Fields:
    """Controls in the current context: the main ones, and the others in an accordion.

    Attributes:
        components: the component of every control, by name.
        edit_buttons: each opens the tree of a control on the Tree page, by the control's name.
    """

    def __init__(self, controls: Sequence[Control], values: Values, state: FormState) -> None:
        self.components: dict[str, Any] = {}
        self.edit_buttons: dict[str, gr.Button] = {}
        self._values, self._state = values, state
        self._parts: list[tuple[Any, Update]] = []
        names = [control.name for control in controls]
        self._place(gr.HTML, lambda _, state: other_faults(names, state))
        for section in dict.fromkeys(control.section for control in controls):
            with gr.Accordion(section, elem_classes="pg-section") if section else nullcontext():
                self._section([control for control in controls if control.section == section])

    @property
    def outputs(self) -> list[Any]:
        """The components of `updates`."""
        return [part for part, _ in self._parts]

    def updates(self, values: Values, state: FormState) -> list[Any]:
        """Updates of `outputs`; visibility does not change while the values are invalid."""
        return [gr.update(**update(values, state)) for _, update in self._parts]

    def _place(self, make: Callable[..., Any], update: Update, **start: Any) -> Any:
        """A new component with the properties that `update` returns, now and later."""
        part = make(**{**start, **update(self._values, self._state)})
        self._parts.append((part, update))
        return part

    def _section(self, controls: Sequence[Control]) -> None:
        more = [control for control in controls if not control.main]
        for control in controls:
            if control.main:
                self._control(control)
        if more:
            with self._fold("More settings", [control.name for control in more]):
                for control in more:
                    self._control(control)

    def _fold(self, title: str, names: Sequence[str]) -> Any:
        make = partial(gr.Accordion, title, elem_classes="pg-more")
        return self._place(make, lambda _, state: accordion_state(names, state), open=False)

    def _control(self, control: Control) -> None:
        if control.kind == "tree":
            make = partial(gr.Column, elem_classes="pg-tree-field")
            with self._place(make, lambda _, state: visibility([control.name], state)):
                self._tree(control)
        else:
            self._component(control)

    def _tree(self, control: Control) -> None:
        name, label = control.name, control.label
        self._place(gr.HTML, lambda values, _: {"value": tree_picture(label, values[name])})
        if not control.section:
            edit = gr.Button("Edit on the Tree page", size="sm", elem_classes="pg-edit-tree")
            self.edit_buttons[name] = edit
        with self._fold("List of paths", [name]):
            self._component(control)

    def _component(self, control: Control) -> None:
        make = partial(component, control, self._values[control.name])
        part = self._place(make, lambda _, state: info_and_visibility(control, state))
        self.components[control.name] = part


def other_faults(names: Sequence[str], state: FormState) -> dict[str, Any]:
    """Value and visibility of the faults that belong to none of these controls."""
    text = " ".join(text for name, text in state.faults.items() if name not in names)
    return {"value": f'<p class="pg-alert">{escape(visible(text))}</p>', "visible": bool(text)}


def component(control: Control, value: Any, **common: Any) -> Any:
    """Gradio's component for a control, with its value."""
    common |= {"label": control.label, "interactive": True}
    kind = control.kind
    bounds: dict[str, Any] = {"minimum": control.min, "maximum": control.max}
    if kind == "flag":
        return gr.Checkbox(value, **common)
    if kind == "choice":
        choices = [(choice_label(one), one) for one in control.choices]
        choices[:0] = [("none", None)] * control.optional
        return gr.Dropdown(choices, value=value, **common)
    if kind == "slider":
        return gr.Slider(value=value, step=control.step, **bounds, **common)
    if kind == "number":
        return gr.Number(value, **bounds, **common)
    lines = 2 if kind in ("lines", "tree") else 1
    return gr.Textbox(value, lines=lines, placeholder=control.placeholder, **common)


def choice_label(choice: object) -> str:
    """The label of a choice; names of methods stay as they are."""
    text = str(choice)
    return TITLES.get(text) or (text.replace("_", " ") if text.islower() else text)


def info_and_visibility(control: Control, state: FormState) -> dict[str, Any]:
    """The text under a control, and its visibility."""
    fault = state.faults.get(control.name)
    text = without_links(fault or control.help)
    classes = ["pg-field", f"pg-field-{control.name.replace('.', '-')}"]
    return {
        "info": text if fault or control.label == control.name else f"{text} `{control.name}`",
        "elem_classes": [*classes, "faulty"] if fault else classes,
        **visibility([control.name], state),
    }


def accordion_state(names: Sequence[str], state: FormState) -> dict[str, Any]:
    """Of an accordion: hidden if all its controls are, open if one of them is invalid."""
    is_open = {"open": True} if state.faults.keys() & {*names} else {}
    return {**is_open, **visibility(names, state)}


def visibility(names: Iterable[str], state: FormState) -> dict[str, Any]:
    """Hidden controls stay on the page with their values; no change while values are invalid."""
    if state.hidden is None:
        return {}
    return {"visible": "hidden" if state.hidden.issuperset(names) else True}


def without_links(text: str) -> str:
    """Text without Markdown links, which Gradio would render: the text may quote user input."""
    return text.replace("](", "] (")


def tree_picture(label: str, raw: Any) -> str:
    """A picture of the tree in a control, or the reason why its value is not a tree."""
    tree = attempt(lambda: ChoiceTree.parse(raw), where="drawing a tree")
    if isinstance(tree, Fault):
        return PICTURE.render(label=label, fault=tree.sentence)
    places = _node_positions(tree)
    edges = [(*places[path[:-1]], *places[path]) for path in tree.paths]
    return PICTURE.render(
        label=label,
        width=2 * MARGIN + STEP_X * tree.depth,
        height=2 * MARGIN + STEP_Y * (len(tree.leaves) - 1),
        text=f"{plural(len(tree), 'node')}, {tree.depth} deep",
        edges=edges,
        nodes=places.values(),
    )


def _node_positions(tree: ChoiceTree) -> dict[tuple[int, ...], tuple[int, float]]:
    """Pixel position (x, y) of every node: leaves in a column, parents between their children."""
    below: dict[tuple[int, ...], list[float]] = {}
    places: dict[tuple[int, ...], tuple[int, float]] = {}
    rows = {leaf: MARGIN + STEP_Y * row for row, leaf in enumerate(sorted(tree.leaves))}
    for path in [*reversed(tree.paths), ()]:
        inner = below.get(path)
        y = (inner[0] + inner[-1]) / 2 if inner else float(rows[path])
        places[path] = MARGIN + STEP_X * len(path), y
        below.setdefault(path[:-1], []).append(y)
    return places
