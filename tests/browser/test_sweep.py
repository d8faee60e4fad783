"""The Sweep page in a real browser: tick, start, watch, and take the best along."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.browser.pages import WAIT_MS, GeneratePage, box_of, choose

pytestmark = pytest.mark.browser
SWEEP = "#pg-sweep"
FORM = "#pg-sweep-form"


def start_small(tab: Any) -> None:
    """A sweep of three draft lengths, with short answers."""
    tab.wait_for_selector(f"{FORM} .pg-group >> text=Ranges")
    tab.locator("#pg-sweep-vary").get_by_label("(max_draft_len)").check()
    box_of(tab.locator(f"{FORM} .pg-group", has_text="Ranges"), "max_draft_len").fill("2:4")
    choose(tab, "#pg-sweep-plan .pg-field-mode input", "grid")
    tab.locator("#pg-sweep-plan .pg-field-max_new_tokens input").fill("6")
    tab.locator(f"{SWEEP}-outlook .pg-said", has_text=re.compile("^3 c")).wait_for()
    tab.wait_for_timeout(500)
    tab.click(f"{SWEEP}-start:enabled")


def rows(tab: Any) -> list[list[str]]:
    found: list[list[str]] = tab.locator(f"{SWEEP}-trials tbody tr").evaluate_all(
        "rows => rows.map(row => [...row.cells].map(cell => cell.firstChild?.data.trim() ?? ''))"
    )
    return found


def test_the_best_of_a_sweep_is_used_in_generate(page: GeneratePage, shots: Path) -> None:
    page.go("Sweep")
    tab, card = page.tab, page.tab.locator(f"{SWEEP}-card")
    start_small(tab)
    done = tab.locator(f"{SWEEP}-state .text", has_text="3 of 3 trials · done")
    done.wait_for(timeout=2 * WAIT_MS)
    page.reload()  # its address names the sweep
    tab.wait_for_selector(f"{SWEEP}-plot .main-svg", timeout=WAIT_MS)
    tab.wait_for_selector(f"{SWEEP}-trials tr.best")
    assert [row[2] for row in rows(tab)] == ["2", "3", "4"]
    assert sorted(row[0] for row in rows(tab)) == ["1", "2", "3"]
    best = next(row for row in rows(tab) if row[1] == "best")
    card.locator("h3", has_text=f"Best: trial {best[0]}").wait_for()
    assert card.locator("[data-figure=speedup]").inner_text().split()[0] == best[3]
    assert card.locator("[data-figure=time_split]").inner_text().endswith(" ms)")

    other = next(row for row in rows(tab) if row[1] != "best")
    page.pick("sweep-trial", other[0])
    card.locator("h3", has_text=f"Trial {other[0]}").wait_for()
    for kind, note in (("slice", "by one"), ("parallel", "One")):
        tab.locator("#pg-sweep-report").get_by_label(kind, exact=True).check()
        tab.locator(f"{SWEEP}-note", has_text=note).wait_for()
    page.check_width(shots, "sweep")
    tab.click(f"{SWEEP}-use")
    box = "#pg-method-form .pg-field-max_draft_len input"
    tab.wait_for_selector("#pg-generate", state="visible")
    tab.wait_for_function(
        "([at, value]) => document.querySelector(at)?.value === value", arg=[box, other[2]]
    )
