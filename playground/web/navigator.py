"""Links between the pages, and what they load when the address is opened."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import gradio as gr

from playground.web.components import hidden_value, text_of
from playground.web.forms import RAW, UNQUEUED, Listener, SettingsForm, Updates

SWITCH_JS = """watch("value", () => document.dispatchEvent(
  new CustomEvent("pg-select", { detail: props.value?.tab })));"""


class Page(Protocol):
    """A page that links open: `open` returns updates of `open_outputs`. Raises ConfigError."""

    @property
    def open_outputs(self) -> Sequence[Any]: ...
    @property
    def open(self) -> Callable[..., Updates]: ...


class Navigator:
    """Opens pages. Links are connected once all pages exist, so that any may lead to any.

    Attributes:
        tabs: a component whose value, of `switch_to`, selects a page. Gradio's own `gr.Tabs` would
            do, but once it is the output of an event, Gradio copies the state of every component
            within it whenever any event reports progress: 50 ms of the browser's time for each
            message of a stream.
    """

    def __init__(self) -> None:
        self.tabs = hidden_value(js=SWITCH_JS)
        self._pages: Mapping[str, Page] = {}
        self._waiting: list[Callable[[gr.Blocks], Any]] = []

    def at_load(self, listen: Callable[[gr.Blocks], Any]) -> None:
        """Let a page listen to the loading of all pages.

        What it adds is outside the tabs: in one that was never opened, it would not be mounted.
        """
        self._waiting.append(listen)

    def link(
        self,
        event: Any,
        pages: Sequence[str],
        go: Listener,
        inputs: Any = None,
        *outputs: Any,
        then_js: str | None = None,
    ) -> None:
        """Let an event open one of these pages: `go` returns what `to` does, or other `outputs`."""

        def connect(_: gr.Blocks) -> None:
            parts = [part for name in pages for part in self._pages[name].open_outputs]
            opened = event(go, inputs, [self.tabs, *dict.fromkeys([*outputs, *parts])], **RAW)
            if then_js is not None:
                opened.then(None, js=then_js, **UNQUEUED)

        self._waiting.append(connect)

    def connect(self, blocks: gr.Blocks, pages: Mapping[str, Page]) -> None:
        """Connect all listeners; `pages` by the names of their tabs."""
        self._pages = pages
        for listen in self._waiting:
            listen(blocks)

    def to(self, page: str, **what: Any) -> Updates:
        """Updates that select a page and open something there. Raises ConfigError."""
        return {self.tabs: switch_to(page), **self._pages[page].open(**what)}

    @property
    def stay(self) -> Updates:
        """Updates that change nothing."""
        return {self.tabs: gr.skip()}

    def link_tree(self, form: SettingsForm, target: gr.Dropdown) -> None:
        """Let a form's choice tree be edited on the Tree page."""

        def go(choice: Any, target: Any) -> Updates:
            link = {**choice, "target": target} if isinstance(choice, dict) else {}
            names = ("tree", "method", "target")
            what = {name: str(link.get(name) or "") for name in names}
            return self.to("tree", **what) if what["tree"] else self.stay

        self.link(form.tree.change, ["tree"], go, [form.tree, target])

    def link_run(self, panel: gr.HTML) -> None:
        """Let token panels open the Compare page with a run's prompt, method and settings."""

        def go(event: gr.EventData = None) -> Updates:  # type: ignore[assignment]
            run = text_of(None if event is None else event._data, "run")
            return self.to("compare", run=run) if run else self.stay

        self.link(panel.compare, ["compare"], go)


def switch_to(tab: str) -> dict[str, Any]:
    """A value of `Navigator.tabs` that selects a page, as often as it is sent."""
    return {"tab": tab, "at": time.monotonic_ns()}
