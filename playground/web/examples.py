"""Two example runs by one click, on the empty Generate page: the fastest, and a draft tree."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any

import gradio as gr

from playground.errors import Fault, attempt
from playground.host.catalog import Catalog
from playground.host.stream import refusal
from playground.web.forms import QUEUED, QUIET, or_skip
from playground.web.memory import chat_of

Begin = Callable[[gr.Request, dict[str, Any], Any, Any], AsyncIterator[dict[str, Any]]]
"""Begins a run, and yields its messages: request, input of `read_request`, panel, tab."""


def example_of(catalog: Catalog, target: Any, *, draws_tree: bool) -> tuple[str, dict[str, Any]]:
    """Method of an example, and the settings that differ from its own; a tree is drafted as set.

    Raises ConfigError: the target is not offered here.
    """
    name = catalog.target(target).name
    tree = catalog.tree_method(name) if draws_tree else None
    return tree or catalog.first_method(name), {"drafting": "as set"} if tree else {}


class Examples:
    """The row of buttons; the style sheet hides it once there is a run."""

    def __init__(self, catalog: Catalog, target: gr.Dropdown) -> None:
        self._catalog, self._target = catalog, target
        with gr.Row(elem_id="pg-examples"):
            gr.HTML("Or see an example run:", elem_id="pg-examples-about")
            self._fast = gr.Button("The fastest here", size="sm", elem_id="pg-example-fast")
            self._tree = gr.Button(
                **self._about(target.value), size="sm", elem_id="pg-example-tree"
            )

    def _about(self, target: Any) -> dict[str, Any]:
        """Text and visibility of the button that shows a draft tree on a target."""
        key = self._catalog.tree_method(target) if isinstance(target, str) else None
        if key is None:
            return {"value": "A draft tree", "visible": False}
        name = self._catalog.method(key).title.split(" for ")[0]
        return {"value": f"A draft tree ({name} as in the paper)", "visible": True}

    def listen(
        self,
        inputs: Sequence[Any],
        panel: gr.HTML,
        filled: Sequence[Any],
        *,
        take: Callable[[str, str, dict[str, Any]], Any],
        begin: Begin,
    ) -> list[Any]:
        """Run an example in the panel, and fill the form with it; returns the events that stream.

        Args:
            inputs: target, dtype, mode, prompt, panel, tab.
            filled: target, method and form, whose values `take` returns.
        """

        def fill(draws_tree: bool, target: Any) -> Any:
            def values() -> Any:
                return take(target, *example_of(self._catalog, target, draws_tree=draws_tree))

            return or_skip(values, where="an example", outputs=len(filled))

        def running(draws_tree: bool) -> Callable[..., AsyncIterator[dict[str, Any]]]:
            async def run_example(request: gr.Request, *values: Any) -> Any:
                async for message in self._run(begin, request, values, draws_tree=draws_tree):
                    yield message

            return run_example

        streams = []
        for button, draws_tree in ((self._fast, False), (self._tree, True)):
            run = running(draws_tree)
            streams.append(button.click(run, inputs, panel, concurrency_limit=None, **QUEUED))
            button.click(partial(fill, draws_tree), self._target, list(filled), **QUIET)
        self._target.change(
            lambda target: gr.update(**self._about(target)), self._target, self._tree, **QUIET
        )
        return streams

    async def _run(
        self, begin: Begin, request: gr.Request, values: tuple[Any, ...], *, draws_tree: bool
    ) -> AsyncIterator[dict[str, Any]]:
        """Stream an example, on the prompt in the box or on one that drafts well."""
        target, dtype, mode, prompt, panel, tab = values
        example = attempt(
            lambda: example_of(self._catalog, target, draws_tree=draws_tree), where="an example"
        )
        if isinstance(example, Fault):
            yield refusal(example.sentence, chat_of(panel))
            return
        raw = {
            "target": target,
            "dtype": dtype,
            "method": example[0],
            "mode": mode,
            "prompt": str(prompt or "").strip() or self._catalog.first_prompt(),
            "form": {"values": {"method": example[1]}},
        }
        async for message in begin(request, raw, panel, tab):
            yield message
