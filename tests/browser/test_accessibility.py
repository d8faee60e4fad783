"""Names, roles and contrast of every page, as axe-core judges them."""

from __future__ import annotations

from typing import Any

import pytest

from playground.experiments.service import Experiments
from playground.host.runner import EngineHost
from tests.browser.pages import GeneratePage, Violations
from tests.playground.asks import finished, start
from tests.playground.bench.test_service import asked as benchmark_form
from tests.playground.bench.test_service import begin
from tests.playground.bench.test_service import finished as benchmarked
from tests.playground.compare.corrupted import begun, ended
from tests.playground.serving import Served
from tests.playground.sweeps.test_service import asked as sweep_form
from tests.playground.sweeps.test_service import begin as start_sweep
from tests.playground.sweeps.test_service import ended as swept

pytestmark = pytest.mark.browser
TABS = ("Generate", "Compare", "Tree", "Benchmark", "Sweep", "Train", "Runs", "Deploy", "Connect")


def fill(host: EngineHost) -> str:
    """Log runs, a comparison, a benchmark and a sweep; returns the comparison's id."""
    for _ in "12":
        finished(start(host))
    comparison = begun(host, ("scripted", {}))
    ended(comparison)
    experiments = Experiments(host)
    benchmarked(experiments, begin(experiments, benchmark_form()))
    swept(experiments, start_sweep(experiments, sweep_form(method="scripted")))
    experiments.close()
    return comparison.id


def test_no_page_violates_what_axe_checks(
    chromium: Any, served: Served, violations: Violations
) -> None:
    path = f"/?compare={fill(served.host)}"
    with GeneratePage.opened(chromium, served.url, path=path) as page:
        page.tab.wait_for_selector("#pg-cmp-table table")
        page.go("Generate")
        page.short(12)
        page.generate("Say hello.")
        found = {}
        for name in TABS:
            page.show_theme("light")
            page.go(name)
            page.tab.wait_for_timeout(1500)  # what a page draws when it is first opened
            if name == "Runs":
                for nth in (0, 1):
                    page.tab.locator("#pg-runs tbody .tick input").nth(nth).check()
                page.tab.click("#pg-runs-do-compare:enabled")
                page.tab.wait_for_selector("#pg-runs-table table")
                page.tab.locator("#pg-runs tbody tr[data-id]").first.click()
                page.wait_done("pg-run-panel")
            if name in ("Benchmark", "Sweep"):
                page.tab.wait_for_selector(f"#pg-{name.lower()}-plot .js-plotly-plot")
            for theme in ("light", "dark"):
                page.show_theme(theme)
                found[name, theme] = violations(page.tab)
        assert {where: faults for where, faults in found.items() if faults} == {}
