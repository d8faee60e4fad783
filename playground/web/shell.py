"""The frame around the pages: tabs, and links that open a run."""

from __future__ import annotations

import gradio as gr

from playground.experiments.sweep.service import Sweeps
from playground.host.runner import EngineHost
from playground.host.stream import History
from playground.web.benchmark import BenchmarkPage
from playground.web.compare import ComparePage
from playground.web.connect import ConnectPage
from playground.web.deploy import DeployPage
from playground.web.generate import GeneratePage
from playground.web.memory import tab_identity
from playground.web.runs import RunsPage
from playground.web.sweep import SweepPage
from playground.web.tree import TreePage
from storage import RunLog

TITLE = "Speculative decoding playground"
FILES_S = (600, 3600)
"""How often uploads and downloads are looked through, and how old they get."""


def build_shell(host: EngineHost, log: RunLog) -> gr.Blocks:
    """All pages as tabs of one Blocks."""
    history = History(host.runs, log)
    page: gr.Blocks
    with gr.Blocks(
        title=TITLE, analytics_enabled=False, fill_width=True, delete_cache=FILES_S
    ) as page:
        gr.HTML(f'<h1 class="unseen">{TITLE}</h1>', padding=False, elem_id="pg-title")
        tab_id = tab_identity()
        with gr.Tabs() as tabs:
            with gr.Tab("Generate", id="generate"):
                generate = GeneratePage(host, history, tab_id)
            with gr.Tab("Compare", id="compare"):
                compare = ComparePage(host, history, tab_id)
            with gr.Tab("Tree", id="tree"):
                tree = TreePage(host)
            with gr.Tab("Benchmark", id="benchmark") as tab:
                bench = BenchmarkPage(host, tab)
            with gr.Tab("Sweep", id="sweep") as tab:
                sweep = SweepPage(Sweeps(host), tab)
            with gr.Tab("Runs", id="runs"):
                runs = RunsPage(host, history, tab_id)
            with gr.Tab("Deploy", id="deploy") as tab:
                deploy = DeployPage(host, tab)
            with gr.Tab("Connect", id="connect"):
                ConnectPage(host.catalog, log)

        generate.listen_to_links(page)
        runs.listen_to_links(page, tabs)
        runs.open_run.listen_to_generate(tabs, generate, runs.message)
        compare.listen_to_links(page, tabs)
        for panel in (generate.panel, runs.open_run.panel):
            compare.listen_to_runs(tabs, panel)
        tree.listen_to_links(page, tabs)
        bench.listen_to_links(page, tabs)
        bench.listen(tabs, runs, tree.component, deploy)
        tree.listen_to_use(tabs, generate, compare)
        tree.listen_to_forms(tabs, generate.target, generate.method, generate.form)
        for method, form in zip(compare.methods, compare.forms, strict=True):
            tree.listen_to_forms(tabs, compare.target, method, form)
        tree.listen_to_forms(tabs, bench.target, None, bench.form)
        tree.listen_to_forms(tabs, sweep.target, sweep.method, sweep.form)
        sweep.listen_to_links(page, tabs)
        sweep.listen(tabs, generate)
        deploy.listen_to_links(page, tabs)
        deploy.listen_to_use(tabs, generate)
    return page
