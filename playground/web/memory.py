"""What a browser stores of a page: the identity of a tab, and the values of a form before a reload.

Stored values are input from outside. They are read field by field; those of an older version, or
that anybody else wrote there, are ignored where they are invalid.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gradio as gr

from engine.config import Settings
from playground.errors import Fault, attempt
from playground.host.request import FormValues
from playground.web.forms import QUIET

MAX_TAB_CHARS = 64
TAB_JS = """
let id = sessionStorage.getItem("pg-tab");
if (!id) {
  id = [...crypto.getRandomValues(new Uint32Array(4))].map((part) => part.toString(36)).join("-");
  sessionStorage.setItem("pg-tab", id);
}
props.value = id;"""
READ_JS = """() => {
  let memory = {};
  try { memory = JSON.parse(localStorage.getItem(%(key)s)) ?? {}; } catch { /* not ours */ }
  const linked = new URLSearchParams(location.search).get(%(parameter)s);
  return [{ ...memory, foreign: linked !== null && linked !== localStorage.getItem(%(last)s) }];
}"""
LAST_JS = """(tab) =>
  [tab, sessionStorage.getItem(%(last)s), localStorage.getItem(%(last)s)]"""
BEGIN_JS = "() => { document.body.classList.add(%(key)s); return []; }"
WRITE_JS = """(...values) => {
  if (!document.body.classList.contains(%(key)s)) return [];
  const memory = Object.fromEntries(%(names)s.map((name, i) => [name, values[i]]));
  try { localStorage.setItem(%(key)s, JSON.stringify(memory)); } catch { /* full or blocked */ }
  return [];
}"""


def tab_identity() -> gr.HTML:
    """A component whose value identifies a browser tab, the same after a reload."""
    return gr.HTML(None, html_template="", js_on_load=TAB_JS, elem_classes="pg-none")


def owner_of(tab: object, request: gr.Request) -> str:
    """Whose runs a new run replaces: the tab's, or for a program without tabs the session's."""
    if isinstance(tab, str) and 0 < len(tab) <= MAX_TAB_CHARS:
        return tab
    return str(getattr(request, "session_hash", None) or "no session")


def chat_of(panel: Any) -> Any:
    """The run of a panel that a next turn continues; not checked, it may be of any type."""
    return panel.get("chat") if isinstance(panel, dict) else None


def last_of(panel: Any) -> Any:
    """The last run of a panel, with or without an answer; not checked either."""
    match panel:
        case {"runs": [*_, {"id": run}]}:
            return run
    return chat_of(panel)


class Memory:
    """The form of one page, written to the browser's local storage whenever it changes."""

    def __init__(self, tab: str, fields: Mapping[str, Any], *, parameter: str) -> None:
        """Stores the fields under their names.

        Args:
            tab: of the page.
            parameter: of the page's address, that names what it displays.
        """
        self._memory = gr.HTML(None, html_template="", js_on_load="", elem_classes="pg-none")
        names = {"key": f"pg-{tab}", "last": f"pg-{tab}-{parameter}", "parameter": parameter}
        self._js = {name: json.dumps(text) for name, text in names.items()}
        self._js["names"] = json.dumps(list(fields))
        parts = list(fields.values())
        gr.on([part.change for part in parts], None, parts, None, js=WRITE_JS % self._js, **QUIET)

    def listen(
        self,
        page: gr.Blocks,
        fill: Callable[[Mapping[str, Any], Mapping[str, str]], Any],
        outputs: Sequence[Any],
    ) -> Any:
        """Fill the form when the page is opened; changes are stored from then on.

        Args:
            fill: takes the stored values and the address's parameters, and returns updates of
                `outputs`. `foreign` among the stored values: the address names something else than
                this browser displayed last.

        Returns:
            The event, to chain others to.
        """

        def restore(memory: Any, request: gr.Request) -> Any:
            return fill(memory if isinstance(memory, dict) else {}, dict(request.query_params))

        js = READ_JS % self._js
        read = page.load(restore, self._memory, list(outputs), js=js, **QUIET)
        read.then(None, None, None, js=BEGIN_JS % self._js, **QUIET)
        return read

    @property
    def last_js(self) -> str:
        """JavaScript: the tab's identity, what the page displayed last in it and in any tab."""
        return LAST_JS % self._js


def is_anything(memory: Mapping[str, Any]) -> bool:
    """Whether a browser has stored a form."""
    return bool(memory.keys() - {"foreign"})


def memory_text(memory: Mapping[str, Any], name: str, max_chars: int) -> str:
    """A stored text; empty where there is none, or a longer one."""
    text = memory.get(name)
    return text if isinstance(text, str) and len(text) <= max_chars else ""


def memory_choice(memory: Mapping[str, Any], name: str, choices: Sequence[Any], start: Any) -> Any:
    """A stored choice; `start` where there is none, or one that is not available."""
    value = memory.get(name)
    return value if value in choices else start


def memory_settings(form: Any, group: str, parse: Callable[[dict[str, Any]], Settings]) -> Any:
    """The stored values of a form's group, without the fields that `parse` refuses."""
    values = attempt(lambda: FormValues.of(form).values.get(group, {}), where="a stored form")
    if isinstance(values, Fault):
        return {}

    def is_valid(name: str, value: Any) -> bool:
        parsed = attempt(lambda: parse({name: value}), where=f"a stored {name}")
        return not isinstance(parsed, Fault)

    return {name: value for name, value in values.items() if is_valid(name, value)}
