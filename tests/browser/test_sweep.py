"""The Sweep page in a real browser: tick, start, watch, stop, go on, take the best along."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from playground.experiments.plan import Configuration
from playground.experiments.sweep.report import SweepStore
from tests.browser.pages import NARROW, WAIT_MS, GeneratePage, box_of, choose
from tests.playground.serving import Served
from tests.playground.sweeps.scripted import swept
from tests.playground.tiny import ScriptedConfig

pytestmark = pytest.mark.browser
SWEEP = "#pg-sweep"
FORM = "#pg-sweep-form"


@pytest.fixture
def tab(page: GeneratePage) -> Any:
    """The tab, with the Sweep page in view and its form filled."""
    return opened(page)


def opened(page: GeneratePage) -> Any:
    page.tab.get_by_role("tab", name="Sweep").click()
    page.tab.wait_for_selector(f"{FORM} .pg-group >> text=Ranges")
    return page.tab


def ranges(tab: Any, field: str) -> Any:
    """The box of what a setting is varied over."""
    return box_of(tab.locator(f"{FORM} .pg-group", has_text="Ranges"), field)


def vary(tab: Any, field: str, low: int, high: int) -> None:
    tick = tab.locator("#pg-sweep-vary").get_by_label(f"({field})")
    if not tick.is_checked():
        tick.check()
    ranges(tab, field).fill(f"{low}:{high}")


def small(tab: Any, tokens: int = 6) -> None:
    """Few, short answers."""
    choose(tab, "#pg-sweep-plan .pg-field-mode input", "grid")
    tab.locator("#pg-sweep-plan .pg-field-max_new_tokens input").fill(str(tokens))


def pause(tab: Any, delay_ms: int) -> None:
    """Make every step of the method wait."""
    fixed = tab.locator(f"{FORM} .pg-group", has_text="Fixed settings")
    fixed.locator("button.label-wrap").first.click()
    fixed.locator(".pg-field-delay_ms input").first.fill(str(delay_ms))


def picked(tab: Any) -> str:
    """Name of the sweep on show."""
    return str(tab.input_value(f"{SWEEP}-picker input")).split(" · ")[0]


def start(tab: Any) -> str:
    """Start the sweep; returns its name once it is on show."""
    before = picked(tab)
    tab.wait_for_timeout(500)
    tab.click(f"{SWEEP}-start:enabled")
    tab.wait_for_function(
        "([at, old]) => { const now = document.querySelector(at).value.split(' · ')[0];"
        " return now && now !== old; }",
        arg=[f"{SWEEP}-picker input", before],
        timeout=WAIT_MS,
    )
    return picked(tab)


def wait_words(tab: Any, words: str) -> None:
    tab.locator(f"{SWEEP}-state .text", has_text=words).wait_for(timeout=2 * WAIT_MS)


def rows(tab: Any) -> list[list[str]]:
    found: list[list[str]] = tab.locator(f"{SWEEP}-trials tbody tr").evaluate_all(
        "rows => rows.map(row => [...row.cells].map(cell => cell.textContent.trim()))"
    )
    return found


def wait_outlook(tab: Any, words: str) -> None:
    tab.locator(f"{SWEEP}-outlook .pg-said", has_text=re.compile(f"^{words}")).wait_for()


def test_the_best_of_a_sweep_is_used_in_generate(tab: Any, tmp_path: Path) -> None:
    vary(tab, "max_draft_len", 2, 4)
    small(tab)
    wait_outlook(tab, "3 c")
    start(tab)
    wait_words(tab, "3 of 3 trials · done")
    tab.wait_for_selector(f"{SWEEP}-plot .main-svg", timeout=WAIT_MS)
    tab.wait_for_selector(f"{SWEEP}-trials tr.best")
    assert [row[2] for row in rows(tab)] == ["2", "3", "4"]
    assert sorted(row[0] for row in rows(tab)) == ["1", "2", "3"]
    best = next(row for row in rows(tab) if row[1] == "best")
    card = tab.locator(f"{SWEEP}-card")
    card.locator("h3", has_text=f"Best: trial {best[0]}").wait_for()
    assert best[3] == card.locator("[data-figure=value]").inner_text()

    other = next(row for row in rows(tab) if row[1] != "best")
    GeneratePage(tab).pick("sweep-trial", other[0])
    card.locator("h3", has_text=f"Trial {other[0]}").wait_for()
    with tab.expect_download() as download:
        tab.click(f"{SWEEP}-export")
    file = tmp_path / "method.yaml"
    download.value.save_as(file)
    assert yaml.safe_load(file.read_text())["config"]["decoding_type"] == "Scripted"

    tab.click(f"{SWEEP}-use")
    box = "#pg-method-form .pg-field-max_draft_len input"
    tab.wait_for_selector("#pg-generate", state="visible")
    tab.wait_for_function(
        "([at, value]) => document.querySelector(at)?.value === value", arg=[box, other[2]]
    )


def test_a_sweep_goes_on_after_reload_stop_and_resume(page: GeneratePage) -> None:
    tab = opened(page)
    vary(tab, "max_draft_len", 1, 3)
    small(tab)
    pause(tab, 300)
    wait_outlook(tab, "3 c")
    name = start(tab)
    wait_words(tab, "answered")
    tab.wait_for_url(lambda url: "sweep=" in url, wait_until="commit")
    page.reload()
    tab.wait_for_selector(f"{SWEEP}-stop", timeout=WAIT_MS)
    assert picked(tab) == name
    tab.click(f"{SWEEP}-stop")
    wait_words(tab, "stopped")
    tab.wait_for_selector(f"{SWEEP}-resume")
    assert len(rows(tab)) < 3 or rows(tab)[-1][1] == "stopped"
    tab.click(f"{SWEEP}-resume")
    wait_words(tab, "3 of 3 trials · done")
    tab.wait_for_selector(f"{SWEEP}-trials tr.best")
    assert sorted(row[2] for row in rows(tab)) == ["1", "2", "3"]


def fill(served: Served) -> None:
    """A sweep of some size beside the served log, with every kind of outcome but failures."""
    store = SweepStore(served.log, served.host.catalog.types)
    ranges = ("max_draft_len=1:12", "delay_ms=0:5", "drafting=auto,as set")
    what: dict[str, Any] = {"trials": 16, "prune": True, "objective": "tok_s"}
    what["configurations"] = [Configuration("scripted", "Scripted tree", ScriptedConfig())]
    swept(store, *ranges, name="shown", **what)


def test_plots_are_drawn_and_nothing_scrolls_sideways(
    chromium: Any, served: Served, shots: Path
) -> None:
    fill(served)
    with GeneratePage.opened(chromium, served.url, path="/?sweep=shown", viewport=NARROW) as page:
        tab = page.tab
        tab.wait_for_selector(f"{SWEEP} tr.best")
        for kind, note in (("importance", "How much"), ("slice", "by one"), ("parallel", "One")):
            tab.locator("#pg-sweep-report").get_by_label(kind, exact=True).check()
            tab.locator(f"{SWEEP}-note", has_text=note).wait_for()
            tab.wait_for_selector(f"{SWEEP}-plot .main-svg", timeout=WAIT_MS)
        page.check_width(shots, "sweep")
        page.check_clean()
