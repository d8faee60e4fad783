"""The page's address: which tab it opens, and with what. `static/address.js` follows the tabs.

A tab named by `tab` has the rest of the parameters to itself; a permalink names its tab by the
first parameter alone.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

import gradio as gr

PERMALINKS = ("compare", "tree", "benchmark", "sweep", "train", "deploy")
"""Parameters that open the tab of the same name. `run` opens Runs, and `runs` Runs or Compare."""
ADDRESS_JS = """(...values) => {
  const query = Object.fromEntries(%(names)s.map((name, i) => [name, values[i]]));
  document.dispatchEvent(new CustomEvent("pg-address", { detail: { tab: %(tab)s, query } }));
  return [];
}"""

SWITCH_JS = """watch("value", () => document.dispatchEvent(
  new CustomEvent("pg-select", { detail: props.value?.tab })));"""


def tab_switch() -> gr.HTML:
    """A component whose value selects a tab: what `switch_to` returns.

    Gradio's own `gr.Tabs` would do; but once it has been the output of an event, Gradio copies the
    state of every component within it whenever any event reports progress: 50 ms of the browser's
    time for each message of a stream.
    """
    return gr.HTML(None, html_template="", js_on_load=SWITCH_JS, elem_classes="pg-none")


def switch_to(tab: str) -> dict[str, Any]:
    """A value of `tab_switch` that selects a tab, as often as it is sent."""
    return {"tab": tab, "at": time.monotonic_ns()}


def tab_of(query: Mapping[str, str]) -> str:
    """The tab that an address opens."""
    if tab := query.get("tab"):
        return tab
    if "run" in query:
        return "runs"
    if runs := query.get("runs"):
        return "runs" if runs.startswith("{") else "compare"
    return next((tab for tab in PERMALINKS if query.get(tab)), "generate")


def link_to(tab: str, query: Mapping[str, str]) -> dict[str, str]:
    """The parameters of an address that opens a tab; empty for an address of another tab."""
    own = {name: value for name, value in query.items() if name not in ("tab", "__theme")}
    return own if tab_of(query) == tab else {}


def address_js(tab: str, *names: str) -> str:
    """JavaScript that writes values into the address of a tab as these parameters."""
    return ADDRESS_JS % {"tab": json.dumps(tab), "names": json.dumps(names)}
