"""The page's own components: `gr.HTML` with a constant template, drawn by scripts of `static/`.

Model text never enters a template: it travels as JSON in `value`, and the scripts put it into text
nodes. Browser → Python payloads are read by `playground.host.request`, which trusts nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import gradio as gr

from engine.metrics import FORMULAS

STATIC = Path(__file__).parent / "static"
PANEL_SCRIPTS = ("dom.js", "tree.js", "text.js", "figures.js", "scrubber.js", "panel.js")
Served = Callable[[Any], Any]
"""A function that a script calls as `server.name(one_argument)`."""


@cache
def static_text(*names: str) -> str:
    """Files of `static/`, one after another."""
    return "\n".join((STATIC / name).read_text(encoding="utf-8") for name in names)


def token_panels(*, since: Served, step: Served, placeholder: str, elem_id: str) -> gr.HTML:
    """One to four runs: text with every token coloured, live figures, step scrubber, draft tree.

    Its value is a message of `host.stream`. `since` answers a resync and `step` one step.
    """
    return gr.HTML(
        value=None,
        html_template='<div class="panels" data-count="1"></div>',
        css_template=static_text("panel.css"),
        js_on_load=given(formulas=FORMULAS, placeholder=placeholder) + static_text(*PANEL_SCRIPTS),
        apply_default_css=False,
        server_functions=[since, step],
        elem_id=elem_id,
    )


def given(**values: Any) -> str:
    """Properties for a script, as its first lines.

    A component in a tab that is opened later is not given the properties that it was made with.
    """
    return "".join(f"props.{name} = {json.dumps(value)};\n" for name, value in values.items())


def settings_form(value: dict[str, Any], *, elem_id: str) -> gr.HTML:
    """A form over groups of `controls.Control`; edits come back under `values`."""
    return gr.HTML(
        value=value,
        html_template='<div class="form"></div>',
        css_template=static_text("form.css"),
        js_on_load=static_text("dom.js", "form.js"),
        apply_default_css=False,
        elem_id=elem_id,
    )


def text_line(value: str, *, elem_id: str) -> gr.HTML:
    """One line of plain text that Python may change; nothing in it is markup."""
    return gr.HTML(
        value=value,
        html_template="<div></div>",
        js_on_load=static_text("line.js"),
        apply_default_css=False,
        elem_id=elem_id,
    )


def plain_list(value: dict[str, Any], *, elem_id: str) -> gr.HTML:
    """A folded list of `rows` (name, remark) under a `title`; nothing in it is markup."""
    return gr.HTML(
        value=value,
        html_template="<details><summary></summary><dl></dl></details>",
        js_on_load=static_text("list.js"),
        apply_default_css=False,
        elem_id=elem_id,
    )
