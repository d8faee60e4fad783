"""The Runs page in a real browser."""

from __future__ import annotations

from typing import Any

import pytest

from tests.browser.pages import GeneratePage
from tests.playground.asks import finished, start
from tests.playground.serving import Served

pytestmark = pytest.mark.browser


def test_a_run_opens_from_the_table_and_scrubs(page: GeneratePage, served: Served) -> None:
    page.pick_method("Scripted tree", "max_draft_len")
    page.short()
    page.generate("Find me later.")
    text = page.text()
    served.host.runs.__init__()  # type: ignore[misc]
    page.tab.get_by_role("tab", name="Runs").click()
    row = page.tab.locator("#pg-runs tbody tr", has_text="Find me later.").first
    row.click()
    page.wait_done("pg-run-panel")
    assert page.text("pg-run-panel") == text
    assert page.tab.locator("#pg-run-panel .turn.user").inner_text() == "Find me later."
    page.tab.locator("#pg-run-panel .scrubber input").focus()
    page.tab.keyboard.press("Home")
    page.tab.wait_for_selector("#pg-run-panel .tree-view .node.draft")
    assert "run=" in page.tab.url


def test_a_permalink_opens_the_run(chromium: Any, served: Served) -> None:
    run = finished(start(served.host, prompt="Linked to."))
    assert run.finish is not None
    path = f"/?run={run.log_id}"
    with GeneratePage.opened(chromium, served.url, path=path) as page:
        page.wait_done("pg-run-panel")
        assert page.text("pg-run-panel") == run.finish.text
        page.check_clean()


@pytest.mark.parametrize("link", ["nothing", "%3Cimg%20src=x%3E", "x" * 300, "%00"])
def test_a_dead_link_says_so(chromium: Any, served: Served, link: str) -> None:
    with GeneratePage.opened(chromium, served.url, path=f"/?run={link}") as page:
        page.wait_state("failed", panel="pg-run-panel")
        assert "run" in page.tab.inner_text("#pg-run-panel .alert").lower()
        page.check_clean()


def test_the_table_searches_and_sorts(page: GeneratePage, served: Served) -> None:
    finished(start(served.host, prompt="A needle."))
    finished(start(served.host, prompt="A haystack."))
    page.tab.get_by_role("tab", name="Runs").click()
    page.tab.wait_for_selector("#pg-runs tbody tr")
    page.tab.fill("#pg-runs input[type=search]", "NEEDLE")
    page.tab.wait_for_function(
        "[...document.querySelectorAll('#pg-runs tbody tr')]"
        ".every(row => row.textContent.includes('needle'))"
    )
    page.tab.fill("#pg-runs input[type=search]", "no such prompt")
    page.tab.wait_for_selector("#pg-runs .empty")
    page.tab.fill("#pg-runs input[type=search]", "")
    page.tab.click("#pg-runs th >> text=tok/s")
    page.tab.wait_for_selector("#pg-runs th[aria-sort=descending] >> text=tok/s")
