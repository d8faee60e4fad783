"""The Benchmark page in a real browser."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from storage import RunLog
from tests.browser.pages import WAIT_MS, GeneratePage
from tests.playground.compare.corrupted import with_corrupted
from tests.playground.serving import Served, serving
from tests.playground.tiny import ScriptedDrafter, save_tiny_llama, tiny_catalog

pytestmark = pytest.mark.browser
RESULTS = "#pg-bench .results"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A page that also offers a method with a mistake in its verifier."""
    folder = tmp_path_factory.mktemp("benchmark")
    log = RunLog.open(str(folder / "runs.db"))
    catalog = with_corrupted(tiny_catalog(save_tiny_llama(folder / "tiny")))
    with serving(catalog, log, folder / "cache") as served:
        yield served
    log.close()


@pytest.fixture(autouse=True)
def quick_script(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers are short here, so the scripted drafter need not know more."""
    monkeypatch.setattr(ScriptedDrafter, "KNOWN", 20)


@pytest.fixture
def bench(page: GeneratePage) -> Iterator[Any]:
    """The tab, on the Benchmark page with two small configurations."""
    page.tab.get_by_role("tab", name="Benchmark").click()
    page.tab.wait_for_selector("#pg-bench .configuration")
    yield page.tab


def add(tab: Any, method: str, name: str, **settings: str) -> None:
    """Add a configuration, name it and change its settings."""
    before = tab.locator("#pg-bench .configuration").count()
    tab.locator("#pg-bench .adder select").select_option(method)
    tab.click("#pg-bench [data-do=add]")
    card = tab.locator("#pg-bench .configuration").nth(before)
    card.wait_for()
    card.locator(".name").fill(name)
    if settings:
        card.locator("summary").click()
    for field, value in settings.items():
        card.locator(f"[data-field={field}]").locator("input, textarea, select").fill(value)


def set_extent(tab: Any, **values: str) -> None:
    for field, value in values.items():
        tab.locator(f"#pg-bench .settings [data-field={field}] input").fill(value)
    tab.locator("#pg-bench [data-field=ignore_eos] input").check()


def start(tab: Any) -> None:
    """Start; returns once it, and not one of before, is on show."""
    picker = "#pg-bench select[aria-label=benchmark]"
    tab.wait_for_selector(f"{RESULTS}[data-listed]")
    before = tab.locator(picker).evaluate("node => node.value")
    tab.wait_for_function(
        "() => !document.querySelector('#pg-bench .primary').disabled"
        " && document.querySelector('#pg-bench .outlook').textContent.includes('request')"
    )
    tab.click("#pg-bench .primary")
    tab.wait_for_function(
        "([at, old]) => document.querySelector(at).value !== old",
        arg=[picker, before],
        timeout=WAIT_MS,
    )


def wait_for(tab: Any, state: str) -> None:
    tab.wait_for_selector(f'{RESULTS}[data-state="{state}"]', timeout=WAIT_MS)


def test_a_benchmark_runs_shows_its_report_and_is_downloaded(
    bench: Any, served: Served, shots: Path
) -> None:
    bench.locator("#pg-bench .configuration button").first.click()
    add(bench, "scripted", "three", max_draft_len="3")
    add(bench, "scripted", "two", scripted_choices="[[0], [0, 0]]")
    set_extent(bench, repeats="2", max_new_tokens="12")
    start(bench)
    wait_for(bench, "completed")

    bench.wait_for_selector('[data-row="two"] .good')
    summary = bench.locator("#pg-bench .frame").first
    assert summary.locator("tbody tr").count() == 3
    assert "identical" in summary.inner_text()
    assert bench.locator('#pg-bench th[title*="accepted draft tokens / Σ steps"]').count() > 0
    bench.get_by_role("tab", name="MAT").click()
    mat = bench.locator('[aria-label="By kind of task: mat"] [data-row="three"]').inner_text()
    assert "/" in mat
    bench.wait_for_selector("[data-plot=context][data-drawn]", timeout=WAIT_MS)
    assert bench.locator("[data-plot=speedup] .bars path").count() > 0
    bench.locator("select[aria-label^=configuration]").select_option("two")
    assert "Request latency (ms)" in bench.locator('[aria-label="Latency of two"]').inner_text()
    bench.screenshot(path=shots / "benchmark.png", full_page=True)

    stored = served.log.benchmarks.list(1)[0]
    with bench.expect_download() as download:
        bench.click('#pg-bench [data-do="report.json"]')
    report = json.loads(Path(download.value.path()).read_text())
    assert report["benchmark"] == stored.id and report["status"] == "completed"
    assert len(report["requests"]) == 2 * 3 * 2
    with bench.expect_download() as download:
        bench.click('#pg-bench [data-do="speedup.csv"]')
    rows = list(csv.DictReader(io.StringIO(Path(download.value.path()).read_text())))
    assert {row["configuration"] for row in rows} == {"plain", "three", "two"}


def test_stop_keeps_what_is_done_and_resume_completes_it_in_another_tab(
    bench: Any, chromium: Any, served: Served
) -> None:
    bench.locator("#pg-bench .configuration button").first.click()
    add(bench, "scripted", "slow", delay_ms="60")
    set_extent(bench, repeats="3", max_new_tokens="12")
    start(bench)
    bench.wait_for_function(
        "() => /^[2-9] of 12/.test(document.querySelector('#pg-bench .words').textContent)",
        timeout=WAIT_MS,
    )
    bench.click("#pg-bench [data-do=stop]")
    wait_for(bench, "cancelled")
    stored = served.log.benchmarks.list(1)[0]
    with GeneratePage.opened(chromium, served.url, path=f"/?benchmark={stored.id}") as other:
        wait_for(other.tab, "cancelled")
        other.tab.click("#pg-bench [data-do=resume]")
        wait_for(other.tab, "completed")
        assert "12 of 12 requests done" in other.tab.inner_text("#pg-bench .head")
        other.check_clean()


def test_answers_that_a_fault_changed_are_called_so(bench: Any) -> None:
    bench.locator("#pg-bench .configuration button").first.click()
    bench.locator("#pg-bench select[aria-label=dtype]").select_option("float32")
    add(bench, "corrupted", "broken", wrong_at="2")
    set_extent(bench, repeats="1", max_new_tokens="12")
    start(bench)
    wait_for(bench, "completed")
    verdict = bench.locator("#pg-bench [data-row=broken] .bad", has_text="a fault")
    verdict.wait_for()
    assert "0 of 2" in verdict.inner_text()
    bench.click("#pg-bench summary >> text=2 answers that differ")
    lines = bench.locator("#pg-bench .lines li")
    assert "no rounding does this" in lines.first.inner_text()
    assert "float32: top-2 logit gap" in lines.first.locator(".gap").inner_text()
    href = bench.locator("#pg-bench [data-do=link]").get_attribute("href")
    assert "benchmark=" in href


def test_a_question_file_is_read_and_a_broken_one_refused(bench: Any, tmp_path: Path) -> None:
    good, bad = tmp_path / "question.jsonl", tmp_path / "bad.jsonl"
    good.write_text('{"question_id": 1, "category": "writing", "turns": ["One.", "Two."]}\n')
    bad.write_text('{"question": "none"}\n')
    bench.set_input_files("#pg-bench input[type=file]", good)
    row = bench.locator("#pg-bench .suite", has_text="question.jsonl")
    row.wait_for()
    assert row.locator("input").is_checked()
    bench.set_input_files("#pg-bench input[type=file]", bad)
    refused = bench.locator("#pg-bench .file-fault", has_text="bad.jsonl")
    refused.wait_for()
    assert "a prompt needs `turns`" in refused.inner_text()
    bench.locator("#pg-bench [data-field=repeats] input").fill("3")
    bench.locator("#pg-bench .outlook", has_text="× 3 repeats").wait_for()
    assert refused.is_visible(), "a new outlook must not wipe what was said of the file"
    bench.set_input_files("#pg-bench input[type=file]", good)
    refused.wait_for(state="hidden")


def test_what_cannot_run_is_said_before_it_is_started(bench: Any) -> None:
    for tick in bench.locator("#pg-bench .suite input").all():
        tick.uncheck()
    bench.wait_for_selector("#pg-bench .outlook.faulty")
    assert "No suite is ticked" in bench.inner_text("#pg-bench .outlook")
    assert bench.locator("#pg-bench .primary").is_disabled()
    bench.locator("#pg-bench .suite input").first.check()
    bench.wait_for_selector("#pg-bench .outlook:not(.faulty)")
    bench.locator("#pg-bench [data-field=repeats] input").fill("many")
    bench.wait_for_selector("#pg-bench .outlook.faulty")
    assert "repeats must be" in bench.inner_text("#pg-bench .outlook")


def test_it_leads_to_its_runs_and_to_the_deploy_page(bench: Any) -> None:
    set_extent(bench, repeats="1", max_new_tokens="4")
    start(bench)
    wait_for(bench, "completed")
    bench.click("#pg-bench [data-do=runs]")
    bench.locator("#pg-runs-further .token", has_text="benchmark").wait_for()
    bench.locator("#pg-runs .count", has_text="of 4").wait_for()
    bench.get_by_role("tab", name="Benchmark").click()
    bench.click('#pg-bench [data-row="scripted"] [data-do=deploy]')
    bench.wait_for_selector("#pg-deploy-engine")
    assert bench.get_by_role("tab", name="Deploy").get_attribute("aria-selected") == "true"


def test_a_dead_link_says_so(chromium: Any, served: Served) -> None:
    with GeneratePage.opened(chromium, served.url, path="/?benchmark=nothing") as page:
        page.tab.wait_for_selector("#pg-bench .alert:not([hidden])", timeout=WAIT_MS)
        assert "No benchmark 'nothing'" in page.tab.inner_text("#pg-bench .alert")
        page.check_clean()
