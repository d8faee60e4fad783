"""The page's own components: `gr.HTML` with a constant template, drawn by a module of `static/`.

Model text never enters a template: it travels as JSON in `value`, and the modules put it into text
nodes. Values that come back are input from outside, and are checked where they are read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import gradio as gr
import plotly
from starlette.responses import FileResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from engine.metrics import FORMULAS
from playground.host.stream import History
from playground.web.rpc import Served, panel_functions

STATIC = Path(__file__).parent / "static"
PLOTLY = Path(plotly.__file__).parent / "package_data" / "plotly.min.js"
FOREVER = {"cache-control": "public, max-age=31536000, immutable"}
"""The address of a module contains the hash of them all, so its content never changes."""


def drawn_by(
    module: str,
    *,
    template: str,
    css: Sequence[str],
    functions: Sequence[Served] = (),
    events: Sequence[str] = (),
    arguments: dict[str, Any] | None = None,
    value: Any = None,
    elem_id: str,
) -> gr.HTML:
    """A component drawn by a module's `mount(component, arguments)`.

    The arguments are in the script itself: a component in a tab that is opened later does not get
    the properties that it was created with. Gradio finds the `events` that a module triggers by
    their names in the script.
    """
    address, triggers = json.dumps(module_address(module)), json.dumps(list(events))
    return gr.HTML(
        value=value,
        html_template=template,
        css_template=static_text("kit.css", *css),
        js_on_load=f"/* triggers {triggers} */ import(new URL({address}, document.baseURI)).then("
        "(module) => module.mount({ element, props, server, trigger, watch }, "
        f"{json.dumps(arguments or {})}));",
        apply_default_css=False,
        server_functions=list(functions),
        elem_id=elem_id,
    )


def token_panels(
    history: History, *, placeholder: str, elem_id: str, tab: str | None = None
) -> gr.HTML:
    """Runs side by side: text with every token coloured, live figures, the speedup, the steps.

    Its value is a message of `host.stream`; it triggers `compare` with a run of the log, and on a
    page with a `tab`, whose address names the displayed run, `by_text` to draft by text instead.
    """
    return drawn_by(
        "panel/panels.js",
        template='<div class="panels" data-count="1"></div>',
        css=["panel/panel.css"],
        functions=panel_functions(history),
        events=["begun", "compare", "by_text"],
        arguments={"formulas": FORMULAS, "placeholder": placeholder, "compares": True, "tab": tab},
        elem_id=elem_id,
    )


@cache
def static_text(*names: str) -> str:
    """Files of `static/`, one after another."""
    return "\n".join((STATIC / name).read_text(encoding="utf-8") for name in names)


# ---- modules: served beside the page, under an address that changes with them


@cache
def modules_hash() -> str:
    """Hash of all modules and of the plotly version that they load."""
    digest = hashlib.sha256(plotly.__version__.encode())
    for file in sorted(STATIC.rglob("*.js")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def module_address(module: str) -> str:
    """Address of a module, relative to the page."""
    return f"modules/{modules_hash()}/{module}"


class Modules(StaticFiles):
    """The modules, which browsers may cache for ever."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        response = super().file_response(*args, **kwargs)
        response.headers.update(FOREVER)
        return response

    async def get_response(self, path: str, scope: Scope) -> Response:
        if not path.endswith(".js"):
            return Response(status_code=404)
        return await super().get_response(path, scope)


def module_routes() -> list[BaseRoute]:
    """Routes of the modules, and of plotly beside them."""
    root = f"/modules/{modules_hash()}"

    def plotly_script(_: Any) -> Response:
        return FileResponse(PLOTLY, media_type="text/javascript", headers=FOREVER)

    return [Route(f"{root}/plotly.min.js", plotly_script), Mount(root, Modules(directory=STATIC))]
