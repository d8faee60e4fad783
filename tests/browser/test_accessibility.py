"""Names, roles and contrast of every page, as axe-core judges them."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import pytest

from playground.experiments.service import Experiments
from tests.browser.pages import GeneratePage
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
RUN = "axe.run(document, { resultTypes: ['violations'] })"


@pytest.fixture(scope="module")
def filled(served: Served) -> Iterator[str]:
    """A log with runs, a comparison, a benchmark and a sweep; the comparison's id."""
    host = served.host
    for _ in "12":
        finished(start(host))
    comparison = begun(host, ("scripted", {}))
    ended(comparison)
    benchmarks = sweeps = Experiments(host)
    benchmarked(benchmarks, begin(benchmarks, benchmark_form()))
    swept(sweeps, start_sweep(sweeps, sweep_form(method="scripted")))
    sweeps.close()
    yield comparison.id


@pytest.fixture(scope="module")
def axe() -> str:
    """The script of axe-core."""
    package = "axe_playwright_python"
    pytest.importorskip(package, reason="axe-playwright-python is not installed")
    return files(package).joinpath("axe.min.js").read_text(encoding="utf-8")


def violations(tab: Any) -> list[str]:
    """Each with the first of the elements that it is about."""
    found = tab.evaluate(RUN)["violations"]
    firsts = [one["nodes"][0] for one in found]
    return [
        f"{one['id']}: {one['help']} ({len(one['nodes'])} ×, {first['html']:.200})"
        for one, first in zip(found, firsts, strict=True)
    ]


def test_no_page_violates_what_axe_checks(
    chromium: Any, served: Served, filled: str, axe: str
) -> None:
    with GeneratePage.opened(chromium, served.url, path=f"/?compare={filled}") as page:
        page.tab.wait_for_selector("#pg-cmp-table table")
        page.tab.get_by_role("tab", name="Generate", exact=True).click()
        page.short(12)
        page.generate("Say hello.")
        page.tab.evaluate(axe)
        found = {}
        for name in TABS:
            page.show_theme("light")
            page.tab.get_by_role("tab", name=name, exact=True).click()
            page.tab.wait_for_timeout(1500)  # what a page draws when it is first opened
            if name == "Runs":
                compare_two(page.tab)
            if name in ("Benchmark", "Sweep"):
                page.tab.wait_for_selector(f"#pg-{name.lower()}-plot .js-plotly-plot")
            for theme in ("light", "dark"):
                page.show_theme(theme)
                found[name, theme] = violations(page.tab)
        assert {where: faults for where, faults in found.items() if faults} == {}


def compare_two(tab: Any) -> None:
    """Have a run open, and two compared."""
    ticks = tab.locator("#pg-runs tbody .tick input")
    for nth in (0, 1):
        ticks.nth(nth).check()
    tab.click("#pg-runs-do-compare:enabled")
    tab.wait_for_selector("#pg-runs-table table")
    tab.locator("#pg-runs tbody tr[data-id]").first.click()
    tab.wait_for_selector('#pg-run-panel [data-done="true"]', state="attached")
