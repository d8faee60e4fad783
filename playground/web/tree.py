"""The Tree page: edit a choice tree, see exact MAT and predicted tok/s, optimise it, use it."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

import gradio as gr

from engine.figures import TREE_FIGURES
from playground.errors import Fault
from playground.host.runner import EngineHost
from playground.trees.editor import REQUESTS, TreeEditor, TreeRequest, read_tree_choice
from playground.web.address import link_params
from playground.web.components import module_component, server_function, static_text
from playground.web.forms import UNQUEUED, Updates, on_fault
from playground.web.navigator import Navigator


class TreePage:
    """Component and listeners of the page.

    Attributes:
        open_outputs: components that `open` updates.
    """

    def __init__(self, host: EngineHost, nav: Navigator) -> None:
        self.catalog = host.catalog
        editor = TreeEditor(host)
        self.component = module_component(
            "tree/editor.js",
            template=static_text("tree/editor.html"),
            css=["tree/editor.css"],
            functions=[
                server_function(name, TreeRequest, getattr(editor, name)) for name in REQUESTS
            ],
            events=["use"],
            arguments={"figures": TREE_FIGURES},
            elem_id="pg-tree",
        )
        self.open_outputs = [self.component]
        nav.at_load(self._listen_to_load)
        self._listen_to_use(nav)

    def open(self, **link: str) -> Updates:
        """Updates of `open_outputs`: a `tree`, `method`, `target` or `benchmark`."""
        return {self.component: _link_value(link)}

    def _listen_to_load(self, page: gr.Blocks) -> None:
        """Open the tree in the URL."""

        def load(request: gr.Request) -> Any:
            link = read_link(request.query_params)
            return gr.skip() if link is None else _link_value(link)

        page.load(load, None, self.component, **UNQUEUED)

    def _listen_to_use(self, nav: Navigator) -> None:
        """Open another page with the tree in a method's settings."""

        def warn(fault: Fault) -> Any:
            gr.Warning(fault.sentence)
            return gr.skip()

        @on_fault(warn, where="using a tree")
        def use(event: gr.EventData = None) -> Any:  # type: ignore[assignment]
            data = {} if event is None else event._data
            if not isinstance(data, dict):
                return gr.skip()
            target, method, settings = read_tree_choice(self.catalog, data)
            page = "generate" if data.get("where") == "generate" else "compare"
            return nav.to(page, target=target, method=method, settings=settings)

        nav.link(self.component.use, ["generate", "compare"], use)


def _link_value(link: dict[str, str]) -> dict[str, Any]:
    return {"rev": secrets.token_urlsafe(6), "link": link}


def read_link(params: Mapping[str, str]) -> dict[str, str] | None:
    """The tree in a URL's parameters; None if they open another page."""
    link = link_params("tree", params)
    names = ("tree", "method", "target")
    return {name: link.get(name, "") for name in names} if link.get("tree") else None
