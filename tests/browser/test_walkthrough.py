"""A new user's way through the pages: compare three methods, benchmark two, deploy the best.

Once over a tiny target with the methods that need no weights, and once over the embedded model with
the drafters that are shipped for it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

import presets
from engine.drafters import methods
from playground.host import paths
from playground.host.catalog import Catalog
from storage import RunLog
from tests.browser.comparing import RESULTS, ComparePage
from tests.browser.pages import GeneratePage
from tests.playground.serving import Served, serving, serving_tiny

pytestmark = pytest.mark.browser
SHIPPED = ("plain", "ngram", "suffix", "token-recycling")
PROMPT = "Say abc abc abc abc, and then once more: abc abc"
WRITE = "Write a Python function that returns the n-th Fibonacci number."
WALK_MS = 900_000
"""Longest wait on the embedded model: it is fetched, unpacked, and runs on a busy CPU."""


def shipped_catalog(tiny: Catalog) -> Catalog:
    """The shipped presets that need no weights, on a tiny target."""
    return Catalog(
        targets=tiny.targets,
        presets={name: presets.methods()[name] for name in SHIPPED},
        types=methods(),
        suites=tiny.suites,
        resolve=tiny.resolve,
    )


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving_tiny(tmp_path_factory.mktemp("walk"), adapt=shipped_catalog) as served:
        yield served


@dataclass(frozen=True)
class Pick:
    """A method as both pages offer it.

    Attributes:
        title: on the Compare page.
        key: on the Benchmark page.
        name: what it is called there.
        max_draft_len: set to this; None = as it comes.
    """

    title: str
    key: str
    name: str
    max_draft_len: int | None = None


SHORT = Pick("N-gram lookup", "ngram", "short", 2)
LONG = Pick("N-gram lookup", "ngram", "long", 10)
SUFFIX = Pick("Suffix automaton", "suffix", "suffix")
EAGLE3 = Pick("EAGLE-3", "eagle3-smollm2-135m", "eagle3", 3)
DRAFT = Pick("Draft model", "draft-smollm2-135m", "small", 3)
MEDUSA = Pick("Medusa heads", "medusa-smollm2-135m", "medusa")


def test_from_three_methods_to_a_deployed_config(
    page: GeneratePage, served: Served, shots: Path
) -> None:
    compare_three(page, (SHORT, LONG, SUFFIX), PROMPT, shots)
    best = benchmark_two(page, served, (SHORT, LONG), shots)
    trtllm, vllm = deploy(page, shots)
    length = best.max_draft_len
    assert trtllm["decoding_type"] == "NGram" and trtllm["max_draft_len"] == length
    assert vllm["method"] == "ngram" and vllm["num_speculative_tokens"] == length


@pytest.mark.network
@pytest.mark.slow
def test_the_same_on_the_embedded_model_with_its_shipped_drafters(
    chromium: Any, tmp_path: Path, shots: Path
) -> None:
    log = RunLog.open(str(tmp_path / "runs.db"))
    cache = Path(os.environ.get("PLAYGROUND_CACHE") or paths.cache_dir())
    with (
        serving(Catalog.shipped(), log, cache) as served,
        GeneratePage.opened(chromium, served.url) as page,
    ):
        page.tab.set_default_timeout(WALK_MS)
        compare_three(page, (EAGLE3, DRAFT, MEDUSA), WRITE, shots, dtype="float32")
        best = benchmark_two(page, served, (EAGLE3, DRAFT), shots, dtype="float32")
        trtllm, vllm = deploy(page, shots)
        page.check_clean()
    log.close()
    kinds = {EAGLE3: ("Eagle3", "eagle3"), DRAFT: ("Draft_Target", "draft_model")}
    assert (trtllm["decoding_type"], vllm["method"]) == kinds[best]
    assert trtllm["speculative_model"] == vllm["model"]
    assert Path(vllm["model"], "config.json").is_file()
    assert trtllm["max_draft_len"] == vllm["num_speculative_tokens"] == 3


def compare_three(
    page: GeneratePage,
    picks: tuple[Pick, Pick, Pick],
    prompt: str,
    shots: Path,
    *,
    dtype: str | None = None,
) -> None:
    """Pick three methods, compare them, read the verdict and the reasons."""
    compare = ComparePage(page)
    compare.go()
    if dtype:
        compare.pick("dtype", dtype)
    compare.leave(0)
    for number, pick in enumerate(picks):
        compare.add(pick.title)
        if pick.max_draft_len is not None:
            compare.set(number, "max_draft_len", str(pick.max_draft_len))
    compare.short(32)
    compare.begin(prompt)
    final = f'{RESULTS} [data-final="true"]'
    page.tab.wait_for_selector(final, state="attached", timeout=WALK_MS)
    names = compare.rows()
    assert names[0] == "Plain decoding" and len(names) == 4
    for name, pick in zip(names[1:], picks, strict=True):
        assert name.startswith(pick.title)
        assert compare.cell(name, "answers") == "identical"
        if "unreliable baseline" in compare.cell(name, "speedup"):  # on a busy machine
            continue
        assert "×" in compare.cell(name, "speedup")
        assert "MAT · t_plain / (t_draft + t_verify + t_other)" in compare.why(name)
        assert "tokens a step, and a step takes" in compare.why(name)
    cells = {name: compare.cell(name, "speedup") for name in names[1:]}
    ratios = {name: float(text.split("×")[0]) for name, text in cells.items() if "×" in text}
    said = page.tab.inner_text("#pg-cmp-table .headline")
    if ratios:
        assert max(ratios.values()) in [ratio for name, ratio in ratios.items() if name in said]
    compare.wait_raced(4)
    page.tab.screenshot(path=shots / f"walk-1-{picks[0].key}.png", full_page=True)


def benchmark_two(
    page: GeneratePage,
    served: Served,
    picks: tuple[Pick, Pick],
    shots: Path,
    *,
    dtype: str | None = None,
) -> Pick:
    """Benchmark two of them over a small suite; returns the best one."""
    tab = page.tab
    tab.get_by_role("tab", name="Benchmark").click()
    cards = tab.locator("#pg-benchmark-form .pg-group")
    cards.first.wait_for()
    if dtype:
        page.pick("benchmark-dtype", dtype)
    while (left := cards.count()) > 0:
        cards.first.locator("button.label-wrap").first.click()
        cards.first.locator(".pg-remove").click()
        cards.nth(left - 1).wait_for(state="detached")
    for at, pick in enumerate(picks):
        page.pick("benchmark-method", pick.title)
        tab.click("#pg-benchmark-add")
        cards.nth(at).wait_for()
        cards.nth(at).locator("button.label-wrap").first.click()
        cards.nth(at).locator(".pg-field-name textarea").fill(pick.name)
        length = cards.nth(at).locator(".pg-field-max_draft_len input").first
        length.fill(str(pick.max_draft_len))
        length.blur()
    extent = (("limit_per_category", "1"), ("repeats", "2"), ("max_new_tokens", "16"))
    for field, value in extent:
        box = (
            tab.locator(f"#pg-benchmark-extent .pg-field-{field}").locator("input, textarea").first
        )
        box.fill(value)
    tab.locator("#pg-benchmark-extent .pg-field-ignore_eos input").check()
    outlook = tab.locator("#pg-benchmark-outlook", has_text="3 configurations")
    outlook.wait_for()
    assert "if every answer reaches its maximum length" in outlook.inner_text()
    tab.click("#pg-benchmark-start:enabled")
    tab.wait_for_selector('#pg-benchmark-state [data-state="completed"]', timeout=WALK_MS)
    table = tab.locator("#pg-benchmark-summary")
    table.locator(f"[data-row={picks[0].name}]", has_text="identical").wait_for()
    ratios = {pick: ratio_of(table, pick.name) for pick in picks}
    heads = [one for one in served.log.benchmarks.list(9) if not one.name.startswith("Comparison")]
    assert len(heads) == 1
    said = tab.inner_text("#pg-benchmark-head .headline")
    compared = [pick for pick in picks if ratios[pick]]  # without a number: timed badly
    named = next((pick for pick in compared if re.search(rf"\b{pick.name}\b", said)), None)
    if named is not None:  # on a busy machine none may be surely faster
        assert ratios[named] == max(ratios.values()) and f"{ratios[named]:.2f}×" in said
    best = named or picks[0]
    tab.wait_for_selector("#pg-benchmark-plot .main-svg")
    tab.screenshot(path=shots / f"walk-2-{picks[0].key}.png", full_page=True)
    page.pick("benchmark-configuration", best.name)
    tab.click("#pg-benchmark-deploy")
    return best


def ratio_of(table: Any, name: str) -> float:
    """A configuration's speedup as the benchmark's summary shows it."""
    words = table.locator(f"[data-row={name}] td").nth(1).inner_text()
    return float(words.split("×")[0]) if "×" in words else 0.0


def deploy(page: GeneratePage, shots: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The config on show for TensorRT-LLM and for vLLM."""
    tab = page.tab
    files = {}
    for engine, name in (("trtllm", "config.yaml"), ("vllm", "speculative_config.json")):
        tab.click(f"#pg-deploy-engine input[value={engine}]")
        code = tab.locator(f'[id^=pg-deploy-file]:has(label:text-is("{name}")) .cm-content')
        code.wait_for()
        files[engine] = code.inner_text()
        tab.screenshot(path=shots / f"walk-3-{engine}.png", full_page=True)
    return yaml.safe_load(files["trtllm"])["speculative_config"], json.loads(files["vllm"])
