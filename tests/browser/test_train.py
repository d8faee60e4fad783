"""The Train page in a real browser: a tiny head is trained, its curve seen, and it is used."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.drafters import methods
from storage import RunQuery
from tests.browser.pages import NARROW, GeneratePage, box_of
from tests.browser.test_accessibility import axe, violations  # noqa: F401
from tests.playground.serving import Served, serving_tiny

pytestmark = pytest.mark.browser
TRAIN = "#pg-train"
LONG_MS = 180_000


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The page over a tiny target and every method."""
    folder = tmp_path_factory.mktemp("train-page")
    with serving_tiny(folder, adapt=lambda tiny: replace(tiny, types=methods())) as served:
        yield served


def fill(page: GeneratePage, tokens: int) -> Any:
    """The Train page, set to small Medusa heads."""
    tab = page.tab
    tab.get_by_role("tab", name="Train", exact=True).click()
    page.pick("train-method", "Medusa")
    tab.wait_for_selector("#pg-train-form .pg-field-heads", state="attached")  # drawn anew
    tab.locator("#pg-train-form button.label-wrap", has_text="Training").click()
    small = {"minutes": "", "tokens": str(tokens), "pack_tokens": "256", "heads": "2"}
    for name, value in small.items():
        box_of(tab.locator("#pg-train-form"), name).fill(value)
    return tab


def wait_words(tab: Any, words: str) -> None:
    tab.locator(f"{TRAIN}-state .text", has_text=words).wait_for(timeout=LONG_MS)


def test_a_head_is_trained_found_again_and_used(
    chromium: Any,
    trained: Served,
    axe: str,  # noqa: F811
) -> None:
    with GeneratePage.opened(chromium, trained.url) as page:
        tab = fill(page, 900)
        tab.locator(f"{TRAIN}-outlook .pg-said").wait_for()
        tab.wait_for_function("!document.querySelector('#pg-train-form .faulty')")
        tab.click(f"{TRAIN}-start:enabled")
        tab.wait_for_url(lambda url: "train=" in url, wait_until="commit")
        page.reload()
        wait_words(tab, "done")
        tab.wait_for_selector(f"{TRAIN}-gain .main-svg")
        tab.wait_for_selector(f"{TRAIN}-loss .main-svg")
        tab.locator(f"{TRAIN}-card", has_text="MAT").wait_for()
        tab.evaluate(axe)
        for theme in ("light", "dark"):
            page.show_theme(theme)
            assert violations(tab) == [], theme
        tab.click(f"{TRAIN}-export")
        tab.wait_for_selector(f"{TRAIN}-download a")
        tab.click(f"{TRAIN}-use")
        tab.wait_for_selector("#pg-generate", state="visible")
        tab.wait_for_selector("#pg-method-form .pg-field-medusa_choices", state="attached")
        assert "trained here" in tab.input_value("#pg-method input")
        page.generate("Say hello.")
        newest = trained.log.rows(RunQuery(limit=1))[0]
        assert newest.decoding_type == "Medusa" and "trained here" in newest.method_title
        page.check_clean()


def test_nothing_scrolls_sideways_and_a_dead_link_says_so(
    chromium: Any, trained: Served, shots: Path
) -> None:
    path = "/?train=nobody"
    with GeneratePage.opened(chromium, trained.url, path=path, viewport=NARROW) as page:
        alert = page.tab.locator(f"{TRAIN}-state .pg-alert")
        alert.wait_for()
        assert "No training is named 'nobody'" in alert.inner_text()
        page.check_width(shots, "train")
        page.check_clean()
