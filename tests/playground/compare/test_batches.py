"""How much of a comparison's speedups is left under concurrency."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from engine.drafters.heads.medusa import MedusaConfig
from engine.drafters.lookup.ngram import NGramConfig
from engine.errors import ConfigError
from engine.model.target import Target
from engine.tree import ChoiceTree
from engine.tuning.latency import BatchLatency, LatencyCurve
from engine.tuning.timing import measure_batch
from playground.experiments.report.explain import balance_of
from playground.experiments.statistics import Totals
from playground.host.runner import EngineHost
from playground.trees.batches import batch_report, batch_speedups
from playground.web.compare import batch_report_messages
from storage import RunLog
from tests.playground.asks import WAIT_S
from tests.playground.compare.corrupted import begun, ended

BATCHED = BatchLatency(
    (1, 8),
    (LatencyCurve((1, 5), (10.0, 10.0)), LatencyCurve((1, 5), (20.0, 60.0))),
    "modules",
)
PLAIN = Totals(1, 21, 20, 20, 0, 0, 0.44, (0.0, 0.4, 0.02, 0.02, 0.0))
OWN = Totals(1, 21, 20, 10, 40, 10, 0.29, (0.04, 0.22, 0.01, 0.01, 0.0))


def test_every_part_of_a_step_grows_as_measured() -> None:
    chain = MedusaConfig().with_tree(ChoiceTree.chain(4))
    one, eight = batch_speedups(OWN, PLAIN, chain, BATCHED)
    balance = balance_of(OWN, PLAIN)
    assert balance is not None and one == pytest.approx(balance.formula)
    # Plain: 20 · 2 + 2 · 8; own: 4 · 2 (a network that runs one row), 22 · 6 (five rows), 2 · 8.
    assert eight == pytest.approx(2 * (40 + 16) / (8 + 132 + 16))
    _, looked_up = batch_speedups(OWN, PLAIN, NGramConfig(), BATCHED)
    assert looked_up == pytest.approx(2 * (40 + 16) / (4 * 8 + 132 + 16))


def test_a_comparison_tells_what_is_left_once_its_machine_is_measured(
    host: EngineHost, log: RunLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = threading.Event()

    def measure(target: Target, on_progress: Any) -> BatchLatency:
        """A tiny model's forwards are over in no time: they wait until the page shows them."""
        on_progress(0.0)
        assert shown.wait(WAIT_S)
        return measure_batch(target, on_progress=on_progress)

    async def ask() -> list[str]:
        said = []
        async for html in batch_report_messages(host, compare_id, "tab"):
            said.append(html)
            if "timing verify forwards of several texts" in html:
                shown.set()
        return said

    monkeypatch.setattr("playground.trees.batches.measure_batch", measure)
    slow = ("scripted", {"delay_ms": "20"})  # no step takes less time than a plain one
    compare_id = ended(begun(host, slow)).id
    assert batch_report(log, host.catalog, compare_id) is None
    said = asyncio.run(ask())
    assert shown.is_set()
    assert "32 at once" in said[-1] and "×" in said[-1] and "Lock-step batching" in said[-1]
    found = batch_report(log, host.catalog, compare_id)
    assert found is not None and found.batches == (1, 2, 4, 8, 16, 32)
    assert all(min(speedups) > 0 for speedups in found.speedups.values())
    assert asyncio.run(ask()) == said[-1:], "nothing is measured twice"
    compare_id = "nothing"
    assert "faulty" in asyncio.run(ask())[-1]
    with pytest.raises(ConfigError, match="No experiment"):
        batch_report(log, host.catalog, compare_id)
