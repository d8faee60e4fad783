"""Two example runs on the empty Generate page: the fastest method, and a draft tree."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import gradio as gr

from playground.errors import Fault, attempt
from playground.host.catalog import Catalog
from playground.host.stream import refusal
from playground.web.forms import QUEUED, UNQUEUED, Page, Updates, skip_on_fault
from playground.web.memory import chat_of

RunStarter = Callable[[gr.Request, dict[str, Any], Any, Any], AsyncIterator[dict[str, Any]]]
"""Starts a run and yields its messages; takes request, input of `read_request`, panel and tab."""


class Examples:
    """The row of buttons; the style sheet hides it once there is a run."""

    def __init__(self, catalog: Catalog, target: gr.Dropdown) -> None:
        self._catalog, self._target = catalog, target
        with gr.Row(elem_id="pg-examples"):
            gr.HTML("Or see an example run:", elem_id="pg-examples-about")
            self._fast = gr.Button("The fastest here", size="sm")
            self._tree = gr.Button(
                **self._about(target.value), size="sm", elem_id="pg-example-tree"
            )

    def _about(self, target: Any) -> dict[str, Any]:
        """Text and visibility of the button for a draft tree on a target."""
        key = self._catalog.tree_method(target) if isinstance(target, str) else None
        if key is None:
            return {"value": "A draft tree", "visible": False}
        name = self._catalog.method(key).title.split(" for ")[0]
        return {"value": f"A draft tree ({name} as in the paper)", "visible": True}

    def listen(
        self, page: Page, start: RunStarter, inputs: Sequence[Any], panel: gr.HTML
    ) -> list[Any]:
        """Run an example in the panel and fill in the page's form; returns the streaming events.

        Args:
            start: starts the run of an example.
            inputs: target, dtype, mode, prompt, panel, tab.
        """
        streams = []
        for button, draws_tree in ((self._fast, False), (self._tree, True)):
            run, fill = self._listeners(page, start, draws_tree)
            streams.append(button.click(run, inputs, panel, **QUEUED))
            button.click(fill, self._target, page.open_outputs, **UNQUEUED)
        self._target.change(
            lambda target: gr.update(**self._about(target)), self._target, self._tree, **UNQUEUED
        )
        return streams

    def _listeners(
        self, page: Page, start: RunStarter, draws_tree: bool
    ) -> tuple[Callable[..., AsyncIterator[dict[str, Any]]], Callable[[Any], Any]]:
        def example(target: Any) -> tuple[str, dict[str, Any]]:
            """Method of the example, and the settings that differ from its own."""
            name = self._catalog.target(target).name
            tree = self._catalog.tree_method(name) if draws_tree else None
            return tree or self._catalog.first_method(name), {"drafting": "as set"} if tree else {}

        async def run(request: gr.Request, *values: Any) -> AsyncIterator[dict[str, Any]]:
            """Stream an example, on the prompt in the box or else the first example prompt."""
            target, dtype, mode, prompt, panel, tab = values
            chosen = attempt(lambda: example(target), where="an example")
            if isinstance(chosen, Fault):
                yield refusal(chosen.sentence, chat_of(panel))
                return
            raw = {
                "target": target,
                "dtype": dtype,
                "method": chosen[0],
                "mode": mode,
                "prompt": str(prompt or "").strip() or self._catalog.first_prompt(),
                "form": {"values": {"method": chosen[1]}},
            }
            async for message in start(request, raw, panel, tab):
                yield message

        @skip_on_fault("an example")
        def fill(target: Any) -> Updates:
            return page.open(target, *example(target))

        return run, fill
