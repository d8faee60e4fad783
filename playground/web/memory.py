"""What a browser keeps of a page: who a tab is, and what its forms held before a reload.

What comes back is anybody's to write. It is taken field by field; what an older version or another
hand left there that does not fit is passed over.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gradio as gr

from engine.config import Settings
from playground.errors import Fault, attempt
from playground.host.request import HeldForm
from playground.web.forms import QUIET

TAB_CHARS = 64
TAB_JS = """
let id = sessionStorage.getItem("pg-tab");
if (!id) {
  id = [...crypto.getRandomValues(new Uint32Array(4))].map((part) => part.toString(36)).join("-");
  sessionStorage.setItem("pg-tab", id);
}
props.value = id;"""
READ_JS = """() => {
  let kept = {};
  try { kept = JSON.parse(localStorage.getItem(%(key)s)) ?? {}; } catch { /* not ours */ }
  const asked = new URLSearchParams(location.search).get(%(shows)s);
  return [{ ...kept, foreign: asked !== null && asked !== localStorage.getItem(%(last)s) }];
}"""
LAST_JS = """(tab) =>
  [tab, sessionStorage.getItem(%(last)s), localStorage.getItem(%(last)s)]"""
BEGIN_JS = "() => { document.body.classList.add(%(key)s); return []; }"
WRITE_JS = """(...values) => {
  if (!document.body.classList.contains(%(key)s)) return [];
  const kept = Object.fromEntries(%(names)s.map((name, i) => [name, values[i]]));
  try { localStorage.setItem(%(key)s, JSON.stringify(kept)); } catch { /* no room, or forbidden */ }
  return [];
}"""


def tab_identity() -> gr.HTML:
    """A component whose value tells a tab from others, the same after a reload."""
    return gr.HTML(None, html_template="", js_on_load=TAB_JS, elem_classes="pg-none")


def owner_of(tab: object, request: gr.Request) -> str:
    """Whose runs a new run replaces: the tab's, or of a program without tabs the session's."""
    if isinstance(tab, str) and 0 < len(tab) <= TAB_CHARS:
        return tab
    return str(getattr(request, "session_hash", None) or "no session")


class Memory:
    """The form of one page, kept in the browser's local storage whenever it changes."""

    def __init__(self, tab: str, fields: Mapping[str, Any], *, shows: str) -> None:
        """Keeps the fields under their names.

        Args:
            tab: of the page.
            shows: the parameter of the page's address that names what it has on show.
        """
        self._kept = gr.HTML(None, html_template="", js_on_load="", elem_classes="pg-none")
        names = {"key": f"pg-{tab}", "last": f"pg-{tab}-{shows}", "shows": shows}
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
        """Fill the form when the page is opened; changes are kept from then on.

        Args:
            fill: is given what was kept and the address's parameters, and returns updates of
                `outputs`. `foreign` among what was kept: the address names what this browser did
                not show last.

        Returns:
            The event, for what is to come after it.
        """

        def restore(kept: Any, request: gr.Request) -> Any:
            return fill(kept if isinstance(kept, dict) else {}, dict(request.query_params))

        js = READ_JS % self._js
        read = page.load(restore, self._kept, list(outputs), js=js, **QUIET)
        read.then(None, None, None, js=BEGIN_JS % self._js, **QUIET)
        return read

    @property
    def last_js(self) -> str:
        """JavaScript: the tab's identity, what the page had on show last in it and in any tab."""
        return LAST_JS % self._js


def is_anything(kept: Mapping[str, Any]) -> bool:
    """Whether a browser kept a form."""
    return bool(kept.keys() - {"foreign"})


def kept_text(kept: Mapping[str, Any], name: str, most: int) -> str:
    """A text of at most so many characters, else none."""
    text = kept.get(name)
    return text if isinstance(text, str) and len(text) <= most else ""


def kept_choice(kept: Mapping[str, Any], name: str, offered: Sequence[Any], first: Any) -> Any:
    """One of those that are offered, else the first."""
    value = kept.get(name)
    return value if value in offered else first


def kept_settings(form: Any, group: str, parse: Callable[[dict[str, Any]], Settings]) -> Any:
    """What a form's group held, without the fields that `parse` refuses today."""
    held = attempt(lambda: HeldForm.of(form).values.get(group, {}), where="a kept form")
    if isinstance(held, Fault):
        return {}

    def fits(name: str, value: Any) -> bool:
        return not isinstance(attempt(lambda: parse({name: value}), where=f"a kept {name}"), Fault)

    return {name: value for name, value in held.items() if fits(name, value)}
