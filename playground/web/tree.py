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
from playground.web.address import link_params, switch_to
from playground.web.components import module_component, server_function, static_text
from playground.web.forms import RAW, UNQUEUED, Page, SettingsForm, Updates, on_fault


class TreePage:
    """Component and listeners of the page.

    Attributes:
        open_outputs: components that `open` updates.
    """

    def __init__(self, host: EngineHost, tabs: gr.HTML) -> None:
        """`tabs` selects a page."""
        self.catalog, self.tabs = host.catalog, tabs
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
        self.open_outputs = [tabs, self.component]

    def open(self, **link: str) -> Updates:
        """Updates of `open_outputs`: this page with a `tree`, `method`, `target` or `benchmark`."""
        return {self.tabs: switch_to("tree"), self.component: _link_value(link)}

    def listen_to_links(self, page: gr.Blocks) -> None:
        """Open the tree in the URL."""

        def load(request: gr.Request) -> Any:
            link = read_link(request.query_params)
            return gr.skip() if link is None else _link_value(link)

        page.load(load, None, self.component, **UNQUEUED)

    def listen_to_use(self, generate: Page, compare: Page) -> None:
        """Open another page with the tree in a method's settings."""

        def warn(fault: Fault) -> Any:
            gr.Warning(fault.sentence)
            return gr.skip()

        @on_fault(warn, where="using a tree")
        def use(event: gr.EventData = None) -> Any:  # type: ignore[assignment]
            data = {} if event is None else event._data
            if not isinstance(data, dict):
                return gr.skip()
            page = generate if data.get("where") == "generate" else compare
            return page.open(*read_tree_choice(self.catalog, data))

        outputs = dict.fromkeys([*generate.open_outputs, *compare.open_outputs])
        self.component.use(use, None, list(outputs), **UNQUEUED)

    def listen_to_form(self, form: SettingsForm, target: gr.Dropdown) -> None:
        """Open the choice tree of a form."""

        def show(choice: Any, target: Any) -> Updates:
            choice = {**choice, "target": target} if isinstance(choice, dict) else {}
            link = read_link({name: str(value) for name, value in choice.items() if value})
            return {self.tabs: gr.skip()} if link is None else self.open(**link)

        form.tree.change(show, [form.tree, target], self.open_outputs, **RAW)


def _link_value(link: dict[str, str]) -> dict[str, Any]:
    return {"rev": secrets.token_urlsafe(6), "link": link}


def read_link(params: Mapping[str, str]) -> dict[str, str] | None:
    """The tree in a URL's parameters; None if they open another page."""
    link = link_params("tree", params)
    names = ("tree", "method", "target")
    return {name: link.get(name, "") for name in names} if link.get("tree") else None
