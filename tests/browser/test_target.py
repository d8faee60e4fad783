"""Opening a target by its place, in a real browser."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.drafters import methods
from engine.model.sources import TargetSpec
from playground.host.catalog import Catalog
from tests.browser.pages import GeneratePage
from tests.playground.serving import serving_tiny
from tests.playground.tiny import save_tiny_llama

pytestmark = pytest.mark.browser


def test_a_folder_is_inspected_opened_and_offered_again(
    chromium: Any, tmp_path: Path, shots: Path
) -> None:
    other = save_tiny_llama(tmp_path / "other")
    with (
        serving_tiny(tmp_path, adapt=lambda tiny: replace(tiny, may_open=True)) as served,
        GeneratePage.opened(chromium, served.url) as page,
    ):
        tab = page.tab
        tab.get_by_text("Open a folder, a GGUF or a hub id").click()
        tab.fill("#pg-open-place textarea, #pg-open-place input", str(tmp_path))
        tab.click("#pg-open")
        tab.locator("#pg-open-facts", has_text="config.json").wait_for()
        assert tab.input_value("#pg-target input") == "Tiny"
        tab.fill("#pg-open-place textarea, #pg-open-place input", str(other))
        tab.click("#pg-open")
        tab.locator("#pg-open-facts", has_text="LlamaForCausalLM").wait_for()
        tab.screenshot(path=shots / "target.png")
        wait_kept(tab, str(other))
        assert served.host.loaded is None, "its facts are known before it is loaded"
        page.short(8)
        page.generate("On the opened one.")
        assert tab.inner_text("#pg-panel .on-target") == "on other", "every result names it"
        tab.locator("#pg-target-state", has_text="other").wait_for()
        assert "LlamaForCausalLM" in tab.inner_text("#pg-open-facts")
        page.pick("target", "Tiny")
        tab.locator("#pg-open-facts", has_text="LlamaForCausalLM").wait_for(state="detached")
        wait_kept(tab, "tiny")
        page.pick("target", "other")
        assert served.host.loaded is not None and Path(served.host.loaded.name).name == "other"
        wait_kept(tab, str(other))
        page.reload()
        page.wait_done()
        tab.wait_for_function("document.querySelector('#pg-target input')?.value === 'other'")
        assert "other" in tab.inner_text("#pg-target-state"), "it is loaded still"
        page.generate("And again.")
        page.go("Compare")
        tab.click("#pg-cmp-target input")
        tab.locator("ul[role=listbox] li", has_text="other").wait_for()
        tab.keyboard.press("Escape")
        page.complaints.clear()


def wait_kept(tab: Any, target: str) -> None:
    """Until the browser keeps this target for the next visit, and the address names it."""
    tab.wait_for_function(
        "target => JSON.parse(localStorage.getItem('pg-generate'))?.target === target"
        " && new URLSearchParams(location.search).get('target') === target",
        arg=target,
    )


def other_vocabulary(folder: Path) -> Path:
    """A model whose tokenizer gives two letters each other's ids."""
    file = save_tiny_llama(folder) / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    file.write_text(json.dumps(tokenizer))
    return folder


def test_a_draft_model_of_another_vocabulary_drafts_by_text_in_one_click(
    chromium: Any, tmp_path: Path, shots: Path
) -> None:
    small = other_vocabulary(tmp_path / "small")

    def with_small(tiny: Catalog) -> Catalog:
        models = {**tiny.targets, str(small): TargetSpec.of_path_or_hub(str(small))}
        return replace(tiny, types={**methods(), **tiny.types}, resolve=models.__getitem__)

    with (
        serving_tiny(tmp_path, adapt=with_small) as served,
        GeneratePage.opened(chromium, served.url) as page,
    ):
        page.pick_method("Draft_Target", "speculative_model")
        page.set("speculative_model", str(small))
        page.short(8)
        page.start("Say abc.")
        page.wait_state("failed")
        alert = page.tab.locator("#pg-panel .alert")
        assert "vocabulary=text" in alert.inner_text()
        page.tab.screenshot(path=shots / "vocabulary.png")
        alert.get_by_role("button", name="Use text").click()
        page.wait_done()
        run = served.host.runs.all()[-1]
        assert run.state == "completed" and run.meta["prompt"] == "Say abc."
        assert served.log.get(run.log_id or "").method["vocabulary"] == "text"  # type: ignore[union-attr]
        page.tab.wait_for_function(
            "document.querySelector('#pg-method-form .pg-field-vocabulary input').value === 'text'"
        )
        assert not alert.is_visible()
        page.check_clean()
