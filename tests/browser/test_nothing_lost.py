"""What a reload, a second tab, Back, a closed browser or a killed server leave of the work."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.browser.comparing import ComparePage
from tests.browser.pages import WAIT_MS, GeneratePage, box_of, held_back
from tests.faults.children import Child
from tests.faults.children import page as serve_page
from tests.playground.asks import finished
from tests.playground.serving import Served, free_port
from tests.playground.tiny import held_drafts, save_tiny_llama

pytestmark = pytest.mark.browser
PANEL = "#pg-panel"
STORED = "(text) => (localStorage.getItem('pg-generate') ?? '').includes(text)"


def begin_comparison(opened: GeneratePage, tokens: int = 90) -> ComparePage:
    page = ComparePage(opened)
    page.go()
    page.leave(1)
    page.set(0, "delay_ms", "60")
    page.short(tokens)
    page.begin("Compare me.")
    page.wait_drafts()
    return page


def reopened(page: GeneratePage, url: str) -> GeneratePage:
    """Another tab of the same browser, at an address."""
    tab = page.tab.context.new_page()
    tab.goto(url)
    tab.wait_for_selector(f"{PANEL} .panel", state="attached")
    shown = GeneratePage(tab)
    shown.wait_filled()
    return shown


def value_of(page: GeneratePage, field: str) -> str:
    return str(box_of(page.tab, field).input_value())


def test_a_reload_finds_the_run_that_goes_on(page: GeneratePage, served: Served) -> None:
    page.stream("Do not lose me.")
    with held_drafts():
        page.tab.fill("#pg-prompt textarea", "The next question, unsent.")
        page.tab.wait_for_function(STORED, arg="The next question, unsent.")
        page.reload()
        page.wait_state("running")
    run = served.host.runs.all()[-1]
    page.wait_done()
    assert run.state == "completed" and run.finish is not None
    assert page.text() == run.finish.text
    assert page.tab.input_value("#pg-prompt textarea") == "The next question, unsent."
    assert page.tab.input_value("#pg-method input").startswith("Scripted tree")
    assert value_of(page, "delay_ms") == "60" and value_of(page, "max_new_tokens") == "90"
    assert f"run={run.log_id}" in page.tab.url
    page.reload()
    page.wait_done()
    assert page.text() == run.finish.text
    page.set("delay_ms", "0")
    page.generate("And on.")
    assert page.count(f"{PANEL} .turn.user") == 2, "the chat goes on"


def test_stop_works_after_a_reload_and_in_another_tab(page: GeneratePage, served: Served) -> None:
    for second in (False, True):
        page.tab.click("#pg-new")
        page.stream("Do not lose me.", tokens=400)
        with held_drafts():
            if second:
                shown = reopened(page, page.tab.url)
            else:
                page.reload()
                shown = page
            shown.wait_state("running")
            shown.tab.keyboard.press("Escape")
        shown.wait_state("cancelled")
        assert served.host.runs.all()[-1].state == "cancelled"


def test_other_tabs_show_the_run_or_their_own_and_leave_it_alone(
    page: GeneratePage, served: Served
) -> None:
    page.stream("Do not lose me.")
    with held_drafts():
        run = served.host.runs.all()[-1]
        other = reopened(page, page.tab.url)
        other.wait_state("running")
        other.short(8)
        new = reopened(page, page.tab.url.partition("?")[0])
        new.short(8)
        other.start("My own.")
        other.wait_state("queued")
        assert "1 ahead" in other.tab.inner_text(f"{PANEL} .state")
    new.generate("My own, too.")
    page.wait_done()
    other.wait_done()
    assert run.state == "completed"
    assert "My own" not in page.tab.inner_text(f"{PANEL} .text")
    assert "Do not lose me." not in new.tab.inner_text(f"{PANEL} .text"), "a chat of its own"


def test_a_duplicated_tab_leaves_the_runs_of_the_first_alone(
    page: GeneratePage, served: Served
) -> None:
    """A browser copies the session storage when a tab is duplicated or opened by a page."""
    page.stream("Do not lose me.")
    with held_drafts():
        run = served.host.runs.all()[-1]
        with page.tab.context.expect_page() as opened:
            page.tab.evaluate("window.open(location.href)")
        copy = GeneratePage(opened.value)
        copy.wait_filled()
        copy.wait_state("running")
        assert copy.tab.evaluate("sessionStorage.getItem('pg-generate-run')") == run.log_id
        copy.short(8)
        copy.start("My own.")
        copy.wait_state("queued")
        assert not run.cancel_requested.is_set()
        with page.leaving():
            page.tab.reload()
        page.wait_filled()
        page.wait_state("running")
    copy.wait_done()
    page.wait_done()
    assert run.state == "completed" and run.owner != served.host.runs.all()[-1].owner
    page.short(8)
    page.tab.click("#pg-new")
    page.generate("Mine again.")
    assert served.host.runs.all()[-1].owner == run.owner, "a reload keeps the tab's identity"


def test_the_form_takes_no_input_until_it_is_filled(page: GeneratePage) -> None:
    page.tab.fill("#pg-prompt textarea", "Before the reload.")
    page.tab.wait_for_function(STORED, arg="Before the reload.")
    with held_back(page.tab):
        with page.leaving():
            page.tab.reload()
        page.tab.wait_for_selector("#pg-main[inert]")
        assert page.tab.input_value("#pg-prompt textarea") == "", "nothing has arrived"
    page.wait_filled()
    page.tab.wait_for_selector("#pg-main:not([inert])")
    assert page.tab.input_value("#pg-prompt textarea") == "Before the reload."


def test_earlier_turns_keep_their_colours_after_a_reload(page: GeneratePage) -> None:
    page.pick_method("Scripted tree", "max_draft_len")
    page.short(30)
    page.generate("One.")
    first = page.tab.inner_html(f"{PANEL} .tokens")
    page.generate("Two.")
    answers = page.tab.locator(f"{PANEL} .tokens")
    page.reload()
    page.wait_done()
    page.tab.wait_for_function(
        "(panel) => document.querySelector(panel + ' .tokens .draft')?.dataset.n", arg=PANEL
    )
    assert answers.count() == 2
    told = [
        re.sub(r' style="[^"]*"| current', "", html) for html in (answers.first.inner_html(), first)
    ]
    assert told[0] == told[1]
    answers.first.locator(".draft").first.click()
    page.tab.wait_for_selector(f"{PANEL} .draft-tree .node, {PANEL} svg .node")
    assert page.count(f"{PANEL} .tokens .current") > 0


def test_a_closed_browser_leaves_the_run_to_the_next(
    chromium: Any, served: Served, tmp_path: Path
) -> None:
    with GeneratePage.opened(chromium, served.url) as leaving:
        leaving.stream("Do not lose me.", tokens=400)
        kept = leaving.tab.context.storage_state()
        run = served.host.runs.all()[-1]
    time.sleep(0.5)
    assert not run.over.is_set()
    with GeneratePage.opened(chromium, served.url, storage_state=kept) as back:
        back.wait_state("running")
        assert f"run={run.log_id}" in back.tab.url
        back.short(8)
        back.start("Instead.")
        back.wait_done()
        assert finished(run).state == "cancelled", "nobody else watched it"


def test_back_leads_from_tab_to_tab_and_from_a_permalink_to_what_was_there(
    page: GeneratePage, served: Served
) -> None:
    page.short(12)
    page.generate("Here I was.")
    text, here = page.text(), page.tab.url
    for name in ("Compare", "Runs"):
        page.go(name)
        page.tab.wait_for_function(f"location.search.includes('{name.lower()}')")
    page.tab.go_back()
    assert selected(page) == "Compare"
    page.tab.go_back()
    assert selected(page) == "Generate" and page.tab.url == here and page.text() == text
    page.tab.go_forward()
    assert selected(page) == "Compare"
    page.reload()
    page.tab.wait_for_selector("#pg-cmp-run")
    assert selected(page) == "Compare"
    page.tab.go_back()
    page.tab.fill("#pg-prompt textarea", "Something else.")
    page.tab.locator(PANEL).get_by_text("permalink").click()
    page.wait_done()
    assert page.text() == text and selected(page) == "Generate"
    page.complaints.clear()  # Gradio's, of streams that break off with the page


def selected(page: GeneratePage) -> str:
    return str(page.tab.locator("[role=tab][aria-selected=true]").first.inner_text())


def test_a_permalink_opened_elsewhere_fills_the_form_from_its_run(
    page: GeneratePage, chromium: Any, served: Served
) -> None:
    page.pick_method("Scripted tree", "max_draft_len")
    page.short(17)
    page.generate("Linked.")
    with GeneratePage.opened(chromium, page.tab.url, path="") as other:
        other.wait_done()
        assert other.text() == page.text()
        assert other.tab.input_value("#pg-prompt textarea") == "Linked."
        assert other.tab.input_value("#pg-method input").startswith("Scripted tree")
        assert value_of(other, "max_new_tokens") == "17"


@pytest.mark.parametrize(
    ("link", "place", "says"),
    [
        ("run=%3Cimg%20src=x%3E", "#pg-run-panel .alert", "run"),
        ("runs=%7Bbroken", "#pg-runs-message [role=alert]", "The link is not valid JSON"),
        ("compare=nothing", "#pg-cmp-results .compare-head .alert", "No experiment 'nothing'"),
        ("tree=%3Cimg%20src=x%3E", "#pg-tree .alert", "cannot be read"),
        ("benchmark=nothing", "#pg-benchmark-state .pg-alert", "No experiment 'nothing'"),
        ("deploy=vllm&of=run:%3Cimg%20src=x%3E", "#pg-deploy-told .faulty", "No run"),
        ("train=nobody", "#pg-train-state .pg-alert", "No training is named 'nobody'"),
    ],
)
def test_a_link_to_nothing_shows_an_error(
    chromium: Any, served: Served, link: str, place: str, says: str
) -> None:
    with GeneratePage.opened(chromium, served.url, path=f"/?{link}") as page:
        page.tab.locator(place, has_text=says).wait_for()
        page.check_clean()


def test_settings_stored_by_an_older_version_are_read_field_by_field(page: GeneratePage) -> None:
    limits = {"max_new_tokens": -1, "gone": 2, "ignore_eos": True}
    older = {"method": 4, "prompt": "Kept.", "run_form": {"values": {"limits": limits}}}
    for kept in ("{broken", json.dumps(older)):
        page.tab.evaluate("kept => localStorage.setItem('pg-generate', kept)", kept)
        page.reload()
        page.tab.wait_for_selector("body.pg-generate .pg-field-max_new_tokens", state="attached")
        assert int(value_of(page, "max_new_tokens")) > 0
    assert page.tab.input_value("#pg-prompt textarea") == "Kept."
    assert page.tab.locator(".pg-field-ignore_eos input").first.is_checked()


def test_a_reload_finds_the_comparison_that_goes_on(page: GeneratePage, served: Served) -> None:
    comparing = begin_comparison(page)
    url = page.tab.url
    assert "compare=" in url
    with held_drafts():
        page.reload()
        comparing.wait_drafts()
    assert selected(page) == "Compare" and page.tab.url == url
    comparing.wait_final()
    assert len(comparing.rows()) == 2
    assert page.tab.input_value("#pg-cmp-prompt textarea") == "Compare me."


def test_esc_closes_a_list_first_and_tab_leaves_none_open(page: GeneratePage) -> None:
    page.stream("Do not lose me.", tokens=400, delay_ms=400)
    page.tab.click("#pg-target input")
    for _ in range(5):
        page.tab.keyboard.press("Tab")
        page.tab.wait_for_timeout(150)
    opened = page.tab.locator("ul[role=listbox]")
    focused = page.tab.evaluate("document.activeElement.getAttribute('role')")
    assert opened.count() <= (1 if focused == "combobox" else 0)
    page.tab.click("#pg-method input")
    opened.wait_for()
    opened.evaluate("(list) => { list.style.maxHeight = '60px'; }")  # so that it can be scrolled
    page.tab.keyboard.press("Tab")
    page.tab.wait_for_function("!document.querySelector('ul[role=listbox]')")
    assert page.tab.evaluate("document.activeElement.tagName") not in ("BODY", "UL")
    page.tab.click("#pg-method input")
    opened.wait_for()
    page.tab.keyboard.press("Escape")
    page.tab.wait_for_function("!document.querySelector('ul[role=listbox]')")
    assert page.tab.locator(f'{PANEL} .panel[data-state="running"]').count()
    page.tab.keyboard.press("Escape")
    page.wait_state("cancelled")


@contextmanager
def own_server(folder: Path) -> Iterator[tuple[Any, str]]:
    """A page of its own process: start it, and kill it when you like."""
    target, port = save_tiny_llama(folder / "tiny"), free_port()

    def start() -> Child:
        child = Child(folder, serve_page, target, folder / "runs.db", port)
        assert child.until(lambda: "http://" in child.text), child.errors
        return child

    children = [start()]
    try:
        restart, kill = lambda: children.append(start()), lambda: children[-1].kill()
        yield (restart, kill), f"http://127.0.0.1:{port}"
    finally:
        children[-1].kill()


def test_a_killed_server_is_reported_and_its_runs_are_shown_when_it_is_back(
    chromium: Any, tmp_path: Path
) -> None:
    with (
        own_server(tmp_path) as ((restart, kill), url),
        GeneratePage.opened(chromium, url) as page,
    ):
        page.stream("Do not lose me.", tokens=400)
        kill()
        page.wait_state("lost")
        assert "does not respond" in page.tab.inner_text(f"{PANEL} .alert")
        text = page.text()
        restart()
        page.wait_state("interrupted")
        assert page.text().startswith(text) and text
        comparing = begin_comparison(page, tokens=400)
        kill()
        page.wait_state("lost", panel="pg-cmp-results")
        restart()
        page.tab.wait_for_selector("#pg-cmp-results [data-state=cancelled]", timeout=WAIT_MS)
        assert "interrupted" in comparing.tab.inner_text("#pg-cmp-results .compare-text")
        page.complaints.clear()


def test_a_search_whose_server_is_killed_is_an_interrupted_benchmark_that_resumes(
    chromium: Any, tmp_path: Path
) -> None:
    with (
        own_server(tmp_path) as ((restart, kill), url),
        GeneratePage.opened(chromium, url) as page,
    ):
        page.tab.fill("#pg-prompt textarea", "Which one?")
        page.tab.click("#pg-fastest-start")
        page.tab.wait_for_selector("#pg-benchmark-summary td small", timeout=WAIT_MS)
        kill()
        restart()
        page.tab.wait_for_selector("#pg-benchmark-state [data-state=interrupted]", timeout=WAIT_MS)
        page.complaints.clear()  # of the server that was gone

        assert "Which one?" in page.tab.inner_text("#pg-benchmark-head")
        assert "Resume runs what is missing" in page.tab.inner_text("#pg-benchmark-state")
        answered = page.tab.inner_text("#pg-benchmark-summary tbody")
        assert "Scripted tree" in answered and re.search(r"\d\.\d\d×", answered)
        page.tab.click("#pg-benchmark-resume")
        page.tab.wait_for_selector("#pg-benchmark-state [data-state=completed]", timeout=120_000)
        page.check_clean()
        page.reload()
        page.tab.wait_for_selector("#pg-benchmark-state [data-state=completed]")
