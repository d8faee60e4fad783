"""Keys that lead everywhere: the list of Ctrl+K, and definitions of terms without a mouse."""

from __future__ import annotations

from typing import Any

import pytest

from tests.browser.pages import GeneratePage, Violations
from tests.playground.asks import finished, start
from tests.playground.serving import Served

pytestmark = pytest.mark.browser
OPTION = "#pg-palette [role=option]"


def opened(tab: Any, words: str = "") -> None:
    tab.keyboard.press("Control+k")
    tab.wait_for_selector("#pg-palette input:focus")
    tab.keyboard.type(words)


def test_pages_methods_runs_and_actions_are_reached_by_keys(
    page: GeneratePage, served: Served, violations: Violations
) -> None:
    run = finished(start(served.host, prompt="Find me by these words."))
    tab = page.tab
    tab.focus("#pg-prompt textarea")
    tab.evaluate(
        "document.activeElement.dispatchEvent(new KeyboardEvent('keydown', "
        "{ key: 'k', ctrlKey: true, isComposing: true, bubbles: true }))"
    )
    assert page.count("#pg-palette") == 0, "not while a word is composed"
    opened(tab)
    tab.locator(OPTION, has_text="Find me by these words.").wait_for(state="attached")
    assert violations(tab) == []
    tab.keyboard.press("Tab")
    assert tab.evaluate("document.activeElement.matches('#pg-palette input')"), "focus is kept in"
    tab.keyboard.press("Escape")
    tab.wait_for_selector("#pg-palette", state="detached")
    assert tab.evaluate("document.activeElement.matches('#pg-prompt textarea')"), "and given back"

    opened(tab, "benchm")
    tab.keyboard.press("Enter")
    tab.wait_for_selector("#pg-benchmark-start")
    opened(tab, "scripted tree method")
    tab.keyboard.press("Enter")
    tab.wait_for_selector("#pg-method-form .pg-field-max_draft_len")
    assert tab.input_value("#pg-method input").startswith("Scripted tree")
    opened(tab, "find these words run")
    tab.locator(OPTION, has_text="Find me by these words.").wait_for()
    tab.keyboard.press("Enter")
    tab.wait_for_selector(f'#pg-run-panel [data-run="{run.log_id}"]', state="attached")
    tab.wait_for_url(lambda url: f"run={run.log_id}" in url, wait_until="commit")
    opened(tab, "dark colours")
    tab.keyboard.press("Enter")
    assert tab.evaluate("document.body.classList.contains('dark')")


def test_an_action_presses_the_button_of_its_page(page: GeneratePage) -> None:
    page.short(8)
    page.tab.fill("#pg-prompt textarea", "From the list.")
    page.go("Connect")
    opened(page.tab, "generate action")
    page.tab.keyboard.press("Enter")
    page.wait_done()


def test_terms_are_defined_under_the_keyboard_too(page: GeneratePage) -> None:
    tab = page.tab
    mat = tab.locator("#pg-panel .figure", has_text="MAT")
    tab.locator("#pg-panel .figure", has_text="tok/s").focus()
    tab.keyboard.press("Tab")
    assert tab.locator("#pg-about").inner_text().startswith("mean accepted tokens: 1 + accepted")
    assert mat.get_attribute("aria-describedby") == "pg-about"
    tab.keyboard.press("Escape")
    assert not tab.locator("#pg-about").is_visible()
    mat.hover()
    assert tab.locator("#pg-about").is_visible()


def test_the_palette_opens_again_right_after_it_closed(page: GeneratePage) -> None:
    """A dialog says that it closed only later, when it may be open again."""
    opened(page.tab)
    page.tab.evaluate(
        "() => { document.querySelector('#pg-palette').close();"
        " const key = { key: 'k', ctrlKey: true, bubbles: true };"
        " document.body.dispatchEvent(new KeyboardEvent('keydown', key)); }"
    )
    page.tab.wait_for_timeout(100)
    assert page.tab.locator("#pg-palette").is_visible()
