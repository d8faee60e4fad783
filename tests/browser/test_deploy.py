"""The Deploy page in a real browser: from a run to a config, and from a config to a run."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.drafters import methods, parse_method
from engine.model.sources import TargetSpec
from presets import MethodPreset
from storage import RunLog
from tests.browser.pages import GeneratePage
from tests.playground.asks import finished, start
from tests.playground.serving import Served, serving
from tests.playground.tiny import ScriptedConfig, save_tiny_llama, tiny_catalog

pytestmark = pytest.mark.browser
BOARD = "#pg-deploy .deploy"
MEDUSA = parse_method({"decoding_type": "Medusa", "speculative_model": "owner/heads"})


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A page over a tiny target, with every method of the engine on its menus."""
    folder = tmp_path_factory.mktemp("deploy")
    log = RunLog.open(str(folder / "runs.db"))
    tiny = tiny_catalog(save_tiny_llama(folder / "tiny"))
    heads = MethodPreset(name="heads", title="Medusa heads", config=MEDUSA)
    catalog = dataclasses.replace(
        tiny,
        presets={**tiny.presets, "heads": heads},
        types={**methods(), "Scripted": ScriptedConfig},
        resolve=lambda name: tiny.targets.get(name) or TargetSpec.of_path_or_hub(name),
    )
    with serving(catalog, log, folder / "cache") as served:
        run = start(served.host, method="type:NGram", settings={"max_draft_len": 7})
        assert finished(run).state == "completed"
        yield served
    log.close()


def run_id(served: Served) -> str:
    return str(served.host.runs.all()[0].log_id)


def opened(page: GeneratePage) -> Any:
    """The Deploy page, ready."""
    page.tab.get_by_role("tab", name="Deploy").click()
    page.tab.wait_for_selector(f"{BOARD} .file")
    return page.tab.locator(BOARD)


def pick(page: GeneratePage, engine: str) -> None:
    page.tab.click(f"{BOARD} [data-engine={engine}]")
    page.tab.wait_for_selector(f"{BOARD} [data-engine={engine}][aria-checked=true]")


def file_text(page: GeneratePage, name: str) -> str:
    page.tab.wait_for_selector(f'{BOARD} [data-file="{name}"] code')
    return str(page.tab.locator(f'{BOARD} [data-file="{name}"] code').inner_text())


def pick_method(page: GeneratePage, key: str) -> None:
    page.tab.click(f"{BOARD} [data-kind=method]")
    page.tab.select_option(f'{BOARD} select[aria-label="method"]', key)


def test_the_newest_run_becomes_every_engine_s_config(page: GeneratePage, served: Served) -> None:
    board = opened(page)
    assert "max_draft_len: 7" in file_text(page, "config.yaml")
    assert board.locator(".engine").count() == 6
    assert "tok/s" in board.locator(".summary").inner_text()
    assert "decoding without prefill" in (
        board.locator(".figure").last.get_attribute("title") or ""
    )
    pick(page, "vllm")
    values = json.loads(file_text(page, "speculative_config.json"))
    assert values["method"] == "ngram" and values["num_speculative_tokens"] == 7
    assert "pool rules" in board.locator(".told.warning").inner_text()
    assert "deploy=vllm" in page.tab.url and f"of=run%3A{run_id(served)}" in page.tab.url


def test_engines_are_walked_by_keyboard_and_releases_change_the_files(page: GeneratePage) -> None:
    board = opened(page)
    pick_method(page, "heads")
    page.tab.locator(f"{BOARD} [data-engine=trtllm]").focus()
    page.tab.keyboard.press("ArrowDown")
    page.tab.wait_for_selector(f"{BOARD} [data-engine=vllm][aria-checked=true]:focus")
    page.tab.wait_for_selector(f"{BOARD} .told.refusal")
    assert "vLLM 0.33 removed Medusa." in board.locator(".told.refusal").inner_text()
    page.tab.select_option(f'{BOARD} select[aria-label="engine version"]', "0.32")
    assert json.loads(file_text(page, "speculative_config.json"))["method"] == "medusa"
    assert "the tree of 9 nodes is dropped" in board.locator(".told.warning").inner_text()
    pick(page, "triton")
    page.tab.select_option(f'{BOARD} select[aria-label="engine version"]', "1.2")
    assert 'string_value: "{0}, {1}, {0, 0}' in file_text(page, "config.pbtxt")


