"""Opening a target by its place, in a real browser."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from storage import RunLog
from tests.browser.pages import GeneratePage
from tests.playground.serving import serving
from tests.playground.tiny import save_tiny_llama, tiny_catalog

pytestmark = pytest.mark.browser


def test_a_folder_is_looked_at_opened_and_found_again(
    chromium: Any, tmp_path: Path, shots: Path
) -> None:
    catalog = tiny_catalog(save_tiny_llama(tmp_path / "tiny"))
    catalog = dataclasses.replace(catalog, may_open=True)
    other = save_tiny_llama(tmp_path / "other")
    log = RunLog.open(str(tmp_path / "runs.db"))
    with (
        serving(catalog, log, tmp_path / "cache") as served,
        GeneratePage.opened(chromium, served.url) as page,
    ):
        tab = page.tab
        tab.get_by_text("Open a folder, a GGUF or a hub id").click()
        tab.fill("#pg-open-place textarea, #pg-open-place input", str(tmp_path))
        tab.click("#pg-open-look")
        tab.locator("#pg-open-facts", has_text="config.json").wait_for()
        assert tab.locator("#pg-open-open").is_disabled()
        tab.fill("#pg-open-place textarea, #pg-open-place input", str(other))
        tab.click("#pg-open-look")
        tab.locator("#pg-open-facts", has_text="LlamaForCausalLM").wait_for()
        tab.screenshot(path=shots / "target.png")
        tab.click("#pg-open-open")
        tab.locator("#pg-target-state", has_text="other").wait_for()
        page.short(8)
        page.generate("On the opened one.")
        assert served.host.loaded is not None and served.host.loaded.name == "other"
        tab.reload()
        page.wait_done()
        assert tab.input_value("#pg-target input") == "other"
        assert "other" in tab.inner_text("#pg-target-state"), "it is loaded still"
        page.generate("And again.")
        tab.get_by_role("tab", name="Compare", exact=True).click()
        tab.click("#pg-cmp-target input")
        tab.locator("ul[role=listbox] li", has_text="other").wait_for()
        tab.keyboard.press("Escape")
        page.complaints.clear()
    log.close()
