"""Two example runs on the empty Generate page: the fastest method, and a draft tree."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import gradio as gr

from playground.host.catalog import Catalog
from playground.web.forms import UNQUEUED, Page, Updates, skip_on_fault


class Examples:
    """The row of buttons; the style sheet hides it once there is a run.

    Attributes:
        buttons: every button, and whether its example drafts a tree.
    """

    def __init__(self, catalog: Catalog, target: gr.Dropdown) -> None:
        self._catalog, self._target = catalog, target
        with gr.Row(elem_id="pg-examples"):
            gr.HTML("Or see an example run:", elem_id="pg-examples-about")
            fast = gr.Button("The fastest here", size="sm")
            self._tree = gr.Button(
                **self._about(target.value), size="sm", elem_id="pg-example-tree"
            )
        self.buttons = {fast: False, self._tree: True}

    def _about(self, target: Any) -> dict[str, Any]:
        """Text and visibility of the button for a draft tree on a target."""
        key = self._catalog.tree_method(target) if isinstance(target, str) else None
        if key is None:
            return {"value": "A draft tree", "visible": False}
        name = self._catalog.method(key).title.split(" for ")[0]
        return {"value": f"A draft tree ({name} as in the paper)", "visible": True}

    def listen(self, page: Page) -> None:
        """Fill in the page's form with the settings of an example when it is run."""

        @skip_on_fault("an example")
        def fill(draws_tree: bool, target: Any) -> Updates:
            return page.open(target, *self._method(target, draws_tree))

        for button, draws_tree in self.buttons.items():
            button.click(partial(fill, draws_tree), self._target, page.open_outputs, **UNQUEUED)
        self._target.change(
            lambda target: gr.update(**self._about(target)), self._target, self._tree, **UNQUEUED
        )

    def _method(self, target: Any, draws_tree: bool) -> tuple[str, dict[str, Any]]:
        """Method of an example, and the settings that differ from its own."""
        name = self._catalog.target(target).name
        tree = self._catalog.tree_method(name) if draws_tree else None
        return tree or self._catalog.first_method(name), {"drafting": "as set"} if tree else {}

    def request(self, draws_tree: bool, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Input of `read_request` for an example, from that of the page.

        Its prompt is the one in the box or else the first example prompt.
        """
        method, settings = self._method(raw["target"], draws_tree)
        return {
            **{name: raw[name] for name in ("target", "dtype", "mode")},
            "method": method,
            "prompt": str(raw["prompt"] or "").strip() or self._catalog.first_prompt(),
            "form": {"values": {"method": settings}},
        }
