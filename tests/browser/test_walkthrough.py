"""A new user's way through the pages: compare three methods, benchmark two, deploy the best.

Over a tiny target, with the shipped methods that need no weights.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

import presets
from engine.drafters import methods
from playground.host.catalog import Catalog
from tests.browser.comparing import ComparePage
from tests.browser.pages import GeneratePage
from tests.browser.test_benchmark import add, leave_out, set_extent, start, wait_for
from tests.playground.serving import Served, serving_tiny

pytestmark = pytest.mark.browser
SHIPPED = ("plain", "ngram", "suffix", "token-recycling")
NGRAM, SUFFIX = "N-gram lookup", "Suffix automaton"
LENGTHS = {"short": 2, "long": 10}


def shipped_catalog(tiny: Catalog) -> Catalog:
    return replace(tiny, presets={n: presets.methods()[n] for n in SHIPPED}, types=methods())


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving_tiny(tmp_path_factory.mktemp("walk"), adapt=shipped_catalog) as served:
        yield served


def test_from_three_methods_to_a_deployed_config(page: GeneratePage, shots: Path) -> None:
    compare_three(page)
    page.tab.screenshot(path=shots / "walk-1.png", full_page=True)
    best = benchmark_two(page)
    page.tab.screenshot(path=shots / "walk-2.png", full_page=True)
    trtllm, vllm = deploy(page, best, shots)
    assert trtllm["decoding_type"] == "NGram" and trtllm["max_draft_len"] == LENGTHS[best]
    assert vllm["method"] == "ngram" and vllm["num_speculative_tokens"] == LENGTHS[best]


def compare_three(page: GeneratePage) -> None:
    """Pick three methods, compare them, read the verdict and the reasons."""
    compare = ComparePage(page)
    compare.go()
    compare.leave(0)
    for number, (method, length) in enumerate(((NGRAM, "2"), (NGRAM, "10"), (SUFFIX, None))):
        compare.add(method)
        if length:
            compare.set(number, "max_draft_len", length)
    compare.short(32)
    compare.compare("Say abc abc abc abc, and then once more: abc abc")
    plain, *names = compare.rows()
    assert plain == "Plain decoding" and len(names) == 3
    ratios = {}
    for name in names:
        assert compare.cell(name, "answers") == "identical"
        speedup = compare.cell(name, "speedup")
        if "unreliable baseline" not in speedup:  # on a busy machine
            ratios[name] = float(speedup.split("×")[0])
            assert "tokens a step, and a step takes" in compare.why(name)
    headline = page.tab.inner_text("#pg-cmp-table .headline")
    if ratios:
        assert max(ratios.values()) in [r for name, r in ratios.items() if name in headline]


def benchmark_two(page: GeneratePage) -> str:
    """Benchmark two of them over a small suite; returns the best one's name."""
    tab = page.tab
    tab.get_by_role("tab", name="Benchmark").click()
    cards = tab.locator("#pg-benchmark-form .pg-group")
    cards.nth(1).wait_for()
    for _ in "12":
        leave_out(tab)
    for name, length in LENGTHS.items():
        add(tab, NGRAM, name, max_draft_len=str(length))
    set_extent(tab, limit_per_category="1", repeats="2", max_new_tokens="16")
    tab.locator("#pg-benchmark-extent .pg-field-ignore_eos input").check()
    outlook = tab.locator("#pg-benchmark-outlook", has_text="3 configurations")
    assert "if every answer reaches its maximum length" in outlook.inner_text()
    start(tab)
    wait_for(tab, "completed")
    rows = {name: tab.locator(f"#pg-benchmark-summary [data-row={name}]") for name in LENGTHS}
    rows["short"].filter(has_text="identical").wait_for()
    headline = tab.inner_text("#pg-benchmark-head .headline")
    best = next((name for name in rows if re.search(rf"\b{name}\b", headline)), None)
    if best is not None:  # on a busy machine none may be surely faster
        assert rows[best].locator("td").nth(1).inner_text().split("×")[0] in headline
    return best or "short"


def deploy(page: GeneratePage, best: str, shots: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The best one's config for TensorRT-LLM and for vLLM."""
    page.pick("benchmark-configuration", best)
    page.tab.click("#pg-benchmark-deploy")
    texts = []
    for engine, name in (("trtllm", "config.yaml"), ("vllm", "speculative_config.json")):
        page.tab.click(f"#pg-deploy-engine input[value={engine}]")
        code = page.tab.locator(f'[id^=pg-deploy-file]:has(label:text-is("{name}")) .cm-content')
        texts.append(code.inner_text())
        page.tab.screenshot(path=shots / f"walk-3-{engine}.png", full_page=True)
    return yaml.safe_load(texts[0])["speculative_config"], json.loads(texts[1])
