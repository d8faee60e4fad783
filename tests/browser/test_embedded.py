"""A newcomer's way on the embedded model: fetch, load, stream, find the fastest."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from playground.host import paths
from playground.host.catalog import Catalog
from storage import RunLog
from tests.browser.pages import GeneratePage
from tests.playground.serving import Served, serving

pytestmark = [pytest.mark.browser, pytest.mark.network]
LOAD_MS = 600_000
RESULT = r"((\d\.\d\d|About \d\.\d)× plain decoding|No speedup is given): \d\.\d\d tokens a step"


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    cache = Path(os.environ.get("PLAYGROUND_CACHE") or paths.cache_dir())
    with (
        RunLog.open(str(tmp_path_factory.mktemp("embedded") / "runs.db")) as log,
        serving(Catalog.shipped(), log, cache) as served,
    ):
        yield served


def test_newcomer_meets_a_branching_tree_in_one_click(
    chromium: Any, embedded: Served, shots: Path
) -> None:
    """Three more clicks say why it is faster, which method to use and where it runs."""
    with GeneratePage.opened(chromium, embedded.url) as page:
        page.tab.set_default_timeout(LOAD_MS)
        assert "guesses the next few tokens" in page.tab.inner_text("#pg-welcome")
        assert page.tab.input_value("#pg-prompt textarea").startswith("Summarise")
        page.tab.click("#pg-example-tree")
        page.tab.wait_for_selector('#pg-panel [data-done="true"]', state="attached")
        assert re.match(RESULT, page.tab.inner_text("#pg-panel .result"))
        tree = "#pg-panel .tree-view .node.draft"
        page.tab.wait_for_selector(f"{tree}.on")
        assert page.count(f"{tree}.off") >= 5 and page.count("#pg-panel .node.more") > 0
        assert "EAGLE-2" in page.tab.input_value("#pg-method input")
        assert "as set" in page.tab.inner_html("#pg-method-form")
        sizes = page.tab.evaluate(
            "[...document.querySelectorAll('#pg-panel .node > text')].map("
            "text => parseFloat(getComputedStyle(text).fontSize) * text.getCTM().a)"
        )
        assert min(sizes) >= 11
        page.tab.screenshot(path=shots / "newcomer-tree.png", full_page=True)
        page.tab.locator("#pg-panel .walk-start").click()
        page.tab.locator("#pg-panel .walk-text", has_text="The root").wait_for()
        page.tab.click("#pg-fastest-start")
        state = page.tab.locator("#pg-benchmark-state")
        state.locator(".text", has_text=re.compile("s left · .*round")).wait_for()
        page.tab.wait_for_selector("#pg-benchmark-state [data-state=completed]")
        page.tab.locator("#pg-benchmark-summary", has_text="llama.cpp").wait_for()
        advice = page.tab.inner_text("#pg-benchmark-head")
        assert "× plain decoding" in advice and re.search("Recommended: |Worth a try: ", advice)
        page.check_width(shots, "newcomer-fastest")
        page.tab.click("#pg-benchmark-deploy")
        engines = page.tab.locator("#pg-deploy-engine", has_text="GGUF")
        engines.wait_for()
        assert engines.inner_text().count("GGUF") == 1


def test_choosing_a_target_updates_every_page_and_drops_what_cannot_run(
    chromium: Any, embedded: Served
) -> None:
    with GeneratePage.opened(chromium, embedded.url) as page:
        page.pick("target", "Tiny random Llama")
        for name in ("Benchmark", "Sweep"):
            page.go(name)
            at = f"#pg-{name.lower()}"
            picked = page.tab.locator(at).get_by_role("combobox", name="Target")
            assert picked.input_value().startswith("Tiny random Llama")
            page.tab.wait_for_selector(f"{at}-start:enabled")
        groups = page.tab.locator("#pg-benchmark-form .pg-group").all_inner_texts()
        assert groups and not any("smollm2" in group for group in groups)
        outlook = page.tab.locator("#pg-sweep-outlook")
        for method in ("Suffix", "N-gram lookup", "Token recycling", "N-gram lookup"):
            page.pick("sweep-method", method)
            page.tab.wait_for_timeout(1500)  # what the change leads to, however late
            assert "is not a setting" not in outlook.inner_text()
            assert "combinations" in outlook.inner_text()
