"""A step's picture: folded siblings, zoom, the row of the mask, the walk-through."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.browser.pages import GeneratePage

pytestmark = pytest.mark.browser
WIDTH = 11
WIDE_TREE = [[*[0] * depth, rank] for depth in range(3) for rank in range(WIDTH)]
VIEW = "#pg-panel .tree-view"
OPACITIES = "nodes => nodes.map(node => getComputedStyle(node).opacity)"
SPEEDS = """select => [...select.options].map(option => option.textContent)"""


@pytest.fixture
def step(page: GeneratePage) -> Any:
    """A tab whose panel shows a tree of 33 nodes."""
    page.pick_method("Scripted tree", "max_draft_len")
    page.tab.locator("#pg-method-form").get_by_text("List of paths").click()
    page.set("scripted_choices", json.dumps(WIDE_TREE))
    page.short()
    page.generate("Branch.")
    page.tab.wait_for_selector(f"{VIEW} .node.draft.on")
    return page.tab


def test_improbable_siblings_open_by_a_click(step: Any) -> None:
    shown = step.locator(f"{VIEW} .node.draft").count()
    folded = step.locator(f"{VIEW} .node.more")
    counts = [int(text.removeprefix("+")) for text in folded.locator("text").all_text_contents()]
    assert shown + sum(counts) == len(WIDE_TREE)
    parent = f"+{counts[0]}"
    folded.first.click()
    step.wait_for_function(
        "([at, shown]) => document.querySelectorAll(at).length > shown",
        arg=[f"{VIEW} .node.draft", shown],
    )
    assert folded.first.locator("text").text_content() != parent, "its siblings are all there"


def test_the_wheel_zooms_at_the_cursor(step: Any) -> None:
    node = step.locator(f"{VIEW} .node.draft.on").first
    node.scroll_into_view_if_needed()
    zoom_at(step, node, 4)  # larger than its space from now on
    x, y, width = zoom_at(step, node, 1)
    after = middle_of(node)
    assert after[2] == pytest.approx(1.25 * width, rel=0.05)
    assert after[:2] == pytest.approx((x, y), abs=8), "it stays there"
    step.locator("#pg-panel .tree").get_by_role("button", name="fit").click()
    assert middle_of(node)[2] < width


def middle_of(node: Any) -> tuple[float, float, float]:
    """Where a node's middle is on the screen, and its width."""
    box = node.bounding_box()
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2, box["width"]


def zoom_at(tab: Any, node: Any, times: int) -> tuple[float, float, float]:
    """Zoom in with the wheel over a node; returns where it was."""
    x, y, width = middle_of(node)
    tab.mouse.move(x, y)
    tab.keyboard.down("Control")
    for _ in range(times):
        tab.mouse.wheel(0, -100)
        tab.wait_for_timeout(150)
    tab.keyboard.up("Control")
    return x, y, width


def test_a_node_its_token_and_its_row_of_the_mask_are_one(step: Any) -> None:
    step.locator("#pg-panel .mask summary").click()
    node = step.locator(f"{VIEW} .node.draft.on").first
    row = step.locator(f"#pg-panel .mask [data-row='{node.get_attribute('data-node')}']").first
    node.hover()
    step.wait_for_selector("#pg-panel .mask [data-row].pointed")
    assert "pointed" in row.get_attribute("class")
    told = step.inner_text("#pg-panel .tree-info")
    assert "draft probability" in told and "target probability" in told
    row.hover()
    step.wait_for_selector(f"{VIEW} .node.draft.on.pointed")


def test_a_walk_plays_pauses_changes_speed_and_goes_by_hand(step: Any) -> None:
    count = step.locator("#pg-panel .walk-count")
    step.click("#pg-panel .walk-start")
    speed = step.locator("#pg-panel .walk select")
    speed.select_option(speed.evaluate(SPEEDS)[-1])
    count.filter(has_text="3 of").wait_for()  # by itself
    play = step.get_by_role("button", name="play or pause")
    play.click()
    assert play.inner_text() == "play"
    stopped = count.inner_text()
    step.wait_for_timeout(2500)
    assert count.inner_text() == stopped
    play.click()
    step.wait_for_function(
        "was => document.querySelector('#pg-panel .walk-count').textContent !== was", arg=stopped
    )
    step.emulate_media(reduced_motion="reduce")
    step.get_by_role("button", name="close").click()
    step.keyboard.press("p")
    step.wait_for_selector("#pg-panel .walk:not([hidden])")
    assert play.inner_text() == "play", "it waits where motion is not wanted"
    wrong = step.locator("#pg-panel :is(.wrong, .faded)")
    while len({*count.inner_text().split(" of ")}) == 2:
        step.get_by_role("button", name="one picture on").click()
        assert not step.locator("#pg-panel .tree .dark").count(), "that is Gradio's dark theme"
        assert {*step.eval_on_selector_all("#pg-panel .absent", OPACITIES)} <= {"0"}
    assert wrong.count() and "chain" in step.inner_text("#pg-panel .walk-text").lower()
    step.keyboard.press("p")
    step.wait_for_selector("#pg-panel .walk", state="hidden")
    assert not wrong.count()


@pytest.mark.parametrize("width", [1440, 1024])
def test_no_figure_of_a_run_is_cut(page: GeneratePage, width: int) -> None:
    page.tab.set_viewport_size({"width": width, "height": 1000})
    page.short()
    page.generate("How many?")
    cut = """() => {
      const edge = document.querySelector("#pg-panel .figures").getBoundingClientRect().right;
      const isCut = (part) => part.scrollWidth > part.clientWidth;
      return [...document.querySelectorAll("#pg-panel .figure")].filter((figure) =>
        figure.getBoundingClientRect().right > edge + 1
        || [...figure.querySelectorAll(".value, .name")].some(isCut)).map((one) => one.textContent);
    }"""
    texts = {"itl_ms": "12.8 ms", "ttft_s": "129 ms", "step_p95_ms": "129 / 183 ms"}
    for name, text in texts.items():
        value = page.tab.locator(f"#pg-panel [data-figure={name}]")
        value.evaluate("(value, text) => { value.textContent = text; }", text)
    assert page.tab.evaluate(cut) == []
