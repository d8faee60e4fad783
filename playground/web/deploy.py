"""The Deploy page: a run or a method as other engines take it, and their configs read back."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from typing import Any

import gradio as gr

from engine.errors import ConfigError
from playground.errors import Fault, attempt
from playground.host.runner import EngineHost
from playground.web.components import static_text
from playground.web.deploy_desk import DeployDesk
from playground.web.generate import GeneratePage
from playground.web.panel_server import answer

SCRIPTS = ("dom.js", "deploy_parts.js", "deploy_import.js", "deploy.js")
QUESTIONS = ("menus", "methods", "look", "matrix", "read")
"""Methods of `DeployDesk` that the page may call."""
LINK = ("deploy", "of", "target", "version")
"""Parameters of an address that opens the page: engine, `run:ID` or `method:KEY`, and the rest."""
OTHER_PAGES = ("run", "runs", "tree", "compare", "benchmark", "sweep")
MAX_CHARS = 200
QUIET: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private", "queue": False}


class DeployPage:
    """The page's one component; it fires `use` with a config to try on the Generate page."""

    def __init__(self, host: EngineHost) -> None:
        self.desk = DeployDesk(host.log, host.catalog)
        self.board = gr.HTML(
            value={"link": None},
            html_template='<div class="deploy"></div>',
            css_template=static_text("deploy.css"),
            js_on_load=static_text(*SCRIPTS),
            apply_default_css=False,
            server_functions=[self._served(name) for name in QUESTIONS],
            elem_id="pg-deploy",
        )

    def _served(self, name: str) -> Callable[[Any], dict[str, Any]]:
        ask: Callable[[Mapping[str, Any]], dict[str, Any]] = getattr(self.desk, name)

        def served(asked: Any) -> dict[str, Any]:
            def read() -> dict[str, Any]:
                if not isinstance(asked, Mapping):
                    raise ConfigError(f"The question must be a mapping, got {asked!r:.80}.")
                return ask(asked)

            return answer(read, where=f"the Deploy page ({name})")

        served.__name__ = name
        return served

    def listen_to_links(self, page: gr.Blocks, tabs: gr.Tabs) -> None:
        """Open the page for addresses with `deploy`."""

        def load(request: gr.Request) -> tuple[Any, Any]:
            link = read_link(dict(request.query_params))
            if link is None:
                return gr.skip(), gr.skip()
            return gr.Tabs(selected="deploy"), {"link": link, "rev": secrets.token_urlsafe(6)}

        page.load(load, None, [tabs, self.board], **QUIET)

    def listen_to_use(self, tabs: gr.Tabs, generate: GeneratePage) -> None:
        """Take a config that was read to the Generate page."""

        def use(target: Any, event: gr.EventData = None) -> list[Any]:  # type: ignore[assignment]
            data = None if event is None else event._data
            filled = attempt(
                lambda: generate.take(*self.desk.used(_mapping(data), target)),
                where="using a config",
            )
            if isinstance(filled, Fault):
                gr.Warning(filled.sentence)
                return [gr.skip()] * 4
            return [gr.Tabs(selected="generate"), *filled]

        outputs = [tabs, generate.target, generate.method, generate.form]
        self.board.use(use, generate.target, outputs, **QUIET)


def _mapping(data: Any) -> Mapping[str, Any]:
    if not isinstance(data, Mapping):
        raise ConfigError(f"The request must have engine and text, got {data!r:.80}.")
    return data


def read_link(params: Mapping[str, str]) -> dict[str, str] | None:
    """What an address with `deploy` opens; None for any other, and where another page is meant."""
    if not params.get("deploy") or any(params.get(name) for name in OTHER_PAGES):
        return None
    return {name: params.get(name, "")[:MAX_CHARS] for name in LINK}
