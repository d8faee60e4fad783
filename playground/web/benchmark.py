"""The Benchmark page: suites on configurations, progress, tables, plots, downloads."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gradio as gr
import plotly

from engine.config import Limits, Sampling
from engine.errors import ConfigError
from playground.deploy import Question
from playground.experiments.benchmarks import Benchmarks, Extent
from playground.experiments.plan import BASELINE
from playground.experiments.report.report import FORMULAS
from playground.experiments.report.statistics import LATENCY_ROWS
from playground.experiments.suites import GROUPS, in_order, items_of
from playground.host.catalog import Catalog
from playground.host.controls import controls_of
from playground.host.request import DTYPES, read_run_id
from playground.host.runner import EngineHost
from playground.runs.query import TableQuery
from playground.web.components import static_text
from playground.web.deploy import DeployPage, Updates
from playground.web.panel_server import answer
from playground.web.runs import RunsPage
from presets import PromptSuite

SCRIPTS = (
    "dom.js",
    "benchmark_form.js",
    "benchmark_tables.js",
    "benchmark_plots.js",
    "benchmark_results.js",
    "benchmark.js",
)
PLOTLY = Path(plotly.__file__).parent / "package_data" / "plotly.min.js"
QUIET: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private", "queue": False}


class BenchmarkPage:
    """The page's one component; it fires `runs`, `tune` and `deploy`."""

    def __init__(self, host: EngineHost) -> None:
        gr.set_static_paths([PLOTLY])
        self.benchmarks = Benchmarks(host)
        # A component of a tab that is opened later is not given its props: the address of plotly
        # travels in the script.
        given = f"const PLOTLY_URL = {json.dumps(f'gradio_api/file={PLOTLY}')};"
        self.board = gr.HTML(
            value={"open": None},
            html_template='<div class="bench"></div>',
            css_template=static_text("benchmark.css"),
            js_on_load=f"{given}\n{static_text(*SCRIPTS)}",
            apply_default_css=False,
            server_functions=served(host.catalog, self.benchmarks),
            elem_id="pg-bench",
        )

    def listen_to_links(self, page: gr.Blocks, tabs: gr.Tabs) -> None:
        """Open the page for addresses with `benchmark`."""

        def load(request: gr.Request) -> tuple[Any, Any]:
            asked = dict(request.query_params).get("benchmark")
            if not asked:
                return gr.skip(), gr.skip()
            return gr.Tabs(selected="benchmark"), {"open": asked[:64]}

        page.load(load, None, [tabs, self.board], **QUIET)

    def listen(self, tabs: gr.Tabs, runs: RunsPage, tree: gr.HTML, deploy: DeployPage) -> None:
        """Take a benchmark to the Runs and Tree pages, and a configuration to the Deploy page."""

        def show_runs(event: gr.EventData = None) -> list[Any]:  # type: ignore[assignment]
            benchmark_id, _ = _of(event)
            if benchmark_id is None:
                return [gr.skip()] * (1 + len(runs.shown))
            query = TableQuery(benchmark_id=benchmark_id)
            return [gr.Tabs(selected="runs"), *runs.restored(query)]

        def tune(event: gr.EventData = None) -> tuple[Any, Any]:  # type: ignore[assignment]
            benchmark_id, target = _of(event)
            if benchmark_id is None:
                return gr.skip(), gr.skip()
            link = {"tree": "", "method": "", "target": target, "benchmark": benchmark_id}
            return gr.Tabs(selected="tree"), {"rev": secrets.token_urlsafe(6), "link": link}

        def hand_over(event: gr.EventData = None) -> Updates:  # type: ignore[assignment]
            run_id, _ = _of(event)
            if run_id is None:
                return {tabs: gr.skip()}
            return {tabs: gr.Tabs(selected="deploy"), **deploy.open(Question(run=run_id))}

        self.board.deploy(hand_over, None, [tabs, *deploy.outputs], **QUIET)
        self.board.runs(show_runs, None, [tabs, *runs.shown], **QUIET)
        self.board.tune(tune, None, [tabs, tree], **QUIET)


FIRST_SUITE = "quick"
FIRST_METHODS = ("ngram", "suffix")
Served = Callable[[Any], dict[str, Any]]


