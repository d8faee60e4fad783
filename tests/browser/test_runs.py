"""The Runs page in a real browser: filter, open, edit, delete, compare, repeat, carry away."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.browser.pages import WAIT_MS, GeneratePage, held_back, saved
from tests.playground.asks import finished, start, until
from tests.playground.serving import Served, serving_tiny
from tests.storage.conftest import finished_run

pytestmark = pytest.mark.browser
ASKED = "**/gradio_api/run/**"
ROWS = "#pg-runs tbody tr[data-id]"
SEARCH = "#pg-runs-search :is(input, textarea)"


def opened(page: GeneratePage, search: str) -> None:
    """Go to the table and search in it."""
    page.go("Runs")
    page.tab.wait_for_selector(ROWS)
    page.tab.fill(SEARCH, search)
    shows(page, search)


def shows(page: GeneratePage, text: str, *, rows: int | None = None) -> None:
    """Wait until every row has this text, and the table so many rows."""
    page.tab.wait_for_function(
        """([selector, text, rows]) => {
          const found = [...document.querySelectorAll(selector)];
          return found.every((row) => row.textContent.includes(text)) && found.length > 0
            && (rows === null || found.length === rows);
        }""",
        arg=[ROWS, text, rows],
        timeout=WAIT_MS,
    )


def said(page: GeneratePage, words: str) -> None:
    page.tab.wait_for_selector(f"#pg-runs-message .pg-said >> text={words}", timeout=WAIT_MS)


def bring(page: GeneratePage, file: Path) -> None:
    """Import a file."""
    with page.tab.expect_file_chooser() as chooser:
        page.tab.click("#pg-runs-import")
    chooser.value.set_files(file)


def test_a_run_opens_from_the_table_and_scrubs(page: GeneratePage, served: Served) -> None:
    page.pick_method("Scripted tree", "max_draft_len")
    page.short()
    page.generate("Find me later.")
    text = page.text()
    served.host.runs.__init__()  # type: ignore[misc]
    page.go("Runs")
    row = page.tab.locator("#pg-runs tbody tr", has_text="Find me later.").first
    row.click()
    page.wait_done("pg-run-panel")
    assert page.text("pg-run-panel") == text
    assert page.tab.locator("#pg-run-panel .turn.user").inner_text() == "Find me later."
    page.tab.locator("#pg-run-panel .scrubber input").focus()
    page.tab.keyboard.press("Home")
    page.tab.wait_for_selector("#pg-run-panel .tree-view .node.draft")
    assert "run=" in page.tab.url
    page.tab.locator("#pg-run-all").get_by_role("button").click()
    facts = page.tab.locator("#pg-run-facts .facts")
    room, widest = facts.bounding_box(), facts.locator("dd").first.bounding_box()
    assert room and widest and room["width"] > 600 and widest["width"] > 150
    assert "max_draft_len" in facts.inner_text() and "versions.torch" in facts.inner_text()
    page.tab.click("#pg-runs th >> text=tok/s")
    page.tab.wait_for_selector("#pg-runs th[aria-sort=descending] >> text=tok/s")
    page.reload()  # the address is the run's permalink
    page.wait_done("pg-run-panel")
    assert page.text("pg-run-panel") == text


def test_a_late_answer_does_not_undo_the_order(page: GeneratePage, served: Served) -> None:
    finished(start(served.host, prompt="Sort me."))
    opened(page, "Sort me.")
    sent: list[Any] = []
    page.tab.route(ASKED, lambda route: route.continue_() if sent else sent.append(route))
    with page.tab.expect_request(ASKED):
        page.tab.click("#pg-runs-refresh")
    page.tab.click("#pg-runs th >> text=tok/s")
    page.tab.wait_for_selector("#pg-runs th[aria-sort=descending] >> text=tok/s")
    with page.tab.expect_response(ASKED):
        sent[0].continue_()
    page.tab.unroute(ASKED)
    page.tab.wait_for_timeout(300)
    page.tab.click("#pg-runs th[aria-sort=descending] >> text=tok/s")
    page.tab.wait_for_selector("#pg-runs th[aria-sort=ascending] >> text=tok/s")
    page.reload()  # the address restores the table
    page.tab.wait_for_selector("#pg-runs th[aria-sort=ascending] >> text=tok/s")


def test_columns_are_picked_and_remembered(page: GeneratePage, served: Served) -> None:
    finished(start(served.host, prompt="Columns, please."))
    opened(page, "Columns")
    assert page.count("#pg-runs th >> text=seed") == 0
    page.tab.click("#pg-runs-columns >> text=columns")
    page.tab.check("#pg-runs-columns label:has-text('seed') input")
    page.tab.wait_for_selector("#pg-runs th >> text=seed")
    page.tab.uncheck("#pg-runs-columns label:has-text('status') input")
    page.tab.wait_for_selector("#pg-runs th >> text=status", state="detached")
    page.reload()
    page.go("Runs")
    page.tab.wait_for_selector("#pg-runs th >> text=seed")
    assert page.count("#pg-runs th >> text=status") == 0
    formula = page.tab.locator("#pg-runs th.number", has_text="MAT").locator("button")
    formula = formula.get_attribute("data-about")
    assert "1 + accepted draft tokens / steps, before any cut by EOS or length" in formula


def test_annotations_survive_a_slow_connection_and_are_searchable(
    page: GeneratePage, served: Served
) -> None:
    run = finished(start(served.host, prompt="Slowly."))
    finished(start(served.host, prompt="Slowly, too."))
    opened(page, "Slowly")
    shows(page, "Slowly", rows=2)
    ticks = page.tab.locator(f"{ROWS} .tick input")
    with held_back(page.tab):
        ticks.first.check()
        ticks.nth(1).check()
    page.tab.wait_for_selector("#pg-runs-do-compare:enabled")
    page.tab.locator(ROWS).nth(1).locator("td button").first.click()
    page.tab.wait_for_selector("#pg-run-name", state="visible")
    page.wait_done("pg-run-panel")
    name, tags = "#pg-run-name :is(input, textarea)", "#pg-run-tags :is(input, textarea)"
    with held_back(page.tab):
        for box, text in ((name, "First"), (name, "Second"), (tags, "slow")):
            page.tab.fill(box, text)
            page.tab.keyboard.press("Enter")
        page.tab.fill("#pg-run-note textarea", "all of it")
        page.tab.locator("#pg-run-note textarea").blur()

    def is_stored() -> bool:
        page.tab.wait_for_timeout(50)  # lets the browser's events through
        stored = served.log.get(run.log_id or "")
        wanted = ("Second", ("slow",), "all of it")
        return stored is not None and (stored.name, stored.tags, stored.note) == wanted

    until(is_stored)
    page.tab.fill(SEARCH, "SECOND")
    shows(page, "Second", rows=1)
    assert page.tab.locator(ROWS).first.locator(".tag").all_inner_texts() == ["slow"]
    page.tab.fill(SEARCH, "no such prompt")
    page.tab.wait_for_selector("#pg-runs .empty")


def test_deleted_runs_come_back(page: GeneratePage, served: Served) -> None:
    for _ in range(2):
        finished(start(served.host, prompt="Delete me."))
    opened(page, "Delete me.")
    shows(page, "Delete me.", rows=2)
    page.tab.locator(f"{ROWS} .tick input").first.check()
    page.tab.locator(f"{ROWS} .tick input").nth(1).click(modifiers=["Shift"])
    page.tab.click("#pg-runs-delete:enabled")
    said(page, "Deleted 2 runs.")
    page.tab.wait_for_selector("#pg-runs .empty")
    page.tab.click("#pg-runs-undo")
    shows(page, "Delete me.", rows=2)
    page.tab.locator(f"{ROWS} .tick input").first.check()
    page.tab.click("#pg-runs-delete:enabled")
    said(page, "Deleted 1 run.")
    page.pick("runs-status", "deleted")
    page.tab.locator(f"{ROWS}.deleted", has_text="Delete me.").wait_for()
    shows(page, "Delete me.", rows=1)
    assert not page.tab.is_visible("#pg-runs-erase")
    page.tab.locator(f"{ROWS} .tick input").first.check()
    page.tab.click("#pg-runs-delete:enabled >> text=restore")
    page.tab.wait_for_selector("#pg-runs .empty")


def test_a_deleted_run_is_erased(page: GeneratePage, served: Served) -> None:
    run = finished(start(served.host, prompt="Erase me."))
    opened(page, "Erase me.")
    page.tab.locator(f"{ROWS} .tick input").first.check()
    page.tab.click("#pg-runs-delete:enabled")
    said(page, "They are only hidden")
    page.pick("runs-status", "deleted")
    page.tab.locator(f"{ROWS}.deleted", has_text="Erase me.").wait_for()
    page.tab.locator(f"{ROWS} .tick input").first.check()
    page.tab.click("#pg-runs-erase")
    said(page, "Erased 1 run for good.")
    page.tab.wait_for_selector("#pg-runs .empty")
    page.tab.wait_for_selector("#pg-runs-erase", state="hidden")
    assert served.log.get(run.log_id or "") is None


def test_a_comparison_shows_only_what_differs(page: GeneratePage, served: Served) -> None:
    for length in ("2", "5"):
        finished(start(served.host, prompt="Compare.", settings={"max_draft_len": length}))
    finished(start(served.host, prompt="Compare.", method="plain"))
    opened(page, "Compare.")
    shows(page, "Compare.", rows=3)
    page.tab.check("#pg-runs thead .tick input")
    page.tab.click("#pg-runs-do-compare:enabled")
    page.tab.wait_for_selector("#pg-runs-table table")
    _, *names = page.tab.locator("#pg-runs-table th").all_inner_texts()
    assert names[:3] == ["method.decoding_type", "method.max_draft_len", "tok/s"]
    page.reload()
    page.tab.wait_for_selector("#pg-runs-table table", timeout=WAIT_MS)
    assert page.tab.input_value(SEARCH) == "Compare."


def test_an_experiment_is_one_row_that_opens_its_requests(
    page: GeneratePage, served: Served, shots: Path
) -> None:
    for _ in range(3):
        finished_run(served.log, experiment_id="folded", kind="compare", prompt_text="Folded away.")
    finished_run(served.log, prompt_text="Folded away, but alone.")
    opened(page, "Folded away")
    shows(page, "Folded away", rows=1)
    row = page.tab.locator("#pg-runs tr.group", has_text="Comparison")
    assert "3 requests" in row.inner_text() and row.locator("input").count() == 0
    assert row.get_by_role("link", name="report").get_attribute("href") == "?compare=folded"
    page.tab.screenshot(path=shots / "runs-folded.png", full_page=True)
    row.locator("button").first.click()
    shows(page, "Folded away.", rows=3)
    page.tab.click("#pg-runs-further .token-remove")
    row.wait_for()
    page.pick("runs-group", "single requests")
    shows(page, "Folded away", rows=4)


def test_a_run_is_repeated_and_taken_to_generate(page: GeneratePage, served: Served) -> None:
    run = finished(start(served.host, prompt="Repeat me.", settings={"note": "again"}))
    assert run.finish is not None
    opened(page, "Repeat me.")
    page.tab.locator(ROWS).first.click()
    page.wait_done("pg-run-panel")
    page.tab.click("#pg-run-again")
    shows(page, "Repeat me.", rows=2)
    page.wait_done("pg-run-panel")
    assert page.text("pg-run-panel") == run.finish.text
    page.tab.wait_for_selector("#pg-run-again")
    newest = page.tab.locator(ROWS).first
    assert "open" in (newest.get_attribute("class") or "")
    assert newest.get_attribute("data-id") != run.log_id
    page.tab.click("#pg-run-generate")
    page.tab.wait_for_function(
        "document.querySelector('#pg-prompt textarea').value === 'Repeat me.'", timeout=WAIT_MS
    )
    note = page.tab.locator("#pg-method-form .pg-field-note textarea")
    note.wait_for()
    assert note.input_value() == "again"
    assert page.tab.input_value("#pg-run-form .pg-field-max_new_tokens input") == "24"


def test_runs_are_exported_imported_and_found_by_group(
    page: GeneratePage, served: Served, tmp_path: Path
) -> None:
    for length in ("3", "4", "4"):
        run = finished(start(served.host, prompt="Carry me.", settings={"max_draft_len": length}))
    opened(page, "Carry me.")
    page.tab.locator(f"{ROWS} .tick input").first.check()
    page.tab.wait_for_selector("#pg-runs-export >> text=export 1")
    file = tmp_path / "runs.json"
    file.write_text(saved(page.tab, "#pg-runs-export")[1])
    said(page, "Exported 1 run.")
    assert json.loads(file.read_text())["runs"][0]["id"] == run.log_id
    bring(page, file)
    said(page, "Imported 0 runs; 1 were already here.")
    file.write_text('{"format": "something else"}')
    bring(page, file)
    said(page, "Imported 0 runs. The rest was not imported.")
    page.pick("runs-group", "configuration")
    page.tab.locator("#pg-runs tr.group", has_text="max_draft_len 4").click()
    shows(page, "max_draft_len 4", rows=2)
    alert = page.tab.locator("#pg-runs-message .faulty", has_text="is not an export of runs")
    assert alert.is_visible(), "loading the table must not wipe it"
    page.tab.click("#pg-runs-further .token-remove")
    page.tab.fill("#pg-runs-further input", "fast ones")
    page.tab.keyboard.press("Enter")
    page.tab.wait_for_selector("#pg-runs [role=alert] >> text=A filter must be like")


def test_a_log_that_fails_is_named_by_whatever_needed_it(chromium: Any, tmp_path: Path) -> None:
    with serving_tiny(tmp_path) as own, GeneratePage.opened(chromium, own.url) as page:
        finished_run(own.log, prompt_text="Group me.", experiment_id="grouped", kind="compare")
        finished_run(own.log, prompt_text="Group me.")
        opened(page, "Group me.")
        aside = (tmp_path / "runs.db").rename(tmp_path / "aside.db")
        page.tab.locator("#pg-runs tr.group button").first.click()
        page.tab.locator("#pg-error", has_text="was removed or replaced").wait_for()
        aside.rename(tmp_path / "runs.db")
