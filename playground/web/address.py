"""The page's URL: which tab it opens, and its parameters. `static/address.js` keeps it up to date.

If `tab` names the tab, all other parameters are that tab's; a permalink selects its tab by the
name of its first parameter.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

PERMALINKS = ("compare", "tree", "benchmark", "sweep", "train", "deploy")
"""Parameters that open the tab of the same name; `run` and `runs` open Runs."""
ADDRESS_JS = """(...values) => {
  const query = Object.fromEntries(%(names)s.map((name, i) => [name, values[i]]));
  document.dispatchEvent(new CustomEvent("pg-address", { detail: { tab: %(tab)s, query } }));
  return [];
}"""


def tab_of(query: Mapping[str, str]) -> str:
    """The tab that an address opens."""
    if tab := query.get("tab"):
        return tab
    if "run" in query or query.get("runs"):
        return "runs"
    return next((tab for tab in PERMALINKS if query.get(tab)), "generate")


def link_params(tab: str, query: Mapping[str, str]) -> dict[str, str]:
    """The parameters of a URL that opens a tab; empty for the URL of another tab."""
    params = {name: value for name, value in query.items() if name not in ("tab", "__theme")}
    return params if tab_of(query) == tab else {}


def address_js(tab: str, *names: str) -> str:
    """JavaScript that writes values into the URL of a tab as these parameters."""
    return ADDRESS_JS % {"tab": json.dumps(tab), "names": json.dumps(names)}