def served(catalog: Catalog, benchmarks: Benchmarks) -> list[Served]:
    """What the page's scripts ask."""

    def methods(asked: Mapping[str, Any]) -> dict[str, Any]:
        return {"methods": method_menu(catalog, asked.get("target"))}

    def fields(asked: Mapping[str, Any]) -> dict[str, Any]:
        method = catalog.method(asked.get("method"))
        return {
            "title": method.title,
            "summary": method.summary,
            "lossless": method.config.lossless,
            "fields": controls_of(method.config),
        }

    def add_file(asked: Mapping[str, Any]) -> dict[str, Any]:
        key = benchmarks.add_file(_text(asked, "name"), _text(asked, "text"))
        return _suite_entry(key, benchmarks.suites[key])

    def outlook(asked: Mapping[str, Any]) -> dict[str, Any]:
        plan = benchmarks.plan(asked)
        return {
            "num_prompts": len(plan.items),
            "num_configurations": len(plan.configurations),
            "num_repeats": plan.repeats,
            "num_requests": plan.num_requests,
        }

    def start(asked: Mapping[str, Any]) -> dict[str, Any]:
        return {"id": benchmarks.start(asked)}

    def resume(asked: Mapping[str, Any]) -> dict[str, Any]:
        benchmarks.resume(read_run_id(asked.get("id")))
        return {}

    def stop(asked: Mapping[str, Any]) -> dict[str, Any]:
        benchmarks.stop(read_run_id(asked.get("id")))
        return {}

    def newest(asked: Mapping[str, Any]) -> dict[str, Any]:
        return {"benchmarks": benchmarks.newest()}

    def look(asked: Mapping[str, Any]) -> dict[str, Any]:
        return benchmarks.look(read_run_id(asked.get("id")), asked.get("have"))

    def file(asked: Mapping[str, Any]) -> dict[str, Any]:
        benchmark_id, name = read_run_id(asked.get("id")), asked.get("name")
        text = benchmarks.file(benchmark_id, name)
        return {"name": f"benchmark-{benchmark_id}-{name}", "text": text}

    def menus(asked: Mapping[str, Any]) -> dict[str, Any]:
        return _menus(catalog, benchmarks)

    asks = (menus, methods, fields, add_file, outlook, start, resume, stop, look, file)
    return [*(_answering(ask.__name__, ask) for ask in asks), _answering("benchmarks", newest)]


def _answering(name: str, ask: Callable[[Mapping[str, Any]], dict[str, Any]]) -> Served:
    def answering(asked: Any) -> dict[str, Any]:
        def read() -> dict[str, Any]:
            if not isinstance(asked, Mapping):
                raise ConfigError(f"The question must be a mapping, got {asked!r:.80}.")
            return ask(asked)

        return answer(read, where=f"the benchmark page ({name})")

    answering.__name__ = name
    return answering


def _menus(catalog: Catalog, benchmarks: Benchmarks) -> dict[str, Any]:
    """Everything that does not depend on target and method."""
    suites = catalog.suites
    return {
        "targets": [list(choice) for choice in catalog.target_choices()],
        "dtypes": list(DTYPES),
        "suites": [_suite_entry(key, suite) for key, suite in benchmarks.suites.items()],
        "first_suite": FIRST_SUITE if FIRST_SUITE in suites else next(iter(suites)),
        "first_methods": [name for name in FIRST_METHODS if name in catalog.presets],
        "extent": controls_of(Extent()),
        "limits": controls_of(Limits(max_new_tokens=128), skip=("stop",)),
        "sampling": controls_of(Sampling()),
        "formulas": FORMULAS,
        "latency_rows": {key: list(row) for key, row in LATENCY_ROWS.items()},
    }


def _suite_entry(key: str, suite: PromptSuite) -> dict[str, Any]:
    """A suite as the form lists it."""
    items = items_of(suite)
    groups = in_order(item.group for item in items)
    return {
        "key": key,
        "title": suite.title,
        "description": suite.description,
        "num_prompts": len(items),
        "groups": [[group, GROUPS.get(group, group)] for group in groups],
    }


def method_menu(catalog: Catalog, target: object) -> list[list[str]]:
    """Methods that fit a target, plain decoding left out: title and key."""
    name = catalog.target(target).name
    return [
        [title, key]
        for title, key in catalog.method_choices(name)
        if catalog.method(key).config.decoding_type != BASELINE
    ]


def _text(asked: Mapping[str, Any], name: str) -> str:
    text = asked.get(name)
    if not isinstance(text, str):
        raise ConfigError("A file of prompts must have a name and a text.")
    return text


def _of(event: gr.EventData | None) -> tuple[str | None, str]:
    """The benchmark or run that an event of the board is about, and the target; None without."""
    data = None if event is None else event._data
    if not isinstance(data, dict):
        return None, ""
    try:
        return read_run_id(data.get("id")), str(data.get("target", ""))[:200]
    except ConfigError:
        return None, ""
