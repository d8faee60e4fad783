"""The page's own components: `gr.HTML` with a constant template, rendered by a module of `static/`.

Model text never enters a template: it is sent as JSON in `value`, and the modules put it into text
nodes. Values that come back are untrusted input, validated where they are read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar

import gradio as gr
import plotly
from pydantic import Field
from starlette.routing import BaseRoute, Mount
from starlette.staticfiles import StaticFiles

from engine.config import Settings
from engine.figures import FIGURES
from playground.errors import Fault, attempt
from playground.host.live import RunId
from playground.runs.reading import History

STATIC = Path(__file__).parent / "static"
Index = Annotated[int, Field(ge=0, le=10_000_000)]
Answer = dict[str, Any]
ServerFunction = Callable[[Any], Answer]
"""A function that a module calls as `server.name(question)`."""
Question = TypeVar("Question", bound=Settings)


def module_component(
    module: str,
    *,
    template: str,
    css: Sequence[str] = (),
    functions: Sequence[ServerFunction] = (),
    events: Sequence[str],
    arguments: dict[str, Any] | None = None,
    elem_id: str,
) -> gr.HTML:
    """A component rendered by a module's `mount(component, arguments)`.

    The arguments are part of the script, because a component in a tab that is opened later does not
    get the properties it was created with. The script names the `events` that the module triggers,
    because Gradio looks for them there.
    """
    address, triggers = json.dumps(module_address(module)), json.dumps(list(events))
    return gr.HTML(
        html_template=template,
        css_template=static_text("kit.css", *css),
        js_on_load=f"/* triggers {triggers} */ import(new URL({address}, document.baseURI)).then("
        "(module) => module.mount({ element, props, server, trigger, watch }, "
        f"{json.dumps(arguments or {})}));",
        apply_default_css=False,
        server_functions=list(functions),
        elem_id=elem_id,
    )


def hidden_value(value: Any = None, *, js: str = "") -> gr.HTML:
    """An invisible component that holds a value, plain JSON; `js` runs when it is mounted.

    With a `gr.State`, every tab would keep a connection open for as long as it is shown, and a
    browser has six of them for all tabs of a server.
    """
    return gr.HTML(value, html_template="", js_on_load=js, elem_classes="pg-none")


def text_of(value: Any, key: str) -> str:
    """The text under a key of a component's value; empty if there is none."""
    text = value.get(key) if isinstance(value, dict) else None
    return text if isinstance(text, str) else ""


def token_panels(
    history: History, *, placeholder: str, elem_id: str, tab: str | None = None
) -> gr.HTML:
    """Runs side by side: text with every token coloured, live figures, speedup and steps.

    Its value is a message of `host.stream`. It triggers `compare` with a run of the log and, with a
    `tab`, whose URL names the displayed run, `by_text` to run again drafting by text.
    """
    return module_component(
        "panel/panels.js",
        template='<div class="panels" data-count="1"></div>',
        css=["panel/panel.css"],
        functions=panel_functions(history),
        events=["begun", "compare", "by_text"],
        arguments={"figures": panel_figures(), "placeholder": placeholder, "tab": tab},
        elem_id=elem_id,
    )


def panel_figures() -> dict[str, tuple[str, str]]:
    """Titles and formulas of the figures of a run, for the modules."""
    return {
        name: (one.pair or one.title, one.formula) for name, one in FIGURES.items() if one.title
    }


@cache
def static_text(*names: str) -> str:
    """The text of files of `static/`, concatenated."""
    return "\n".join((STATIC / name).read_text(encoding="utf-8") for name in names)


# ---- functions that the modules call: questions validated by pydantic, answers as JSON


class RunQuestion(Settings):
    """A run; its events after the first `have`, the step `index`, or steps `first` to `last`."""

    run: RunId
    have: Index = 0
    index: Index = 0
    first: Index = 0
    last: Index = 0


def server_function(
    name: str, question: type[Question], answer: Callable[[Question], Answer]
) -> ServerFunction:
    """A function that modules call by this name; a fault is the answer `{"error": sentence}`."""

    def call(raw: Any) -> Answer:
        result = attempt(lambda: answer(question.parse(raw)), where=f"the page's request {name}")
        return {"error": result.sentence} if isinstance(result, Fault) else result

    call.__name__ = name
    return call


def panel_functions(history: History) -> list[ServerFunction]:
    """Functions for token panels: `since` (events that were lost), `step`, `steps`, `trace`."""

    answers: dict[str, Callable[[RunQuestion], Answer]] = {
        "since": lambda q: history.since(q.run, q.have),
        "step": lambda q: history.step(q.run, q.index),
        "steps": lambda q: history.steps(q.run, q.first, q.last),
        "trace": lambda q: history.trace(q.run),
    }
    return [server_function(name, RunQuestion, answer) for name, answer in answers.items()]


# ---- modules: served beside the page, under a URL that changes with their content


@cache
def modules_hash() -> str:
    """Hash of all modules and of the plotly version that they load."""
    digest = hashlib.sha256(plotly.__version__.encode())
    for file in sorted(STATIC.rglob("*.js")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def module_address(module: str) -> str:
    """URL of a module, relative to the page."""
    return f"modules/{modules_hash()}/{module}"


def module_route() -> BaseRoute:
    """Route of the modules, with plotly beside them."""
    modules = StaticFiles(directory=STATIC, packages=[("plotly", "package_data")])
    return Mount(f"/modules/{modules_hash()}", modules)
