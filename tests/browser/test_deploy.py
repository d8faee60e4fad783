"""From a run to a config on the Deploy page, and from a config to a run, in a real browser."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.drafters import methods, parse_method
from engine.model.sources import TargetSpec
from playground.host.catalog import Catalog
from presets import MethodPreset
from tests.browser.pages import LISTED, NARROW, GeneratePage, saved
from tests.playground.asks import finished, start
from tests.playground.serving import Served, serving_tiny
from tests.playground.tiny import ScriptedConfig

pytestmark = pytest.mark.browser
FILES = "#pg-deploy-main [id^=pg-deploy-file] .cm-content"
ENGINE = "#pg-deploy-engine input"
MEDUSA = parse_method({"decoding_type": "Medusa", "speculative_model": "owner/heads"})


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A page over a tiny target, with every method of the engine on its menus."""

    def with_heads(tiny: Catalog) -> Catalog:
        heads = MethodPreset(name="heads", title="Medusa heads", config=MEDUSA)
        return dataclasses.replace(
            tiny,
            presets={**tiny.presets, "heads": heads},
            types={**methods(), "Scripted": ScriptedConfig},
            resolve=lambda name: tiny.targets.get(name) or TargetSpec.of_path_or_hub(name),
        )

    with serving_tiny(tmp_path_factory.mktemp("deploy"), adapt=with_heads) as served:
        finished(start(served.host, method="type:NGram"))
        yield served


def opened(page: GeneratePage) -> Any:
    """The Deploy page, ready."""
    page.go("Deploy")
    page.tab.wait_for_selector(FILES)
    return page.tab


def pick(page: GeneratePage, engine: str) -> None:
    page.tab.click(f"{ENGINE}[value={engine}]")
    page.tab.wait_for_selector(f"{ENGINE}[value={engine}]:checked")


def release(page: GeneratePage, version: str) -> None:
    page.tab.fill("#pg-deploy-version input", version)
    page.tab.keyboard.press("Enter")


def file_text(page: GeneratePage, name: str, *, has: str = "") -> str:
    """A file on show, once it has some text."""
    block = f'[id^=pg-deploy-file]:has(label:text-is("{name}"))'
    page.tab.locator(f"{block} .cm-content", has_text=has).wait_for()
    return str(page.tab.locator(f"{block} .cm-content").inner_text())


def pick_method(page: GeneratePage, title: str) -> None:
    page.tab.click("#pg-deploy-of input")
    page.tab.locator(LISTED, has_text=title).first.click()


def test_the_newest_run_becomes_every_engine_s_config(page: GeneratePage, served: Served) -> None:
    run = finished(start(served.host, method="type:NGram", settings={"max_draft_len": 7}))
    tab = opened(page)
    assert "max_draft_len: 7" in file_text(page, "config.yaml")
    assert tab.locator(ENGINE).count() == 8
    texts = "spans => spans.every(span => span.scrollWidth <= span.clientWidth)"
    for width in (1440, 390):
        tab.set_viewport_size({"width": width, "height": 1000})
        spans = tab.locator("#pg-deploy-engine label > span")
        assert spans.evaluate_all(texts), "a verdict is cut off"
    tab.set_viewport_size({"width": 1400, "height": 1000})
    tab.locator("#pg-deploy-summary", has_text="tok/s").wait_for()
    pick(page, "vllm")
    values = json.loads(file_text(page, "speculative_config.json"))
    assert values["method"] == "ngram" and values["num_speculative_tokens"] == 7
    assert "pool rules" in tab.locator("#pg-deploy-told .warning").inner_text()
    tab.wait_for_url("**deploy=vllm&**")
    assert f"of=run%3A{run.log_id}" in tab.url
    page.reload()
    assert json.loads(file_text(page, "speculative_config.json")) == values
    pick(page, "trtllm")
    file_text(page, "config.yaml")
    tab.click("#pg-deploy-more button")
    for name in ("config.yaml", "bench.sh"):
        file, text = saved(tab, f"#pg-deploy-downloads a[download='{name}']")
        assert (file, text.rstrip()) == (name, file_text(page, name).rstrip())


