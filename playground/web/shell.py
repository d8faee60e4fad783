"""The frame around the pages: tabs, links between the pages, and the command palette."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gradio as gr

from playground.experiments.service import Experiments
from playground.host.runner import EngineHost
from playground.runs.reading import History
from playground.training.service import Trainings
from playground.web.access import LOG_FAILED
from playground.web.benchmark import BenchmarkPage
from playground.web.compare import ComparePage
from playground.web.components import module_component, text_of
from playground.web.connect import ConnectPage
from playground.web.deploy import DeployPage
from playground.web.forms import RAW, Updates, skip_on_fault
from playground.web.generate import GeneratePage
from playground.web.memory import tab_identity
from playground.web.navigator import Navigator, Page, switch_to
from playground.web.runs import RunsPage
from playground.web.sweep import SweepPage
from playground.web.train import TrainPage
from playground.web.tree import TreePage
from storage import RunQuery, RunSummary, StorageError

MAX_RUNS = 50
"""Runs that the command palette lists."""
TITLE = "Speculative decoding playground"
DELETE_CACHE_S = (600, 3600)
"""Interval of deleting uploads and downloads, and their minimum age."""


class Pages(gr.Blocks):
    """Blocks that show why the run log failed, whichever listener used it."""

    async def process_api(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        try:
            return await super().process_api(*args, **kwargs)
        except StorageError as error:
            raise gr.Error(str(error), title=LOG_FAILED, print_exception=False) from error


@contextmanager
def _page(name: str) -> Iterator[gr.Tab]:
    """A tab, with a heading for screen readers."""
    with gr.Tab(name, id=name.lower()) as tab:
        _heading(f"<h2>{name}</h2>")
        yield tab


def _heading(html: str) -> None:
    gr.HTML(html, elem_classes="pg-heading")


def build_shell(host: EngineHost, trained: Path) -> gr.Blocks:
    """All pages as tabs of one Blocks; `trained`: folder of trained drafters."""
    history, experiments = History(host.runs, host.log), Experiments(host)
    page: gr.Blocks
    with Pages(
        title=TITLE, analytics_enabled=False, fill_width=True, delete_cache=DELETE_CACHE_S
    ) as page:
        _heading(f"<h1>{TITLE}</h1>")
        tab_id, nav = tab_identity(), Navigator()
        with gr.Tabs():
            with _page("Generate"):
                generate = GeneratePage(host, experiments, history, tab_id, nav)
            with _page("Compare"):
                compare = ComparePage(host, experiments, history, tab_id, nav)
            with _page("Tree"):
                tree = TreePage(host, nav)
            with _page("Benchmark") as tab:
                bench = BenchmarkPage(host, experiments, tab, nav)
            with _page("Sweep") as tab:
                sweep = SweepPage(host, experiments, tab, nav)
            with _page("Train") as tab:
                train = TrainPage(host, experiments, Trainings(host, trained), tab, nav)
            with _page("Runs"):
                runs = RunsPage(host, history, tab_id, nav)
            with _page("Deploy") as tab:
                deploy = DeployPage(host, tab)
            with _page("Connect"):
                ConnectPage(host.catalog, host.log)
        pages: dict[str, Page] = {"generate": generate, "compare": compare, "tree": tree}
        nav.connect(page, {**pages, "benchmark": bench, "deploy": deploy})
        compare.prompts.follow(generate.panel)
        generate.listen_to_opener(
            page, [one.target for one in (compare, bench, sweep, deploy, train)]
        )
        drafting = [(one.target, one.configurations.adder) for one in (compare, bench)]
        drafting.append((sweep.target, sweep.method))
        menus = [(target, method, host.menu.drafting) for target, method in drafting]
        train.list_in(page, [*menus, (generate.target, generate.method, host.menu.choices)])
        add_palette(nav, generate, runs)
    return page


def add_palette(nav: Navigator, generate: GeneratePage, runs: RunsPage) -> None:
    """Ctrl+K: methods are picked on Generate, runs opened on Runs; the browser adds the rest."""
    methods_of = generate.host.menu.choices
    box = module_component(
        "palette.js", template="", events=["opened", "method", "run"], elem_id="pg-palette-box"
    )

    def list_entries(target: Any) -> dict[str, Any]:
        """Titles and keys of the methods for the picked target and of the newest runs."""
        rows = runs.log.rows(RunQuery(limit=MAX_RUNS))
        return {
            "methods": methods_of(target),
            "runs": [(run_title(row), row.id) for row in rows],
        }

    def pick_method(value: Any, target: Any) -> list[Any]:
        picked = text_of(value, "picked")
        if picked not in [key for _, key in methods_of(target)]:
            return [gr.skip(), gr.skip()]
        return [switch_to("generate"), picked]

    def open_run(value: Any, *table: Any) -> Updates:
        run = text_of(value, "picked")
        rows = skip_on_fault("opening a run")(runs.draw_repeated)(run, *table)
        return {nav.tabs: switch_to("runs"), runs.table: rows, **runs.open_run.opened(run)}

    box.opened(list_entries, generate.target, box, **RAW)
    box.method(pick_method, [box, generate.target], [nav.tabs, generate.method], **RAW)
    outputs = [nav.tabs, runs.table, *runs.open_run.outputs]
    box.run(open_run, [box, *runs.inputs], outputs, **RAW)


def run_title(row: RunSummary) -> str:
    """A run in one line."""
    words = " ".join((row.name or row.prompt_text).split())
    return f"{row.method_title} · {words:.60} · {row.created_at.astimezone():%d %b %H:%M}"