def test_copy_buttons_copy_the_file_and_the_command(
    chromium: Any, served: Served, page: GeneratePage
) -> None:
    page.tab.context.grant_permissions(["clipboard-read", "clipboard-write"])
    opened(page)
    pick_method(page, "type:Suffix")
    pick(page, "vllm")
    text = file_text(page, "serve.sh")
    page.tab.click(f'{BOARD} [data-file="serve.sh"] .copy')
    page.tab.wait_for_selector(f'{BOARD} [data-file="serve.sh"] .copy >> text=copied')
    assert page.tab.evaluate("navigator.clipboard.readText()") == text
    page.tab.click(f"{BOARD} >> text=copy command")
    page.tab.wait_for_selector(f"{BOARD} >> text=copied")
    assert page.tab.evaluate("navigator.clipboard.readText()") == (
        "python app.py export --method Suffix --target tiny --to vllm"
    )


def test_a_link_opens_run_engine_and_release(chromium: Any, served: Served) -> None:
    path = f"/?deploy=sglang&of=run:{run_id(served)}&version=0.5.9"
    with GeneratePage.opened(chromium, served.url, path=path) as page:
        assert "ngram-max-match-window-size" in file_text(page, "launch.sh")
        assert page.tab.locator(f"{BOARD} [data-engine=sglang]").get_attribute("aria-checked") == (
            "true"
        )
        page.check_clean()


@pytest.mark.parametrize("of", ["run:nothing", "run:%3Cimg%20src=x%3E", "method:none"])
def test_a_dead_link_says_so_and_the_page_goes_on(chromium: Any, served: Served, of: str) -> None:
    with GeneratePage.opened(chromium, served.url, path=f"/?deploy=vllm&of={of}") as page:
        page.tab.wait_for_selector(f"{BOARD} .alert:not([hidden]), {BOARD} .file")
        pick_method(page, "type:Suffix")
        page.tab.wait_for_selector(f"{BOARD} .file")
        assert page.tab.locator(f"{BOARD} .result > .alert").is_hidden()
        page.check_clean()


def test_a_pasted_config_is_read_and_used_in_generate(page: GeneratePage, served: Served) -> None:
    board = opened(page)
    paste = board.locator(".paste")
    paste.fill('{"method": "ngram"}')
    page.tab.wait_for_selector(f"{BOARD} .found .alert")
    assert "num_speculative_tokens is missing" in board.locator(".found .alert").inner_text()
    paste.fill(
        '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "colour": 1,'
        ' "enforce_eager": true}'
    )
    page.tab.wait_for_selector(f"{BOARD} .found .told.unknown")
    assert "colour" in board.locator(".found .told.unknown").inner_text()
    assert "enforce_eager" in board.locator(".found .told.ignored").inner_text()
    board.get_by_role("button", name="Use in Generate").click()
    page.tab.wait_for_selector("#pg-method-form [data-field=max_matching_ngram_size]")
    box = page.tab.locator("#pg-method-form [data-field=max_draft_len] input").first
    assert box.input_value() == "5"
    page.short(12)
    page.generate("Use it.")
    stored = served.log.get(str(served.host.runs.all()[-1].log_id))
    assert stored is not None and stored.method["max_matching_ngram_size"] == 4


def test_the_table_of_all_methods_tells_every_cell(page: GeneratePage) -> None:
    board = opened(page)
    board.locator(".all summary").click()
    page.tab.wait_for_selector(f"{BOARD} .matrix tbody tr")
    rows = board.locator(".matrix tbody tr")
    assert rows.count() == len(methods()) + 1
    medusa = rows.filter(has_text="Medusa").first.locator("td")
    assert [medusa.nth(i).get_attribute("data-verdict") for i in range(6)] == ["not taken"] * 6
    assert "removed Medusa" in (medusa.nth(1).get_attribute("title") or "")


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1400, 420])
def test_it_fits_and_is_looked_at(
    chromium: Any, served: Served, shots: Path, theme: str, width: int
) -> None:
    size = {"width": width, "height": 1000}
    path = f"/?__theme={theme}&deploy=vllm&of=method:heads&target=tiny&version=0.32"
    with GeneratePage.opened(chromium, served.url, path=path, viewport=size) as page:
        assert "owner/heads" in file_text(page, "serve.sh")
        page.tab.locator(f"{BOARD} .paste").fill(
            '{"method": "eagle3", "model": "a/b", "num_speculative_tokens": 3, "modle": 1}'
        )
        page.tab.wait_for_selector(f"{BOARD} .found .told.unknown")
        page.tab.locator(f"{BOARD} .all summary").click()
        page.tab.wait_for_selector(f"{BOARD} .matrix tbody tr")
        page.tab.screenshot(path=shots / f"deploy-{theme}-{width}.png", full_page=True)
        wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert page.tab.evaluate(wide) <= 0
        page.check_clean()
