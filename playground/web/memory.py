"""What a browser stores: the identity of a tab, and the values of the form across a reload.

Stored values are untrusted input: they are read field by field, and invalid ones, for example of
an older version, are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gradio as gr

from engine.config import Settings
from playground.errors import Fault, attempt
from playground.host.controls import FormValues, changed_by
from playground.web.components import hidden_value, text_of
from playground.web.forms import UNQUEUED

MAX_TAB_CHARS = 64
TAB_JS = """
const random = () => [...crypto.getRandomValues(new Uint32Array(4))];
const id = sessionStorage.getItem("pg-tab") ?? random().map((part) => part.toString(36)).join("-");
const take = () => sessionStorage.removeItem("pg-tab");
take();
addEventListener("pageshow", take);  // also when Back shows the page again
addEventListener("pagehide", () => sessionStorage.setItem("pg-tab", id));
props.value = id;"""
"""The identity is stored only while no page has it: a duplicated tab copies the session storage."""
READ_JS = """() => {
  document.querySelectorAll("#pg-side, #pg-main").forEach((part) => { part.inert = true; });
  let memory = {};
  try { memory = JSON.parse(localStorage.getItem("pg-generate")) ?? {}; } catch { /* not ours */ }
  const linked = new URLSearchParams(location.search).get("run");
  const last = localStorage.getItem("pg-generate-run");
  return [{ ...memory, foreign: linked !== null && linked !== last }];
}"""
LAST_JS = """(tab) => [tab, ...[sessionStorage, localStorage].map((store) => store.getItem(%s))]"""
BEGIN_JS = """async () => {
  const isDrawn = (form) => form.querySelector(".pg-field, .pg-note");
  const late = performance.now() + 5000;
  while (![...document.querySelectorAll("#pg-side > .pg-form")].every(isDrawn)
    && performance.now() < late) await new Promise(requestAnimationFrame);
  document.querySelectorAll("#pg-side, #pg-main").forEach((part) => { part.inert = false; });
  document.body.classList.add("pg-generate");
  return [];
}"""
WRITE_JS = """(...values) => {
  if (!document.body.classList.contains("pg-generate")) return [];
  const memory = JSON.stringify(Object.fromEntries(%s.map((name, i) => [name, values[i]])));
  try { localStorage.setItem("pg-generate", memory); } catch { /* full or blocked */ }
  return [];
}"""


def tab_identity() -> gr.HTML:
    """A component whose value identifies a browser tab, the same after a reload."""
    return hidden_value(js=TAB_JS)


def owner_of(tab: object, request: gr.Request) -> str:
    """The owner of runs: the tab, or the session of a program; a new run replaces its last one."""
    if isinstance(tab, str) and 0 < len(tab) <= MAX_TAB_CHARS:
        return tab
    return str(getattr(request, "session_hash", None) or "no session")


def chat_of(panel: Any) -> Any:
    """The run of a panel that the next turn continues; not validated, of any type."""
    return panel.get("chat") if isinstance(panel, dict) else None


def last_run_of(panel: Any) -> Any:
    """The last run of a panel, with or without an answer; not validated either."""
    match panel:
        case {"runs": [*_, {"id": run}]}:
            return run
    return chat_of(panel)


def last_shown_js(tab: str, parameter: str) -> str:
    """JavaScript: the browser tab's identity; what a page displayed last in it, and in any tab.

    Args:
        parameter: parameter of the page's URL that names what it displays.
    """
    return LAST_JS % json.dumps(f"pg-{tab}-{parameter}")


def keep_form(
    page: gr.Blocks, fields: Mapping[str, Any], fill: Callable[..., Any], outputs: Sequence[Any]
) -> Any:
    """Fill in the form when the page is loaded; from then on save its fields by name.

    Until then the form takes no input, because the stored values would replace it, and its fields
    would move under the pointer.

    Args:
        fill: listener that takes the stored values and returns updates of `outputs`. `foreign`
            among the stored values: the URL names another run than this browser displayed last.

    Returns:
        The event, for further listeners.
    """
    parts, js = list(fields.values()), WRITE_JS % json.dumps(list(fields))
    gr.on([part.change for part in parts], None, parts, None, js=js, **UNQUEUED)

    read = page.load(fill, hidden_value(), list(outputs), js=READ_JS, **UNQUEUED)
    read.then(None, None, None, js=BEGIN_JS, **UNQUEUED)
    return read


def memory_text(memory: Mapping[str, Any], name: str, max_chars: int) -> str:
    """A stored text; empty if there is none, or if it is too long."""
    text = text_of(memory, name)
    return text if len(text) <= max_chars else ""


def memory_choice(memory: Mapping[str, Any], name: str, choices: Sequence[Any], start: Any) -> Any:
    """A stored choice; `start` if there is none, or if it is not available."""
    value = memory.get(name)
    return value if value in choices else start


def memory_settings(form: Any, group: str, start: Settings) -> dict[str, Any]:
    """The stored values of a form's group, each of which the settings accept."""
    values = attempt(lambda: FormValues.of(form).values.get(group, {}), where="a stored form")
    if isinstance(values, Fault):
        return {}

    def is_valid(name: str, value: Any) -> bool:
        changed = attempt(lambda: changed_by(start, {name: value}), where=f"a stored {name}")
        return not isinstance(changed, Fault)

    return {name: value for name, value in values.items() if is_valid(name, value)}
