"""A new user's way through the pages: compare three methods, benchmark two, deploy the best."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import presets
from engine.drafters import methods
from playground.catalog import Catalog
from storage import RunLog
from tests.browser.comparing import BOARD, COMPARE_MS, ComparePage
from tests.browser.pages import GeneratePage
from tests.playground.serving import Served, serving
from tests.playground.tiny import save_tiny_llama, tiny_catalog

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skip(reason="not yet steady on a busy machine"),
]
SHIPPED = ("plain", "ngram", "suffix", "token-recycling")
PROMPT = "Say abc abc abc abc, and then once more: abc abc"
SHORT, LONG = "N-gram look-up · max_draft_len 2", "N-gram look-up · max_draft_len 10"


def shipped_catalog(folder: Path) -> Catalog:
    """The shipped presets that need no weights, on a tiny target."""
    tiny = tiny_catalog(save_tiny_llama(folder / "tiny"))
    return Catalog(
        targets=tiny.targets,
        presets={name: presets.methods()[name] for name in SHIPPED},
        types=methods(),
        suites=tiny.suites,
        resolve=tiny.resolve,
    )


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("walk")
    log = RunLog.open(str(folder / "runs.db"))
    with serving(shipped_catalog(folder), log, folder / "cache") as served:
        yield served
    log.close()


def test_from_three_methods_to_a_deployed_config(
    page: GeneratePage, served: Served, shots: Path
) -> None:
    compare_three(page, shots)
    best = benchmark_two(page, served, shots)
    deploy(page, best, shots)


def compare_three(page: GeneratePage, shots: Path) -> None:
    """Pick three methods, compare them, read the verdict and the reasons."""
    compare = ComparePage(page)
    compare.go()
    compare.choose(3)
    compare.pick_method(0, "N-gram look-up", "max_matching_ngram_size")
    compare.set(0, "max_draft_len", "2")
    compare.pick_method(1, "N-gram look-up", "max_matching_ngram_size")
    compare.pick_method(2, "Suffix automaton", "max_tree_depth")
    compare.short(32)
    compare.compare(PROMPT)
    assert compare.rows() == ["Plain decoding", SHORT, LONG, "Suffix automaton"]
    for name in compare.rows()[1:]:
        assert compare.cell(name, "verdict") == "identical"
        assert "×" in compare.cell(name, "speedup")
        assert "MAT · t_plain / (t_draft + t_verify + t_other)" in compare.why(name)
        assert "a step saves" in compare.why(name)
    page.tab.wait_for_selector(f"{BOARD} .lane.over >> text=4th", timeout=COMPARE_MS)
    page.tab.screenshot(path=shots / "walk-1-compare.png", full_page=True)


def benchmark_two(page: GeneratePage, served: Served, shots: Path) -> int:
    """Benchmark two of them over a small suite; returns the best one's max_draft_len."""
    tab = page.tab
    tab.get_by_role("tab", name="Benchmark").click()
    tab.wait_for_selector("#pg-bench .configuration")
    while tab.locator("#pg-bench .configuration").count():
        tab.locator("#pg-bench .configuration .top button").first.click()
    for at, (name, length) in enumerate((("short", "2"), ("long", "10"))):
        tab.locator("#pg-bench .adder select").select_option("ngram")
        tab.click("#pg-bench [data-do=add]")
        card = tab.locator("#pg-bench .configuration").nth(at)
        card.wait_for()
        card.locator(".name").fill(name)
        card.locator("summary").click()
        card.locator("[data-field=max_draft_len] input").fill(length)
    for field, value in (("repeats", "2"), ("max_new_tokens", "16")):
        tab.locator(f"#pg-bench .settings [data-field={field}] input").fill(value)
    tab.locator("#pg-bench [data-field=ignore_eos] input").check()
    tab.wait_for_function(
        "() => !document.querySelector('#pg-bench .primary').disabled && "
        "document.querySelector('#pg-bench .outlook').textContent.includes('3 configurations')"
    )
    tab.click("#pg-bench .primary")
    tab.wait_for_selector('#pg-bench .results[data-state="completed"]', timeout=COMPARE_MS)
    table = tab.locator('#pg-bench [aria-label="Summary"]')
    table.wait_for()
    ratios = {name: ratio_of(table, name) for name in ("short", "long")}
    assert "identical" in table.locator("[data-row=short]").inner_text()
    assert len(served.log.benchmarks.list(9)) == 1
    tab.screenshot(path=shots / "walk-2-benchmark.png", full_page=True)
    best = max(ratios, key=lambda name: ratios[name])
    tab.click(f'#pg-bench [aria-label="deploy {best}"]')
    return {"short": 2, "long": 10}[best]


def ratio_of(table: Any, name: str) -> float:
    """A configuration's speedup as the benchmark's summary shows it."""
    words = table.locator(f"[data-row={name}] td").first.inner_text()
    return float(str(words).split("×")[0])


def deploy(page: GeneratePage, max_draft_len: int, shots: Path) -> None:
    """Read the best one's config for TensorRT-LLM and for vLLM."""
    tab, board = page.tab, "#pg-deploy .deploy"
    tab.wait_for_selector(f"{board} .engine")
    files = {}
    for engine, name in (("trtllm", "config.yaml"), ("vllm", "speculative_config.json")):
        tab.click(f"{board} [data-engine={engine}]")
        code = tab.locator(f'{board} [data-file="{name}"] code')
        code.wait_for()
        files[engine] = code.inner_text()
        tab.screenshot(path=shots / f"walk-3-{engine}.png", full_page=True)
    trtllm = yaml.safe_load(files["trtllm"])["speculative_config"]
    assert trtllm["decoding_type"] == "NGram" and trtllm["max_draft_len"] == max_draft_len
    vllm = json.loads(files["vllm"])
    assert vllm["method"] == "ngram" and vllm["num_speculative_tokens"] == max_draft_len
