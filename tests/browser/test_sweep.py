"""The Sweep page in a real browser: tick, start, watch, stop, go on, take the best along."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from playground.experiments.sweep.run import run_sweep
from playground.experiments.sweep.store import SweepStore
from tests.browser.pages import WAIT_MS, GeneratePage
from tests.playground.serving import Served
from tests.playground.sweeps.scripted import Scripted, plan
from tests.playground.tiny import ScriptedConfig

pytestmark = pytest.mark.browser
SWEEP = "#pg-sweep"


@pytest.fixture
def tab(page: GeneratePage) -> Any:
    """The tab, with the Sweep page in view and its form filled."""
    return opened(page)


def opened(page: GeneratePage) -> Any:
    page.tab.get_by_role("tab", name="Sweep").click()
    page.tab.wait_for_selector(f"{SWEEP} [data-field=max_draft_len]")
    return page.tab


def vary(tab: Any, field: str, low: int, high: int) -> None:
    tick = tab.locator(f"{SWEEP} [data-field={field}] .name input")
    if not tick.is_checked():
        tick.check()
    tab.fill(f"{SWEEP} [aria-label='{field} from']", str(low))
    tab.fill(f"{SWEEP} [aria-label='{field} to']", str(high))


def small(tab: Any, tokens: int = 6) -> None:
    """Few, short answers."""
    tab.select_option(f"{SWEEP} [aria-label=how]", "grid")
    tab.fill(f"{SWEEP} [aria-label='tokens per answer']", str(tokens))


def pause(tab: Any, delay_ms: int) -> None:
    """Make every step of the method wait."""
    tab.fill(f"{SWEEP} [data-field=delay_ms] .slot input", str(delay_ms))


def start(tab: Any) -> str:
    """Start the sweep; returns its name once it is on show."""
    before = tab.locator(f"{SWEEP} [aria-label=sweep]").evaluate("node => node.value")
    tab.click(f"{SWEEP} .setup .primary:enabled")
    tab.wait_for_function(
        "([at, old]) => document.querySelector(at).value !== old",
        arg=[f"{SWEEP} [aria-label=sweep]", before],
        timeout=WAIT_MS,
    )
    return str(tab.locator(f"{SWEEP} [aria-label=sweep]").evaluate("node => node.value"))


def wait_words(tab: Any, words: str) -> None:
    tab.wait_for_function(
        "([at, words]) => document.querySelector(at).textContent.includes(words)",
        arg=[f"{SWEEP} .words", words],
        timeout=2 * WAIT_MS,
    )


def rows(tab: Any) -> list[list[str]]:
    found: list[list[str]] = tab.locator(f"{SWEEP} tbody tr").evaluate_all(
        "rows => rows.map(row => [...row.cells].map(cell => cell.textContent))"
    )
    return found


def test_the_best_of_a_sweep_is_used_in_generate(tab: Any, tmp_path: Path) -> None:
    vary(tab, "max_draft_len", 2, 4)
    small(tab)
    outlook = f"{SWEEP} .outlook"
    tab.wait_for_function(
        "at => document.querySelector(at).textContent.startsWith('3 c')", arg=outlook
    )
    start(tab)
    wait_words(tab, "3 of 3 trials · done")
    tab.wait_for_selector(f"{SWEEP} .plot[data-drawn] .main-svg", timeout=WAIT_MS)
    assert [row[2] for row in rows(tab)] == ["2", "3", "4"]
    best = next(row for row in rows(tab) if row[1] == "best")
    assert tab.inner_text(f"{SWEEP} .best h4") == f"Best: trial {best[0]}"
    assert best[3] == tab.inner_text(f"{SWEEP} .best [data-figure=value]")

    other = next(row for row in rows(tab) if row[1] != "best")
    tab.click(f"{SWEEP} tr[data-number='{other[0]}'] button")
    assert tab.inner_text(f"{SWEEP} .best h4") == f"Trial {other[0]}"
    with tab.expect_download() as download:
        tab.click(f"{SWEEP} .best >> text=Export YAML")
    file = tmp_path / "method.yaml"
    download.value.save_as(file)
    assert yaml.safe_load(file.read_text())["config"]["decoding_type"] == "Scripted"

    tab.click(f"{SWEEP} [data-use=generate]")
    box = "#pg-method-form .pg-field-max_draft_len input"
    tab.wait_for_selector("#pg-generate", state="visible")
    tab.wait_for_function(
        "([at, value]) => document.querySelector(at)?.value === value", arg=[box, other[2]]
    )


def test_a_sweep_goes_on_after_reload_stop_and_resume(tab: Any) -> None:
    vary(tab, "max_draft_len", 1, 3)
    small(tab)
    pause(tab, 120)
    name = start(tab)
    wait_words(tab, "answered")
    assert f"sweep={name}" in tab.url
    tab.reload()
    tab.wait_for_selector(f"{SWEEP} .bar >> text=Stop", timeout=WAIT_MS)
    assert tab.locator(f"{SWEEP} [aria-label=sweep]").evaluate("node => node.value") == name
    tab.click(f"{SWEEP} .bar >> text=Stop")
    wait_words(tab, "stopped")
    assert len(rows(tab)) < 3 or rows(tab)[-1][1] == "broken off"
    tab.click(f"{SWEEP} .bar >> text=Resume")
    wait_words(tab, "3 of 3 trials · done")
    assert sorted(row[2] for row in rows(tab)) == ["1", "2", "3"]


@pytest.mark.parametrize(
    ("low", "high", "says"), [(5, 2, "low ≤ high"), (0, 4, "in [1, 16], got 0"), (1, 99, "got 99")]
)
def test_a_wrong_range_is_said_at_once(tab: Any, low: int, high: int, says: str) -> None:
    vary(tab, "max_draft_len", low, high)
    tab.wait_for_selector(f"{SWEEP} .outlook.faulty")
    tab.wait_for_function(
        "([at, says]) => document.querySelector(at).textContent.includes(says)",
        arg=[f"{SWEEP} .outlook", says],
    )
    assert tab.locator(f"{SWEEP} .setup .primary").is_disabled()


def test_everything_is_reached_by_keyboard(tab: Any) -> None:
    def outlook(words: str) -> None:
        tab.wait_for_function(
            "([at, words]) => document.querySelector(at).textContent.startsWith(words)",
            arg=[f"{SWEEP} .outlook", words],
        )

    outlook("6 combinations")
    tab.focus(f"{SWEEP} [data-field=adaptive] .name input")
    tab.keyboard.press("Space")
    outlook("12 combinations")
    tab.keyboard.press("Tab")
    assert tab.evaluate("document.activeElement.getAttribute('aria-label')") == "adaptive false"
    tab.keyboard.press("Space")
    outlook("6 combinations")


def test_a_dead_link_says_so(chromium: Any, served: Served) -> None:
    with GeneratePage.opened(chromium, served.url, path="/?sweep=%3Cimg%20src=x%3E") as page:
        page.tab.wait_for_selector(f"{SWEEP} .alert", state="visible")
        assert "No sweep is named <img src=x>" in page.tab.inner_text(f"{SWEEP} .alert")
        page.check_clean()


def fill(served: Served) -> None:
    """A sweep of some size beside the served log, with every kind of outcome but failures."""
    store = SweepStore.beside(served.log, served.host.catalog.types)
    if not store.heads() or "shown" not in {head.name for head in store.heads()}:
        ranges = ("max_draft_len=1:12", "delay_ms=0:5", "adaptive=true,false")
        what: dict[str, Any] = {"trials": 16, "prune": True, "objective": "tok_s"}
        what |= {"method": "scripted", "title": "Scripted tree"}
        asked = plan(*ranges, base=ScriptedConfig(), **what)
        run_sweep(store.create(asked, "shown"), Scripted())
    store.close()


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1400, 420])
def test_plots_are_drawn_and_nothing_scrolls_sideways(
    chromium: Any, served: Served, shots: Path, theme: str, width: int
) -> None:
    size = {"width": width, "height": 1000}
    path = f"/?__theme={theme}&sweep=shown"
    fill(served)
    with GeneratePage.opened(chromium, served.url, path=path, viewport=size) as page:
        tab = page.tab
        tab.wait_for_selector(f"{SWEEP} tr.best")
        for kind in ("history", "importance", "slice"):
            tab.click(f"{SWEEP} [data-plot={kind}]")
            tab.wait_for_selector(f"{SWEEP} .plot[data-drawn={kind}] .main-svg", timeout=WAIT_MS)
        tab.click(f"{SWEEP} [data-plot=parallel]")
        tab.wait_for_selector(f"{SWEEP} .plot[data-drawn=parallel] .main-svg")
        tab.screenshot(path=shots / f"sweep-{theme}-{width}.png", full_page=width < 600)
        wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert tab.evaluate(wide) <= 0
        page.check_clean()
