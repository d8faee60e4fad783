"""Names, roles and contrast of every page, as axe-core judges them, light and dark."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import pytest

from tests.browser.pages import GeneratePage
from tests.playground.serving import Served

pytestmark = pytest.mark.browser
TABS = ("Generate", "Compare", "Tree", "Benchmark", "Sweep", "Runs", "Deploy", "Connect")
RUN = "axe.run(document, { resultTypes: ['violations'] })"


@pytest.fixture(scope="module")
def axe() -> str:
    """The script of axe-core."""
    package = "axe_playwright_python"
    pytest.importorskip(package, reason="axe-playwright-python is not installed")
    return files(package).joinpath("axe.min.js").read_text(encoding="utf-8")


def violations(tab: Any) -> list[str]:
    """Each with the first of the elements that it is about."""
    return [
        f"{one['id']}: {one['help']} ({len(one['nodes'])} ×, {one['nodes'][0]['target']})"
        for one in tab.evaluate(RUN)["violations"]
    ]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_no_page_violates_what_axe_checks(
    chromium: Any, served: Served, axe: str, theme: str
) -> None:
    with GeneratePage.opened(chromium, served.url, path=f"/?__theme={theme}") as page:
        page.short(12)
        page.generate("Say hello.")
        page.tab.evaluate(axe)
        found = {}
        for name in TABS:
            page.tab.get_by_role("tab", name=name, exact=True).click()
            page.tab.wait_for_timeout(1500)  # what a page draws when it is first opened
            found[name] = violations(page.tab)
        assert found == {name: [] for name in TABS}