def test_engines_are_picked_by_keyboard_and_releases_change_the_files(page: GeneratePage) -> None:
    tab = opened(page)
    pick_method(page, "Medusa heads")
    tab.locator("#pg-deploy-summary", has_text="Medusa heads").wait_for()
    tab.locator(f"{ENGINE}[value=trtllm]").focus()
    tab.keyboard.press("Tab")
    tab.keyboard.press("Space")
    tab.wait_for_selector(f"{ENGINE}[value=vllm]:checked:focus")
    tab.locator("#pg-deploy-told .refusal", has_text="vLLM 0.33 removed Medusa.").wait_for()
    release(page, "0.32")
    assert json.loads(file_text(page, "speculative_config.json"))["method"] == "medusa"
    assert "the tree of 9 nodes is dropped" in tab.locator("#pg-deploy-told").inner_text()
    pick(page, "triton")
    tab.locator("#pg-deploy-told .refusal", has_text="Triton served Medusa").wait_for()
    release(page, "1.2")
    assert 'string_value: "{0}, {1}, {0, 0}' in file_text(page, "config.pbtxt")


def test_a_command_of_an_engine_is_pasted_and_run(page: GeneratePage, served: Served) -> None:
    """On the Generate page; what is wrong in it, or ignored, stands at the box."""
    tab, said = page.tab, ".pg-field-method_file{} .info-text"
    tab.click("#pg-method-file button")
    box = tab.locator("#pg-method-file-text textarea")
    box.fill("vllm serve a/b --spec-method ngram --spec-tokens 5")
    tab.locator(said.format(".faulty")).wait_for()
    tab.click("#pg-method-file-format input")
    tab.locator(LISTED, has_text="vLLM").last.click()
    tab.locator(said.format(":not(.faulty)"), has_text="Its target was a/b.").wait_for()
    box.fill('{"method": "ngram"}')
    tab.locator(said.format(".faulty"), has_text="num_speculative_tokens is missing").wait_for()
    box.fill('{"method": "ngram", "num_speculative_tokens": 5, "colour": 1}')
    tab.locator(said.format(".faulty"), has_text="vLLM has no setting colour").wait_for()
    box.fill(
        '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4,'
        ' "enforce_eager": true}'
    )
    tab.locator(said.format(":not(.faulty)"), has_text="ignored: enforce_eager").wait_for()
    length = tab.locator("#pg-method-form .pg-field-max_draft_len input").first
    assert length.input_value() == "5"
    page.short(12)
    page.generate("Use it.")
    stored = served.log.get(str(served.host.runs.all()[-1].log_id))
    assert stored is not None and stored.method["max_matching_ngram_size"] == 4


def test_a_combination_opens_on_the_part_that_an_engine_takes(page: GeneratePage) -> None:
    tab = opened(page)
    pick_method(page, "Combined")
    part = tab.locator("#pg-deploy-part")
    part.locator("label", has_text="Both together").wait_for()
    chosen = part.locator("label:has(input:checked)").inner_text()
    assert chosen.endswith("alone")
    assert "No engine runs this combination as it is" in tab.inner_text("#pg-deploy-told")
    assert tab.locator(f"{ENGINE}:checked").count() == 1
    tab.wait_for_selector(FILES)


def test_the_table_of_methods_and_engines_fits_a_narrow_window(
    chromium: Any, served: Served, shots: Path
) -> None:
    path = "/?deploy=vllm&of=method:heads&target=tiny&version=0.32"
    with GeneratePage.opened(chromium, served.url, path=path, viewport=NARROW) as page:
        tab = page.tab
        assert "owner/heads" in file_text(page, "serve.sh")
        assert tab.input_value("#pg-deploy-version input").startswith("0.32")
        tab.click("#pg-deploy-all button")
        rows = tab.locator("#pg-deploy-table tbody tr")
        rows.first.wait_for()
        assert rows.count() == len(methods())  # the header, and all but plain decoding
        vllm = rows.filter(has_text="Medusa").first.locator("td").nth(2)
        assert "removed Medusa" in (vllm.get_attribute("title") or "")
        assert vllm.inner_text().startswith("✕")
        page.check_width(shots, "deploy")
        page.check_clean()
