"""The Benchmark page in a real browser."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser.pages import WAIT_MS, GeneratePage, box_of, saved
from tests.playground.compare.corrupted import with_corrupted
from tests.playground.serving import Served, serving_tiny
from tests.playground.tiny import ScriptedDrafter

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A page whose log has these benchmarks only; its form begins with two configurations."""
    with serving_tiny(tmp_path_factory.mktemp("benchmark"), adapt=with_corrupted) as served:
        yield served


@pytest.fixture(autouse=True)
def quick_script(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers are short here, so the scripted drafter need not know more."""
    monkeypatch.setattr(ScriptedDrafter, "KNOWN", 20)


@pytest.fixture
def bench(page: GeneratePage) -> Iterator[Any]:
    """The tab, on the Benchmark page with one configuration of the two that it begins with."""
    page.go("Benchmark")
    page.tab.locator("#pg-benchmark-form .pg-group").nth(1).wait_for()
    page.tab.wait_for_selector("#pg-benchmark-extent .pg-field-repeats")
    leave_out(page.tab, 1)
    yield page.tab


def add(tab: Any, method: str, name: str, **settings: str) -> None:
    """Add a configuration, name it and change its settings."""
    before = tab.locator("#pg-benchmark-form .pg-group").count()
    GeneratePage(tab).pick("benchmark-method", method)
    tab.click("#pg-benchmark-add")
    card = tab.locator("#pg-benchmark-form .pg-group").nth(before)
    card.wait_for()
    card.locator("button.label-wrap").first.click()
    for field, value in {"name": name, **settings}.items():
        box = box_of(card, field)
        for fold in card.locator(".pg-more", has=tab.locator(f".pg-field-{field}")).all():
            if not box.is_visible():
                fold.locator("button.label-wrap").first.click()
        box.fill(value)


def leave_out(tab: Any, number: int = 0) -> None:
    """Drop a configuration of the form."""
    card = tab.locator("#pg-benchmark-form .pg-group").nth(number)
    card.locator("button.label-wrap").first.click()
    card.locator(".pg-remove").click()
    card.wait_for(state="detached")


def set_extent(tab: Any, **fields: str) -> None:
    for field, value in fields.items():
        box_of(tab.locator("#pg-benchmark-extent"), field).fill(value)


def start(tab: Any) -> None:
    """Start; returns once it, and not one of before, is on show."""
    link = "document.querySelector('#pg-benchmark-head a')?.href"
    before = tab.evaluate(link)
    tab.wait_for_timeout(500)
    tab.locator("#pg-benchmark-outlook", has_text="request").wait_for()
    tab.click("#pg-benchmark-start:enabled")
    tab.wait_for_function(f"old => ({link} ?? old) !== old", arg=before, timeout=WAIT_MS)


def wait_for(tab: Any, state: str) -> None:
    tab.wait_for_selector(f'#pg-benchmark-state [data-state="{state}"]', timeout=WAIT_MS)


def test_a_benchmark_shows_and_saves_its_report_and_leads_to_other_pages(
    bench: Any, served: Served, shots: Path
) -> None:
    leave_out(bench)
    add(bench, "Scripted tree", "three", max_draft_len="3")
    add(bench, "Scripted tree", "two", scripted_choices="[[0], [0, 0]]")
    set_extent(bench, repeats="2", max_new_tokens="12")
    start(bench)
    wait_for(bench, "completed")

    bench.wait_for_selector('#pg-benchmark-summary [data-row="two"] .good')
    summary = bench.locator("#pg-benchmark-summary")
    assert summary.locator("tbody tr").count() == 3
    assert "identical" in summary.inner_text()
    assert summary.locator('th [data-about*="accepted draft tokens / Σ steps"]').count() > 0
    bench.get_by_label("MAT", exact=True).check()
    mat = bench.locator('[aria-label="By kind of task: mat"] [data-row="three"]')
    mat.wait_for()
    assert "/" in mat.inner_text()
    bench.wait_for_selector("#pg-benchmark-plot .bars path", timeout=WAIT_MS, state="attached")
    bench.get_by_label("tok/s over context length").check()
    bench.locator("#pg-benchmark-plot", has_text="tokens of context").wait_for(timeout=WAIT_MS)
    bench.get_by_label("MAT over context length").check()
    bench.locator("#pg-benchmark-plot .ytitle", has_text="MAT").wait_for(timeout=WAIT_MS)
    GeneratePage(bench).pick("benchmark-configuration", "two")
    latency = bench.locator('[aria-label="Latency of two"]')
    latency.wait_for()
    assert "Request latency (ms)" in latency.inner_text()
    bench.screenshot(path=shots / "benchmark.png", full_page=True)

    stored = served.log.benchmarks.list(1)[0]
    report = json.loads(saved(bench, "#pg-benchmark-report >> text=report.json")[1])
    assert report["benchmark"] == stored.id and report["status"] == "completed"
    assert len(report["requests"]) == 2 * 3 * 2
    bench.click("#pg-benchmark-deploy")
    bench.wait_for_selector("#pg-deploy-engine")
    assert bench.get_by_role("tab", name="Deploy").get_attribute("aria-selected") == "true"
    GeneratePage(bench).go("Benchmark")
    bench.locator("#pg-benchmark-head a", has_text="runs").click()
    bench.locator("#pg-runs-further .token", has_text="benchmark").wait_for()
    bench.locator("#pg-runs .count", has_text="of 12").wait_for()


def test_stop_keeps_what_is_done_and_resume_completes_it_in_another_tab(
    bench: Any, chromium: Any, served: Served
) -> None:
    leave_out(bench)
    add(bench, "Scripted tree", "slow", delay_ms="60")
    set_extent(bench, repeats="3", max_new_tokens="12")
    start(bench)
    bench.locator("#pg-benchmark-state .text", has_text=re.compile("^[2-9] of 12")).wait_for()
    bench.click("#pg-benchmark-stop")
    wait_for(bench, "cancelled")
    stored = served.log.benchmarks.list(1)[0]
    with GeneratePage.opened(chromium, served.url, path=f"/?benchmark={stored.id}") as other:
        wait_for(other.tab, "cancelled")
        other.tab.click("#pg-benchmark-resume")
        wait_for(other.tab, "completed")
        other.tab.locator("#pg-benchmark-head", has_text="3 repeats = 12 requests").wait_for()
        other.check_clean()


def test_a_question_file_is_read_and_a_broken_one_refused(bench: Any, tmp_path: Path) -> None:
    good, bad = tmp_path / "question.jsonl", tmp_path / "bad.jsonl"
    good.write_text('{"question_id": 1, "category": "writing", "turns": ["One.", "Two."]}\n')
    bad.write_text('{"question": "none"}\n')
    files = bench.locator("#pg-benchmark input[type=file]")
    files.set_input_files(good)
    row = bench.locator("#pg-benchmark-suites label", has_text="question.jsonl")
    row.wait_for()
    assert row.locator("input").is_checked()
    files.set_input_files(bad)
    refused = bench.locator("#pg-benchmark-file-message", has_text="bad.jsonl")
    refused.wait_for()
    assert "a prompt needs `turns`" in refused.inner_text()
    set_extent(bench, repeats="3")
    bench.locator("#pg-benchmark-outlook", has_text="× 3 repeats").wait_for()
    assert refused.is_visible(), "a new outlook must not wipe what was said of the file"
    files.set_input_files(good)
    refused.wait_for(state="hidden")


def test_an_invalid_benchmark_is_reported_before_it_starts(bench: Any) -> None:
    for tick in bench.locator("#pg-benchmark-suites input").all():
        tick.uncheck()
    bench.wait_for_selector("#pg-benchmark-outlook .faulty")
    assert "No suite is selected" in bench.inner_text("#pg-benchmark-outlook")
    assert bench.locator("#pg-benchmark-start").is_disabled()
    bench.locator("#pg-benchmark-suites input").first.check()
    bench.wait_for_selector("#pg-benchmark-outlook .pg-said:not(.faulty)")
    set_extent(bench, limit_per_category="many")
    bench.wait_for_selector("#pg-benchmark-outlook .faulty")
    assert "limit_per_category must be" in bench.inner_text("#pg-benchmark-outlook")
