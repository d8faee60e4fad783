"""The frame around the pages: tabs, and links that open a run."""

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
"""Interval in which uploads and downloads are deleted, and the age at which they are."""


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
        tab_id = tab_identity()
        tabs = tab_switch()
        with gr.Tabs():
            with _page("Generate"):
                generate = GeneratePage(host, experiments, history, tab_id)
            with _page("Compare"):
                compare = ComparePage(host, experiments, history, tab_id)
            with _page("Tree"):
                tree = TreePage(host)
            with _page("Benchmark") as tab:
                bench = BenchmarkPage(host, experiments, tab)
            with _page("Sweep") as tab:
                sweep = SweepPage(host, experiments, tab)
            with _page("Train") as tab:
                train = TrainPage(host, experiments, Trainings(host, trained), tab)
            with _page("Runs"):
                runs = RunsPage(host, history, tab_id)
            with _page("Deploy") as tab:
                deploy = DeployPage(host, tab)
            with _page("Connect"):
                ConnectPage(host.catalog, log)

        pickers = [compare.target, bench.target, sweep.fields["target"], deploy.target]
        pickers.append(train.target)
        menus = [(generate.target, generate.method, host.menu.choices)]
        menus += [(compare.target, method, host.menu.choices) for method in compare.methods]
        drafting = [(bench.target, bench.adder), (sweep.target, sweep.method)]
        drafting.append((deploy.target, deploy.method))
        menus += [(target, method, host.menu.drafting) for target, method in drafting]
        generate.listen_to_opener(page, pickers)
        generate.listen_to_links(page)
        generate.fastest.listen_to_page(page)
        runs.listen_to_links(page)
        runs.open_run.listen_to_generate(tabs, generate, runs.message)
        compare.listen_to_links(page)
        compare.prompts.follow(generate.panel)
        for panel in (generate.panel, runs.open_run.panel):
            compare.listen_to_runs(tabs, panel)
        tree.listen_to_links(page)
        bench.listen_to_links(page)
        bench.listen(tabs, runs, tree.component, deploy)
        tree.listen_to_use(tabs, generate, compare)
        tree.listen_to_forms(tabs, generate.target, generate.method, generate.form)
        for method, form in zip(compare.methods, compare.forms, strict=True):
            tree.listen_to_forms(tabs, compare.target, method, form)
        tree.listen_to_forms(tabs, bench.target, None, bench.form)
        tree.listen_to_forms(tabs, sweep.target, sweep.method, sweep.form)
        sweep.listen_to_links(page)
        sweep.listen(tabs, generate)
        picked = [generate.target, generate.method, generate.form.spec]
        generate.fastest.listen_to_leads(
            tabs,
            picked,
            generate.form_values.of_method,
            tree.component,
            deploy.open,
            deploy.outputs,
        )
        train.listen_to_links(page)
        train.listen(page, tabs, generate, compare, menus)
        deploy.listen_to_links(page)
        deploy.listen_to_use(tabs, generate)
        Palette(tabs, generate, runs)
    return page
