"""The Tree page: edit a choice tree, see its exact MAT and predicted tok/s, optimise, use it."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from typing import Any

import gradio as gr

from playground.errors import Fault, attempt
from playground.host.runner import EngineHost
from playground.trees.editor import QUESTIONS, TreeEditor, ask
from playground.trees.methods import TreeChoice, read_tree_choice
from playground.web.address import link_to, switch_to
from playground.web.compare import ComparePage
from playground.web.components import drawn_by, static_text
from playground.web.forms import QUIET, RAW, SettingsForm
from playground.web.generate import GeneratePage
from playground.web.rpc import answered

LINK_CHARS = 80_000


class TreePage:
    """Component and listeners of the page."""

    def __init__(self, host: EngineHost) -> None:
        self.catalog = host.catalog
        self.editor = TreeEditor(host)
        self.component = drawn_by(
            "tree/editor.js",
            template=static_text("tree/editor.html"),
            css=["tree/editor.css"],
            functions=[self._served(name) for name in QUESTIONS],
            events=["use"],
            value={"rev": "", "link": None},
            elem_id="pg-tree",
        )

    def _served(self, name: str) -> Callable[[Any], dict[str, Any]]:
        def served(request: Any) -> dict[str, Any]:
            return answered(
                lambda: ask(self.editor, name, request), where=f"the tree editor ({name})"
            )

        served.__name__ = name
        return served

    def listen_to_links(self, page: gr.Blocks) -> None:
        """Open the tree of the address."""

        def load(request: gr.Request) -> Any:
            link = read_link(request.query_params)
            return gr.skip() if link is None else {"rev": secrets.token_urlsafe(6), "link": link}

        page.load(load, None, self.component, **QUIET)

    def listen_to_use(self, tabs: gr.HTML, generate: GeneratePage, compare: ComparePage) -> None:
        """Put the tree into the settings of a method on another page, and go there."""
        places = {
            "generate": [generate.target, generate.method, generate.form.spec],
            "compare": [compare.target, compare.methods[0], compare.forms[0].spec],
        }

        def use(where: str, event: gr.EventData | None) -> list[Any]:
            data = {} if event is None else event._data
            if not isinstance(data, dict) or data.get("where") != where:
                return [gr.skip()] * 4
            filled = attempt(
                lambda: fill(where, read_tree_choice(self.catalog, data)), where="using a tree"
            )
            if isinstance(filled, Fault):
                gr.Warning(filled.sentence)
                return [gr.skip()] * 4
            return [switch_to(where), *filled]

        def fill(where: str, used: TreeChoice) -> tuple[Any, ...]:
            if where == "generate":
                return generate.form_values.of_method(used.target, used.method, used.settings)
            choices = compare.host.menu.choices(used.target)
            return used.target, gr.update(choices=choices, value=used.method), used.form

        def use_in_generate(event: gr.EventData = None) -> list[Any]:  # type: ignore[assignment]
            return use("generate", event)

        def use_in_compare(event: gr.EventData = None) -> list[Any]:  # type: ignore[assignment]
            return use("compare", event)

        for name, handler in (("generate", use_in_generate), ("compare", use_in_compare)):
            self.component.use(handler, None, [tabs, *places[name]], **QUIET)

    def listen_to_forms(self, tabs: gr.HTML, target: Any, method: Any, form: SettingsForm) -> None:
        """Open the choice tree of a form; `method`: picker of its method, if it has one."""

        def show(choice: Any, target: Any, *picked: Any) -> tuple[Any, Any]:
            choice = choice if isinstance(choice, dict) else {}
            link = {"tree": choice.get("tree"), "target": target}
            link["method"] = picked[0] if picked else choice.get("method")
            texts = {name: str(value)[:LINK_CHARS] for name, value in link.items() if value}
            opened = read_link(texts)
            if opened is None:
                return gr.skip(), gr.skip()
            return switch_to("tree"), {"rev": secrets.token_urlsafe(6), "link": opened}

        pickers = [target] if method is None else [target, method]
        form.tree.change(show, [form.tree, *pickers], [tabs, self.component], **RAW)


def read_link(params: Mapping[str, str]) -> dict[str, str] | None:
    """The tree of an address; None for that of another page."""
    link = link_to("tree", params)
    tree = link.get("tree")
    if not tree:
        return None
    link = {name: link.get(name, "")[:200] for name in ("method", "target")}
    return {**link, "tree": tree[:LINK_CHARS]}
