"""The frame around the pages: tabs, and the links between the pages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import gradio as gr

from playground.experiments.service import Experiments
from playground.host.runner import EngineHost
from playground.host.stream import History
from playground.training.service import Trainings
from playground.web.address import tab_switch
from playground.web.benchmark import BenchmarkPage
from playground.web.compare import ComparePage
from playground.web.connect import ConnectPage
from playground.web.deploy import DeployPage
from playground.web.generate import GeneratePage
from playground.web.memory import tab_identity
from playground.web.palette import Palette
from playground.web.runs import RunsPage
from playground.web.sweep import SweepPage
from playground.web.train import TrainPage
from playground.web.tree import TreePage
from storage import RunLog

TITLE = "Speculative decoding playground"
DELETE_CACHE_S = (600, 3600)
"""Interval of deleting uploads and downloads, and their minimum age."""


@contextmanager
def _page(name: str) -> Iterator[gr.Tab]:
    """A tab, with a heading for screen readers."""
    with gr.Tab(name, id=name.lower()) as tab:
        _heading(f"<h2>{name}</h2>")
        yield tab


def _heading(html: str) -> None:
    gr.HTML(html, padding=False, elem_classes="pg-heading")


def build_shell(host: EngineHost, log: RunLog, trained: Path | None = None) -> gr.Blocks:
    """All pages as tabs of one Blocks; `trained`: folder of trained drafters."""
    history, experiments = History(host.runs, log), Experiments(host)
    page: gr.Blocks
    with gr.Blocks(
        title=TITLE, analytics_enabled=False, fill_width=True, delete_cache=DELETE_CACHE_S
    ) as page:
        _heading(f"<h1>{TITLE}</h1>")
        tab_id, tabs = tab_identity(), tab_switch()
        with gr.Tabs():
            with _page("Generate"):
                generate = GeneratePage(host, experiments, history, tab_id, tabs)
            with _page("Compare"):
                compare = ComparePage(host, experiments, history, tab_id, tabs)
            with _page("Tree"):
                tree = TreePage(host, tabs)
            with _page("Benchmark") as tab:
                bench = BenchmarkPage(host, experiments, tab)
            with _page("Sweep") as tab:
                sweep = SweepPage(host, experiments, tab)
            with _page("Train") as tab:
                train = TrainPage(host, experiments, Trainings(host, trained), tab)
            with _page("Runs"):
                runs = RunsPage(host, history, tab_id, tabs)
            with _page("Deploy") as tab:
                deploy = DeployPage(host, tab, tabs)
            with _page("Connect"):
                ConnectPage(host.catalog, log)
        for linked in (generate, runs, compare, tree):
            linked.listen_to_links(page)
        bench.listen(runs, tree, deploy)
        sweep.listen(generate)
        deploy.listen_to_use(generate)
        tree.listen_to_use(generate, compare)
        generate.fastest.listen_to_page(page)
        generate.fastest.listen_to_page_buttons(generate, tree, deploy)
        runs.open_run.listen_to_generate(generate, runs.message)
        compare.prompts.follow(generate.panel)
        for panel in (generate.panel, runs.open_run.panel):
            compare.listen_to_runs(panel)
        for target, picker, form in (
            (generate.target, generate.method, generate.form),
            (compare.target, None, compare.form),
            (bench.target, None, bench.configurations.form),
            (sweep.target, sweep.method, sweep.form),
        ):
            tree.listen_to_forms(target, picker, form)
        pickers = [one.target for one in (compare, bench, sweep, deploy, train)]
        generate.listen_to_opener(page, pickers)
        drafting = [(one.target, one.configurations.adder) for one in (compare, bench)]
        drafting += [(one.target, one.method) for one in (sweep, deploy)]
        menus = [(target, method, host.menu.drafting) for target, method in drafting]
        menus.append((generate.target, generate.method, host.menu.choices))
        train.listen(page, generate, compare, menus)
        Palette(generate, runs)
    return page
