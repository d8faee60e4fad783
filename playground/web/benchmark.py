"""The Benchmark page: suites on configurations, progress, tables, plots, downloads."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gradio as gr
import plotly

from engine.errors import ConfigError
from playground.experiments.bench.desk import BenchDesk
from playground.host.request import read_run_id
from playground.host.runner import EngineHost
from playground.web.components import static_text
from playground.web.panel_server import answer

SCRIPTS = (
    "dom.js",
    "benchmark_form.js",
    "benchmark_tables.js",
    "benchmark_plots.js",
    "benchmark_results.js",
    "benchmark.js",
)
QUESTIONS = (
    "menus",
    "methods",
    "fields",
    "add_file",
    "outlook",
    "start",
    "resume",
    "stop",
    "benchmarks",
    "look",
    "file",
)
"""Methods of `BenchDesk` that the page may call."""
PLOTLY = Path(plotly.__file__).parent / "package_data" / "plotly.min.js"
QUIET: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private", "queue": False}


class BenchmarkPage:
    """The page's one component; it fires `runs`, `tune` and `deploy`."""

    def __init__(self, host: EngineHost) -> None:
        gr.set_static_paths([PLOTLY])
        self.desk = BenchDesk(host)
        # A component of a tab that is opened later is not given its props: the address of plotly
        # travels in the script.
        given = f"const PLOTLY_URL = {json.dumps(f'gradio_api/file={PLOTLY}')};"
        self.board = gr.HTML(
            value={"open": None},
            html_template='<div class="bench"></div>',
            css_template=static_text("benchmark.css"),
            js_on_load=f"{given}\n{static_text(*SCRIPTS)}",
            apply_default_css=False,
            server_functions=[self._served(name) for name in QUESTIONS],
            elem_id="pg-bench",
        )

    def _served(self, name: str) -> Callable[[Any], dict[str, Any]]:
        ask: Callable[[Mapping[str, Any]], dict[str, Any]] = getattr(self.desk, name)

        def served(asked: Any) -> dict[str, Any]:
            def read() -> dict[str, Any]:
                if not isinstance(asked, Mapping):
                    raise ConfigError(f"The question must be a mapping, got {asked!r:.80}.")
                return ask(asked)

            return answer(read, where=f"the benchmark page ({name})")

        served.__name__ = name
        return served

    def listen_to_links(self, page: gr.Blocks, tabs: gr.Tabs) -> None:
        """Open the page for addresses with `benchmark`."""

        def load(request: gr.Request) -> tuple[Any, Any]:
            asked = dict(request.query_params).get("benchmark")
            if not asked:
                return gr.skip(), gr.skip()
            return gr.Tabs(selected="benchmark"), {"open": asked[:64]}

        page.load(load, None, [tabs, self.board], **QUIET)

    def listen(self, tabs: gr.Tabs, runs: gr.HTML, tree: gr.HTML, deploy: gr.HTML) -> None:
        """Take a benchmark to the Runs and Tree pages, and a configuration to the Deploy page."""

        def show_runs(event: gr.EventData = None) -> tuple[Any, Any]:  # type: ignore[assignment]
            benchmark_id, _ = _of(event)
            if benchmark_id is None:
                return gr.skip(), gr.skip()
            value = {"opened": None, "query": {"benchmark_id": benchmark_id}}
            return gr.Tabs(selected="runs"), {**value, "rev": secrets.token_urlsafe(6)}

        def tune(event: gr.EventData = None) -> tuple[Any, Any]:  # type: ignore[assignment]
            benchmark_id, target = _of(event)
            if benchmark_id is None:
                return gr.skip(), gr.skip()
            link = {"tree": "", "method": "", "target": target, "benchmark": benchmark_id}
            return gr.Tabs(selected="tree"), {"rev": secrets.token_urlsafe(6), "link": link}

        def hand_over(event: gr.EventData = None) -> tuple[Any, Any]:  # type: ignore[assignment]
            run_id, target = _of(event)
            if run_id is None:
                return gr.skip(), gr.skip()
            link = {"deploy": "", "version": "", "of": f"run:{run_id}", "target": target}
            return gr.Tabs(selected="deploy"), {"rev": secrets.token_urlsafe(6), "link": link}

        self.board.deploy(hand_over, None, [tabs, deploy], **QUIET)
        self.board.runs(show_runs, None, [tabs, runs], **QUIET)
        self.board.tune(tune, None, [tabs, tree], **QUIET)


def _of(event: gr.EventData | None) -> tuple[str | None, str]:
    """The benchmark or run that an event of the board is about, and the target; None without."""
    data = None if event is None else event._data
    if not isinstance(data, dict):
        return None, ""
    try:
        return read_run_id(data.get("id")), str(data.get("target", ""))[:200]
    except ConfigError:
        return None, ""
