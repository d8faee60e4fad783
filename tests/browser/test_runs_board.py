"""The Runs page's board in a real browser: filter, edit, delete, compare, repeat, carry away."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.browser.pages import WAIT_MS, GeneratePage
from tests.playground.asks import finished, start
from tests.playground.serving import Served

pytestmark = pytest.mark.browser
ROWS = "#pg-runs .frame:not(.tall) tbody tr[data-id]"


def opened(page: GeneratePage, search: str) -> None:
    """Go to the table and search in it."""
    page.tab.get_by_role("tab", name="Runs").click()
    page.tab.wait_for_selector(ROWS)
    page.tab.fill("#pg-runs input[type=search]", search)
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
    page.tab.wait_for_selector(f"#pg-runs .actions .said >> text={words}", timeout=WAIT_MS)


def test_columns_are_picked_and_remembered(page: GeneratePage, served: Served) -> None:
    finished(start(served.host, prompt="Columns, please."))
    opened(page, "Columns")
    assert page.count("#pg-runs th >> text=seed") == 0
    page.tab.click("#pg-runs summary >> text=columns")
    page.tab.check("#pg-runs [data-column=seed] input")
    page.tab.uncheck("#pg-runs [data-column=status] input")
    page.tab.keyboard.press("Escape")
    page.tab.reload()
    page.tab.get_by_role("tab", name="Runs").click()
    page.tab.wait_for_selector("#pg-runs th >> text=seed")
    assert page.count("#pg-runs th >> text=status") == 0
    formula = page.tab.locator("#pg-runs th.num", has_text="MAT").get_attribute("title")
    assert formula == "1 + accepted draft tokens / steps, before any cut by EOS or length"


def test_name_tags_and_note_are_kept_and_found(page: GeneratePage, served: Served) -> None:
    run = finished(start(served.host, prompt="Mark me."))
    opened(page, "Mark me.")
    page.tab.locator(ROWS).first.click()
    page.tab.fill("#pg-runs .details [aria-label=name]", "The Ünique one")
    page.tab.keyboard.press("Enter")
    page.tab.fill("#pg-runs .details [aria-label=tags]", "keep, fast")
    page.tab.keyboard.press("Enter")
    page.tab.fill("#pg-runs .details textarea", "by hand <b>not markup</b>")
    page.tab.locator("#pg-runs .details textarea").blur()
    page.tab.fill("#pg-runs input[type=search]", "ÜNIQUE ONE")
    shows(page, "The Ünique one", rows=1)
    row = page.tab.locator(ROWS).first
    assert row.locator(".tag").all_inner_texts() == ["fast", "keep"]
    stored = served.log.get(run.log_id or "")
    assert stored is not None and stored.note == "by hand <b>not markup</b>"
    page.tab.click("#pg-runs .details .all summary")
    facts = page.tab.inner_text("#pg-runs .facts")
    assert "max_draft_len" in facts and "versions.torch" in facts


def test_deleted_runs_come_back(page: GeneratePage, served: Served) -> None:
    for _ in range(2):
        finished(start(served.host, prompt="Delete me."))
    opened(page, "Delete me.")
    shows(page, "Delete me.", rows=2)
    page.tab.locator(f"{ROWS} .tick input").first.check()
    page.tab.locator(f"{ROWS} .tick input").nth(1).click(modifiers=["Shift"])
    page.tab.click("#pg-runs .actions >> text=delete")
    said(page, "Deleted 2 runs.")
    page.tab.wait_for_selector("#pg-runs .empty")
    page.tab.click("#pg-runs .undo")
    shows(page, "Delete me.", rows=2)
    page.tab.locator(f"{ROWS} .tick input").first.check()
    page.tab.click("#pg-runs .actions >> text=delete")
    said(page, "Deleted 1 run.")
    page.tab.select_option("#pg-runs [data-filter=status]", "deleted")
    page.tab.locator(f"{ROWS}.deleted", has_text="Delete me.").wait_for()
    shows(page, "Delete me.", rows=1)
    page.tab.locator(f"{ROWS} .tick input").first.check()
    page.tab.click("#pg-runs .actions >> text=restore")
    page.tab.wait_for_selector("#pg-runs .empty")


def test_a_comparison_shows_only_what_differs(page: GeneratePage, served: Served) -> None:
    for length in ("2", "5"):
        for seed in ("0", "1"):
            settings, sampling = {"max_draft_len": length}, {"seed": seed}
            run = start(served.host, prompt="Compare.", settings=settings, sampling=sampling)
            finished(run)
    finished(start(served.host, prompt="Compare.", method="plain"))
    opened(page, "Compare.")
    shows(page, "Compare.", rows=5)
    page.tab.check("#pg-runs th.tick input")
    page.tab.click("#pg-runs .actions >> text=compare")
    page.tab.wait_for_selector("#pg-runs .compare .differences")
    names = page.tab.locator("#pg-runs .differences tr[data-name] th").all_inner_texts()
    assert names[:2] == ["method.decoding_type", "method.max_draft_len"]
    assert names[2:6] == ["tok/s", "speedup", "MAT", "acceptance"], "all else is the same"
    cells = page.tab.locator("#pg-runs tr[data-name='method.max_draft_len'] td").all_inner_texts()
    assert cells == ["–", "5", "2"]
    assert page.count("#pg-runs .charts .chart") == 6
    assert page.count("#pg-runs .charts .chart >> nth=0 >> .dot") == 4, "a dot for every repeat"
    assert page.count("#pg-runs .lines path.run") == 5
    page.tab.locator("#pg-runs th.setup", has_text="max_draft_len 5").get_by_text("pin").click()
    page.tab.wait_for_selector("#pg-runs th.setup .star")
    speedups = page.tab.locator("#pg-runs tr[data-name=speedup] td").all_inner_texts()
    assert re.match(r"1\.00×", speedups[1])
    page.tab.reload()
    page.tab.wait_for_selector("#pg-runs th.setup .star", timeout=WAIT_MS)
    assert page.tab.input_value("#pg-runs input[type=search]") == "Compare."
    page.tab.click("#pg-runs .chip >> text=baseline")
    page.tab.wait_for_selector("#pg-runs th.setup .star", state="detached")


def test_groups_lead_to_their_runs(page: GeneratePage, served: Served) -> None:
    for length in ("3", "4", "4"):
        finished(start(served.host, prompt="Group.", settings={"max_draft_len": length}))
    opened(page, "Group.")
    page.tab.select_option("#pg-runs [aria-label='group by']", "setup_id")
    group = page.tab.locator("#pg-runs tr.group", has_text="max_draft_len 4")
    group.wait_for()
    assert re.search(r"\b2\b", group.locator("td").nth(1).inner_text())
    assert "±" in group.locator("td").nth(2).inner_text()
    group.click()
    shows(page, "max_draft_len 4", rows=2)
    page.tab.click("#pg-runs .chip")
    shows(page, "Group.", rows=3)
    page.tab.click("#pg-runs summary >> text=more filters")
    page.tab.fill("#pg-runs .more [aria-label='at least']", "1e9")
    page.tab.keyboard.press("Enter")
    page.tab.wait_for_selector("#pg-runs .empty")
    page.tab.click("#pg-runs .chip")
    shows(page, "Group.", rows=3)


def test_a_run_is_repeated_and_taken_to_generate(page: GeneratePage, served: Served) -> None:
    run = finished(start(served.host, prompt="Again.", settings={"note": "again"}))
    assert run.finish is not None
    opened(page, "Again.")
    page.tab.locator(ROWS).first.click()
    page.wait_done("pg-run-panel")
    page.tab.click("#pg-runs .details >> text=run again")
    shows(page, "Again.", rows=2)
    page.wait_done("pg-run-panel")
    assert page.text("pg-run-panel") == run.finish.text
    page.tab.wait_for_selector("#pg-runs .details >> text=run again")
    newest = page.tab.locator(ROWS).first
    assert "open" in (newest.get_attribute("class") or "")
    assert newest.get_attribute("data-id") != run.log_id
    page.tab.click("#pg-runs .details >> text=open in Generate")
    page.tab.wait_for_function(
        "document.querySelector('#pg-prompt textarea').value === 'Again.'", timeout=WAIT_MS
    )
    note = page.tab.locator("#pg-method-form [data-field=note] input")
    note.wait_for()
    assert note.input_value() == "again"
    assert page.tab.input_value("[data-field=max_new_tokens] input >> nth=0") == "24"


def test_runs_are_carried_away_and_back(page: GeneratePage, served: Served, tmp_path: Path) -> None:
    run = finished(start(served.host, prompt="Carry me."))
    opened(page, "Carry me.")
    page.tab.locator(f"{ROWS} .tick input").first.check()
    page.tab.click("#pg-runs .actions summary >> text=export")
    with page.tab.expect_download() as download:
        page.tab.click("#pg-runs .actions [data-kind=json]")
    file = tmp_path / "runs.json"
    download.value.save_as(file)
    said(page, "Exported 1 run.")
    document = json.loads(file.read_text())
    assert document["runs"][0]["id"] == run.log_id
    assert len(document["runs"][0]["steps"]) == len(run.rows)
    page.tab.set_input_files("#pg-runs input[type=file]", file)
    said(page, "Imported 0 runs; 1 were here already.")
    document["runs"][0]["prompt_text"] = "Carry me. Changed."
    file.write_text(json.dumps(document))
    page.tab.set_input_files("#pg-runs input[type=file]", file)
    said(page, "Imported 1 run; 1 got a new id")
    shows(page, "Carry me.", rows=2)
    file.write_text('{"format": "something else"}')
    page.tab.set_input_files("#pg-runs input[type=file]", file)
    said(page, "Imported 0 runs. The rest was not imported.")
    page.tab.click("#pg-runs >> text=refresh")
    page.tab.fill("#pg-runs input[type=search]", "Carry me. Changed.")
    shows(page, "Carry me. Changed.", rows=1)
    alert = page.tab.locator("#pg-runs [role=alert]", has_text="must be an export of runs")
    assert alert.is_visible(), "loading the table must not wipe it"


def test_a_link_restores_the_table(chromium: Any, served: Served) -> None:
    finished(start(served.host, prompt="Linked table."))
    query = json.dumps({"text": "linked TABLE", "sort": "mat", "descending": False})
    with GeneratePage.opened(chromium, served.url, path=f"/?runs={query}") as page:
        shows(page, "Linked table.", rows=1)
        page.tab.wait_for_selector("#pg-runs th[aria-sort=ascending] >> text=MAT")
        page.check_clean()
    with GeneratePage.opened(chromium, served.url, path="/?runs=%7Bbroken") as page:
        page.tab.wait_for_selector("#pg-runs [role=alert] >> text=The link is damaged")
        page.check_clean()
