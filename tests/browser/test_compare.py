"""The Compare page in a real browser."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from playground.host.live import pieces
from storage import RunLog
from tests.browser.comparing import COMPARE_MS, RESULTS, TABLE, ComparePage
from tests.browser.pages import GeneratePage, saved
from tests.playground.compare.corrupted import with_corrupted
from tests.playground.serving import Served, serving_tiny
from tests.playground.tiny import ScriptedDrafter

pytestmark = pytest.mark.browser
PLAIN, SCRIPTED = "Plain decoding", "Scripted tree"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A page that also offers a method with a mistake in its verifier."""
    folder = tmp_path_factory.mktemp("compare")
    with (
        pytest.MonkeyPatch.context() as patch,
        serving_tiny(folder, adapt=with_corrupted) as served,
    ):
        patch.setattr(ScriptedDrafter, "KNOWN", 40)
        yield served


@pytest.fixture
def page(chromium: Any, served: Served) -> Iterator[ComparePage]:
    with GeneratePage.opened(chromium, served.url, reduced_motion="reduce") as opened:
        compare = ComparePage(opened)
        compare.go()
        yield compare
        opened.check_clean()


def stored_ms(log: RunLog, run_id: str) -> list[float]:
    """When every commit of a stored run happened, in milliseconds."""
    detail = log.get(run_id)
    assert detail is not None and detail.ttft_s is not None
    return [1000 * detail.ttft_s, *(1000 * step.at_s for step in log.steps(run_id))]


def test_the_prompt_of_generate_goes_along_until_another_is_written(page: ComparePage) -> None:
    opened, box = page.page, page.tab.locator("#pg-cmp-prompt textarea")
    for prompt, expected in (("First.", "First."), ("Second.", "Second."), ("Third.", "My own.")):
        opened.go("Generate")
        opened.short(8)
        opened.generate(prompt)
        page.go()
        assert box.input_value() == expected
        if prompt == "Second.":
            box.fill("My own.")
            box.blur()


def test_two_configurations_race_on_their_stored_clocks(page: ComparePage, served: Served) -> None:
    page.leave(1)
    page.set(0, "delay_ms", "30")
    page.short(30)
    page.compare("On your marks.")
    lanes = page.lanes()
    assert len(lanes) == 2
    stored = [stored_ms(served.log, lane["run"]) for lane in lanes]
    follow_race(page, served, [[at - clock[0] for at in clock] for clock in stored])
    page.tab.get_by_label("with prefill").check()
    follow_race(page, served, stored)
    moment = f"Number(document.querySelector('{RESULTS} .race-bar input[type=range]').value)"
    page.tab.select_option(f"{RESULTS} .race-bar > select", label="1/8×")
    page.tab.click(f"{RESULTS} .race-play")
    page.tab.wait_for_function(f"{moment} > 10 && {moment} < 1000")
    page.tab.click(f"{RESULTS} .race-play")
    paused = page.tab.evaluate(moment)
    later = f"new Promise(done => setTimeout(() => done({moment}), 150))"
    assert page.tab.evaluate(later) == paused
    page.tab.select_option(f"{RESULTS} .race-bar > select", label="4×")
    page.tab.locator(f"{RESULTS} .race-play").press("Space")
    page.wait_raced(2)
    assert page.tab.inner_text(f"{RESULTS} .race-play") == "▶ Race"


def follow_race(page: ComparePage, served: Served, clocks: list[list[float]]) -> None:
    """Seek through the race, whose commits are due at these milliseconds."""
    lanes = page.lanes()
    texts = [pieces(served.log, lane["run"]) for lane in lanes]
    wholes = [detail.text for lane in lanes if (detail := served.log.get(lane["run"]))]
    steps = [served.log.steps(lane["run"]) for lane in lanes]
    moments = sorted({round(at) for clock in clocks for at in clock[::3]})
    for moment in [0, *moments, moments[-1] + 1000]:
        page.seek(moment)
        for i, lane in enumerate(page.lanes()):
            due = sum(round(at) <= moment for at in clocks[i])
            if not due:
                assert lane["words"] == "0.000 s"
                continue
            shown = float(lane["words"].split(" s")[0]) * 1000
            assert abs(shown - clocks[i][due - 1]) <= 1.0
            tokens = 1 + sum(step.num_committed for step in steps[i][: due - 1])
            # Bytes of an unfinished character are no piece of text; they come with the end.
            over = due == len(clocks[i])
            assert page.shown_text(i) == (wholes[i] if over else "".join(texts[i][:tokens]))
    slowest = max(range(2), key=lambda i: clocks[i][-1])
    assert [lane["words"].split(" · ")[1] for lane in page.lanes()] == [
        "2nd" if i == slowest else "1st" for i in range(2)
    ]


