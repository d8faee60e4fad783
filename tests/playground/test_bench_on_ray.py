"""Experiments on Ray: the same answers as in one process, every one by a named worker."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path

import gradio as gr
import pytest

from playground.experiments.cluster import connected
from playground.experiments.service import Experiments
from playground.experiments.statistics import finished_requests
from playground.host.runner import EngineHost
from playground.host.task import TaskState
from playground.web.benchmark import BenchmarkPage
from playground.web.experiment import ExperimentPage, state_of
from playground.web.navigator import Navigator
from playground.web.sweep import SweepPage
from storage import RunLog
from tests.playground.bench import test_service as benchmarks
from tests.playground.serving import built
from tests.playground.sweeps import test_service as sweeps
from tests.playground.sweeps.conftest import ngram_catalog

pytest.importorskip("ray", reason="Ray is not installed")
pytestmark = pytest.mark.slow
WAIT_S = 400.0


def followed(page: ExperimentPage, key: str) -> tuple[TaskState, str]:
    """How an experiment ended, and what the page showed while it was measured."""
    shown, until = "", time.monotonic() + WAIT_S
    while (now := page.read(key)).is_running:
        assert time.monotonic() < until, now.text
        shown += state_of(now)
        time.sleep(0.05)
    return now, shown


def test_the_pages_have_workers_measure_and_show_them(
    tiny_folder: Path, tmp_path: Path, log: RunLog
) -> None:
    with ExitStack() as stack:
        catalog = ngram_catalog(tiny_folder)
        host = EngineHost(log, catalog, cache_dir=tmp_path / "cache", device="cpu")
        stack.callback(host.close)
        stack.enter_context(connected("local", cpus=2))
        service = Experiments(host)
        stack.callback(service.close)
        bench = built(lambda: BenchmarkPage(host, Experiments(host), gr.Tab(), Navigator()))
        sweep = built(lambda: SweepPage(host, service, gr.Tab(), Navigator()))
        two = bench.pool("local", 2)
        ngram = [{"method": "ngram", "name": "ngram", "settings": {}}]
        form = benchmarks.asked(configurations=ngram, extent={"repeats": "3"})
        plan = benchmarks.plan_of(bench.experiments, form)
        key = bench.experiments.start(plan, pool=two).id
        now, shown = followed(bench, key)
        found = finished_requests(host.log, key)
        assert (now.status, len(found)) == ("completed", 12)
        names = {request.worker for request in found}
        assert len(names) == 2 and all(f">{name}<" in shown.replace("\n", "") for name in names)
        assert "shard 1" in shown and host.log.get(found[0].run_id) is not None

        name = sweeps.begin(service, sweeps.asked("max_draft_len=1:4"), pool=two)
        now, shown = followed(sweep, name)
        assert now.status == "completed" and "trial 1" in shown and "Workers" in shown
        tried = sweeps.look(service, name)["trials"]
        assert [trial["outcome"] for trial in tried] == ["measured"] * 4
