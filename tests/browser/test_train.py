"""The Train page in a real browser: a tiny head is trained, its curve seen, and it is used."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.drafters import methods
from storage import RunQuery
from tests.browser.pages import GeneratePage, Violations, box_of
from tests.playground.serving import serving_tiny

pytestmark = pytest.mark.browser
TRAIN = "#pg-train"


def test_a_head_is_trained_found_again_and_used(
    chromium: Any, tmp_path: Path, shots: Path, violations: Violations
) -> None:
    with (
        serving_tiny(
            tmp_path, adapt=lambda tiny: replace(tiny, types={**methods(), **tiny.types})
        ) as trained,
        GeneratePage.opened(chromium, trained.url) as page,
    ):
        tab, form = page.tab, page.tab.locator(f"{TRAIN}-form")
        page.go("Train")
        page.pick("train-method", "Medusa")
        form.locator(".pg-field-heads").wait_for(state="attached")  # drawn anew
        form.locator("button.label-wrap", has_text="Training").click()
        small = {"minutes": "", "tokens": "900", "pack_tokens": "256", "heads": "2"}
        for name, value in small.items():
            box_of(form, name).fill(value)
        tab.locator(f"{TRAIN}-outlook .pg-said").wait_for()
        tab.wait_for_function("!document.querySelector('#pg-train-form .faulty')")
        tab.click(f"{TRAIN}-start:enabled")
        tab.wait_for_url(lambda url: "train=" in url, wait_until="commit")
        page.reload()
        tab.locator(f"{TRAIN}-state .text", has_text="done").wait_for(timeout=180_000)
        tab.wait_for_selector(f"{TRAIN}-gain .main-svg")
        tab.wait_for_selector(f"{TRAIN}-loss .main-svg")
        tab.locator(f"{TRAIN}-card", has_text="MAT").wait_for()
        for theme in ("light", "dark"):
            page.show_theme(theme)
            assert violations(tab) == [], theme
        page.check_width(shots, "train")
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


def test_a_head_learns_from_an_uploaded_file_of_prompts(chromium: Any, tmp_path: Path) -> None:
    (file := tmp_path / "mine.jsonl").write_text('{"category": "mine", "turns": ["Tea?"]}\n')
    with (
        serving_tiny(
            tmp_path, adapt=lambda tiny: replace(tiny, types={**methods(), **tiny.types})
        ) as trained,
        GeneratePage.opened(chromium, trained.url) as page,
    ):
        tab = page.tab
        page.go("Train")
        tab.wait_for_selector(f"{TRAIN}-start:enabled")  # checked as it was drawn
        tab.get_by_label("A file of prompts").check()
        tab.locator(f"{TRAIN}-outlook", has_text="Add a file of prompts").wait_for()
        tab.set_input_files(f"{TRAIN} input[type=file]", file)
        tab.click(f"{TRAIN}-start:enabled")
        tab.wait_for_url(lambda url: "train=" in url, wait_until="commit")
        page.check_clean()
    (plan,) = (tmp_path / "training").glob("heads/*/training/plan.json")
    assert json.loads(plan.read_text())["prompts"] == [{"category": "mine", "turns": ["Tea?"]}]