def test_four_configurations_on_a_suite(page: ComparePage, served: Served, shots: Path) -> None:
    page.leave(1)
    page.add("Corrupted")
    for number, length in ((2, "2"), (3, "5")):
        page.add(SCRIPTED)
        page.set(number, "max_draft_len", length)
    page.set(3, "note", "lossy")
    page.pick("suite", "Starter")
    page.short()
    page.compare()
    names = [f"{SCRIPTED} · max_draft_len {n}" for n in (3, 2, 5)]
    assert page.rows() == [PLAIN, names[0], "Corrupted", *names[1:]]
    assert page.page.count(f"{RESULTS} .panel") == page.page.count(f"{RESULTS} .lane") == 5
    assert page.cell(names[0], "answers") == "identical"
    assert re.search(r"a fault, from token \d+", page.cell("Corrupted", "answers"))
    why = page.tab.inner_text(f'{TABLE} [data-why="Corrupted"]')
    assert "the method is at fault" in why and "top-2 logit gap" in why
    assert "lossy by design" in page.cell(names[2], "answers")
    for name, lane in zip(page.rows()[1:], page.lanes()[1:], strict=True):
        assert lane["speedup"] == page.cell(name, "speedup").split()[0]
    before = [lane["run"] for lane in page.lanes()]
    page.tab.select_option(f"{RESULTS} .race-prompts", index=0)
    page.tab.wait_for_function(
        "run => document.querySelector('#pg-cmp-results .lane')?.dataset.run !== run", arg=before[0]
    )
    page.wait_final()
    prompts = [served.log.get(lane["run"]) for lane in page.lanes()]
    assert [run.prompt_text for run in prompts if run is not None] == ["Say hello."] * 5
    page.page.check_width(shots, "compare")


def test_panels_stream_show_steps_on_demand_and_stop_keeps_what_ran(
    page: ComparePage, served: Served
) -> None:
    page.set(1, "max_draft_len", "2")
    page.set(0, "delay_ms", "60")
    page.short(400, repeats=1)
    page.begin("Stream.")
    page.tab.wait_for_function(
        f"""document.querySelector('{RESULTS} .tokens .draft') && document
          .querySelector('{RESULTS} .compare-text').textContent.includes('round 1 of 1')""",
        timeout=COMPARE_MS,
    )
    page.tab.keyboard.press("Escape")
    page.wait_final()
    assert page.text() == "stopped" and page.rows()[:2] == [PLAIN, SCRIPTED]
    last = served.host.runs.all()[-1]
    assert last.state == "cancelled" and len(last.rows) < 390
    assert not [run for run in served.host.runs.all() if not run.over.is_set()]
    tree = page.tab.locator(f"{RESULTS} .tree-view").nth(1)
    assert not tree.is_visible()
    page.tab.get_by_label("steps and trees").check()
    page.tab.locator(f"{RESULTS} .scrubber input").nth(1).press("Home")
    page.tab.wait_for_selector(f"{RESULTS} .tree-view .node.draft")


def test_a_permalink_shows_it_all_again(page: ComparePage, chromium: Any, served: Served) -> None:
    page.leave(1)
    page.set(0, "max_draft_len", "4")
    page.short()
    page.compare("Linked to.")
    link, table = page.tab.url, page.tab.inner_text("#pg-cmp-table")
    assert "compare=" in link
    served.host.runs.__init__()  # type: ignore[misc]
    with GeneratePage.opened(chromium, link, path="") as opened:
        again = ComparePage(opened)
        again.wait_final()
        assert again.tab.inner_text("#pg-cmp-table") == table
        assert again.shown_text(0) == page.shown_text(0)
        assert again.tab.input_value("#pg-cmp-prompt textarea") == "Linked to."
        length = again.field(0, "max_draft_len").locator("input").first
        assert length.input_value() == "4"
        opened.complaints.clear()


def test_a_comparison_is_saved_as_a_page_that_opens_offline(
    page: ComparePage, chromium: Any, tmp_path: Path, shots: Path
) -> None:
    page.tab.click("#pg-cmp-share")
    page.tab.locator("#pg-cmp-share-message", has_text="Run one first").wait_for()
    page.leave(1)
    page.short(24, repeats=2)
    page.compare("</pre><script>document.title = 'taken over'</script><img src=x onerror=alert(1)>")
    name, text = saved(page.tab, "#pg-cmp-share")
    file = tmp_path / name
    file.write_text(text)
    with chromium.new_context(offline=True) as context:
        alone = context.new_page()
        asked: list[str] = []
        alone.on("request", lambda request: asked.append(request.url))
        alone.on("dialog", lambda dialog: asked.append(dialog.message))
        alone.goto(file.as_uri())
        assert asked == [file.as_uri()]
        assert alone.title().startswith("Comparison · </pre><script>")
        assert (
            alone.locator(".bars .bar").count() == 2 and alone.locator("script, img").count() == 0
        )
        alone.screenshot(path=shots / "shared.png", full_page=True)


def test_an_error_is_one_sentence_and_keeps_what_is_on_show(page: ComparePage) -> None:
    page.leave(1)
    page.add(SCRIPTED)
    page.begin("Twice the same.")
    assert "are the same" in page.alert()
    page.leave(1)
    page.short(8)
    page.compare("Say something.")
    text, rows = page.shown_text(1), page.rows()
    page.tab.fill("#pg-cmp-prompt textarea", "  ")
    page.tab.keyboard.press("Control+Enter")
    assert "empty" in page.alert()
    assert page.shown_text(1) == text and page.rows() == rows
    assert len(page.lanes()) == 2
