"""The Generate page in a real browser."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from playground.host.methods import NEAR_TIES
from tests.browser.pages import GeneratePage, choose, saved
from tests.playground.serving import Served

pytestmark = pytest.mark.browser
DRAFTS = "#pg-panel .tokens .draft"
OWN = "#pg-panel .tokens :is(.bonus, .recovered, .prefill)"


@pytest.fixture
def ran(page: GeneratePage) -> GeneratePage:
    """The page with an answer whose steps draft trees."""
    page.pick_method("Scripted tree", "max_draft_len")
    page.short()
    page.generate("Say a few words.")
    return page


def test_tokens_are_coloured_and_figures_appear(page: GeneratePage, served: Served) -> None:
    page.pick_method("Scripted tree", "max_draft_len")
    page.short(60)
    page.generate("Say hello.")
    assert page.count(DRAFTS) > 0
    assert page.count(OWN) > 5
    run = served.host.runs.all()[-1]
    assert run.finish is not None and page.text() == run.finish.text
    assert re.match(r"\d+\.\d", page.tab.inner_text('[data-figure="tok_s"]'))
    badge = page.tab.inner_text("#pg-panel .badge")
    assert badge == run.meta["badge"] and badge in ("lossless", NEAR_TIES), "by what `auto` is here"
    page.tab.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.tab.get_by_role("button", name="copy text").click()
    page.tab.locator("#pg-panel button", has_text="copied").wait_for()
    assert page.tab.evaluate("navigator.clipboard.readText()") == page.text()


def test_a_run_opens_on_its_best_step_and_scrubbing_shows_each_tree(
    ran: GeneratePage, served: Served
) -> None:
    page, rows = ran, served.host.runs.all()[-1].rows.read(0) or []
    mixed = [row for row in rows if 0 < len(row.accepted) < len(row.tokens) - 1]
    best = max(mixed, key=lambda row: (len(row.accepted), len(row.tokens), -row.index))
    label = page.tab.locator("#pg-panel .step-label")
    label.filter(has_text=f"step {best.index + 1} of").wait_for()
    page.tab.wait_for_selector("#pg-panel .tree-view .node.draft.on")
    assert page.count("#pg-panel .tree-view .node.draft.off") > 0
    page.tab.locator("#pg-panel .node.draft.on").first.hover()
    page.tab.wait_for_selector("#pg-panel .tokens .draft.pointed")
    page.tab.locator("#pg-panel .tokens .current.draft").first.hover()
    page.tab.wait_for_selector("#pg-panel .node.draft.on.pointed")
    page.tab.locator("#pg-panel .scrubber input").focus()
    page.tab.keyboard.press("Home")
    label.filter(has_text=f"step 1 of {len(rows)}").wait_for()
    assert page.count("#pg-panel .tree-view .node") == len(rows[0].tokens) + 1
    page.tab.keyboard.press("ArrowRight")
    label.filter(has_text="step 2 of").wait_for()
    page.tab.keyboard.press("Home" if best.index else "End")  # on the best, B leads to the next
    page.tab.keyboard.press("b")
    label.filter(has_text=f"step {best.index + 1} of").wait_for()
    drafts = page.tab.locator(DRAFTS)
    drafts.first.click()
    page.tab.wait_for_selector("#pg-panel .tree-view .node.draft.on")
    assert "current" in (drafts.first.get_attribute("class") or "")
    page.tab.locator("#pg-panel .node.root").focus()
    page.tab.keyboard.press("ArrowRight")
    assert "id " in page.tab.inner_text("#pg-panel .tree-info")


def test_every_answer_is_compared_with_plain_decoding(ran: GeneratePage, shots: Path) -> None:
    page = ran
    page.check_width(shots, "generate")
    said = page.tab.inner_text("#pg-panel .result")
    rated = r"(\d+\.\d\d|About \d+\.\d)× plain decoding: \d\.\d\d tokens a step, (and|but) a step"
    shown = rf"{rated}|No speedup is given: \d\.\d\d tokens a step\."
    assert re.match(shown, said), said
    page.go("Runs")
    page.tab.locator("#pg-runs tbody tr").first.click()
    page.wait_done("pg-run-panel")
    assert page.tab.inner_text("#pg-run-panel .result") == said
    page.check_width(shots, "runs")
    page.tab.locator("#pg-run-panel .result button").click()
    page.tab.wait_for_selector("#pg-cmp-run")
    page.tab.wait_for_function(
        "document.querySelector('#pg-cmp-prompt textarea').value === 'Say a few words.'"
    )
    configurations = page.tab.locator("#pg-cmp-form .pg-group > button")
    configurations.first.wait_for()
    assert configurations.count() == 1 and "Scripted tree" in configurations.inner_text()


def test_find_the_fastest_measures_the_current_prompt(
    page: GeneratePage, served: Served, shots: Path
) -> None:
    page.short(30)
    page.tab.fill("#pg-prompt textarea", "Which one?")
    page.tab.click("#pg-fastest-start")
    page.tab.wait_for_selector("#pg-benchmark-state [data-state=running]")
    page.tab.wait_for_selector("#pg-benchmark-state [data-state=completed]", timeout=120_000)
    page.tab.locator("#pg-benchmark-summary", has_text="engines").wait_for()
    said = page.tab.inner_text("#pg-benchmark-head")
    assert "× plain decoding" in said and "Tiny" in said and "at most 30 tokens" in said
    assert re.search(
        "Recommended: (Scripted tree|stay with plain)|Worth a try: Scripted tree", said
    )
    table = page.tab.inner_text("#pg-benchmark-summary")
    assert "Scripted tree" in table and "12 answers" in table and "none" in table
    page.check_width(shots, "fastest")
    newest = served.log.benchmarks.list(1)[0]
    assert newest.name == "Fastest method · Which one?" and newest.status == "completed"
    shown = page.tab.input_value("#pg-benchmark-configuration input")
    assert shown.startswith("Highest speedup: ")
    page.pick("benchmark-configuration", "Scripted tree")
    page.tab.click("#pg-benchmark-use")
    page.tab.wait_for_selector("#pg-generate", state="visible")
    assert page.tab.input_value("#pg-method input").startswith("Scripted tree")


OVERLAPS = """[...document.querySelectorAll('#pg-panel .tokens .rejected')].filter(
  (span, at, all) => span.offsetTop === all[at + 1]?.offsetTop
    && span.offsetLeft + span.offsetWidth > all[at + 1].offsetLeft).length"""


def test_rejected_drafts_show_without_moving_the_text(page: GeneratePage, served: Served) -> None:
    page.stream("Reject.", tokens=400, delay_ms=30)
    rejected = page.tab.locator("#pg-panel .tokens .rejected").first
    rejected.wait_for(state="visible")
    page.wait_state("running")
    page.tab.keyboard.press("Escape")
    page.wait_done()
    assert page.tab.inner_text("#pg-panel .state") == "stopped"
    stored = served.log.get(served.host.runs.all()[-1].log_id or "")
    assert stored is not None and stored.status == "cancelled"
    places = "[...document.querySelectorAll('#pg-panel .tokens > [data-i]')].map("
    places += "span => { const box = span.getBoundingClientRect(); return [box.x, box.y]; })"
    shown = page.tab.evaluate(places)
    beyond = "[...document.querySelectorAll('#pg-panel .tokens .rejected')].filter(span =>"
    beyond += " span.offsetLeft + span.offsetWidth > span.parentElement.clientWidth + 1).length"
    assert page.tab.evaluate(beyond) == 0, "cut off at the edge of the text"
    assert page.tab.evaluate(OVERLAPS) == 0, "one over another"
    page.tab.locator("#pg-panel .toggle input").uncheck()
    assert not rejected.is_visible()
    assert page.tab.evaluate(places) == shown
    page.tab.locator("#pg-panel .tokens .recovered").first.hover()
    assert "rejected" in page.tab.inner_text("#pg-about")
    page.reload()
    page.tab.wait_for_selector("#pg-panel .toggle input", state="attached")
    assert not page.tab.locator("#pg-panel .toggle input").is_checked()


def test_everything_shows_one_step_while_text_streams(page: GeneratePage) -> None:
    page.stream("One step at a time.", tokens=400, delay_ms=150)
    page.tab.wait_for_selector("#pg-panel .tree-view svg")
    page.tab.locator("#pg-panel .scrubber input").focus()
    seen = """() => {
      const panel = document.querySelector("#pg-panel"), text = panel.querySelector(".step-label");
      const marked = panel.querySelector(".tokens .current");
      return [Number(text.textContent.split(" ")[1]), Number(marked?.dataset.n),
        Number(panel.querySelector(".scrubber input").value)];
    }"""
    steps: list[int] = []
    for _ in range(100):
        label, marked, thumb = page.tab.evaluate(seen)
        assert label == marked
        assert label <= thumb <= label + 6  # a key moves it before the step has come
        steps.append(label)
        if label > steps[0] + 3:
            break
        page.tab.keyboard.press("ArrowRight")  # no step back: it goes on following
        page.tab.wait_for_timeout(150)
    assert steps[-1] > steps[0] + 3
    assert page.tab.locator("#pg-panel .scrubber .quiet").is_hidden()
    page.tab.keyboard.press("Home")
    label = page.tab.locator("#pg-panel .step-label")
    label.filter(has_text="step 1 of").wait_for()
    page.tab.wait_for_timeout(500)
    assert page.tab.evaluate(seen)[0] == 1, "it follows no more"
    page.tab.locator("#pg-panel .scrubber .quiet").click()
    page.tab.wait_for_function(
        "Number(document.querySelector('#pg-panel .scrubber input').value) > 3"
    )
    page.tab.keyboard.press("Escape")


def test_a_tree_is_turned_and_enlarged(ran: GeneratePage) -> None:
    page = ran
    page.tab.wait_for_selector("#pg-panel .tree-view .node.draft.on")
    page.tab.locator("#pg-panel .tree-info").click()  # no control has the focus
    tops = """() => [...document.querySelectorAll("#pg-panel .node.root, #pg-panel .node.bonus,"
      + " #pg-panel .node.recovered")].map(node => node.getBoundingClientRect().top)"""
    page.tab.get_by_role("button", name="draw the root on the other side").click()
    root, own = page.tab.evaluate(tops)
    assert own > root + 40
    page.tab.keyboard.press("f")
    page.tab.wait_for_function("document.fullscreenElement?.matches('.tree')")
    page.tab.keyboard.press("f")
    page.tab.wait_for_function("!document.fullscreenElement")
    page.tab.get_by_role("button", name="draw the root on the other side").click()


def test_timeline_explains_and_adds_up_steps_and_is_saved_as_a_trace(
    ran: GeneratePage, served: Served
) -> None:
    page, rows = ran, served.host.runs.all()[-1].rows.read(0) or []
    page.tab.hover("#pg-panel .timeline canvas")
    page.tab.wait_for_selector("#pg-about .why:not(:empty)")
    said = page.tab.inner_text("#pg-about")
    assert said.startswith("Step ") and "in the cache before it" in said and "verify " in said
    page.tab.locator("#pg-panel .timeline-line .quiet", has_text="acceptance").click()
    bars = page.tab.locator("#pg-panel .bars").nth(1).locator(".bar")
    none = sum(not row.accepted for row in rows)
    assert bars.first.inner_text().split() == [f"{round(100 * none / len(rows))}%", "0"]
    trace = "#pg-panel .timeline-line .quiet >> text=Chrome trace"
    events = json.loads(saved(page.tab, trace)[1])["traceEvents"]
    assert len([event for event in events if event["name"].startswith("step ")]) == len(rows)
    words = page.tab.locator("#pg-panel .timeline-words")
    assert words.inner_text().startswith(f"{len(rows)} steps: 39 tokens")
    page.tab.locator("#pg-panel .scrubber input").focus()
    page.tab.keyboard.press("Home")
    page.tab.keyboard.press("Shift+ArrowRight")
    page.tab.keyboard.press("Shift+ArrowRight")
    page.tab.wait_for_function(
        "document.querySelector('#pg-panel .timeline-words').textContent"
        ".startsWith('selected, 1 to 3, 3 steps')"
    )


def test_markup_in_prompt_and_output_is_inert(page: GeneratePage, served: Served) -> None:
    hostile = (
        "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>"
        "${window.hacked = 3} {{value}} `"
    )
    page.short(20)
    page.generate(hostile)
    assert hostile in page.tab.inner_text("#pg-panel .turn.user")
    page.tab.get_by_label("Completion").check()
    page.generate(hostile)
    assert hostile in page.tab.inner_text("#pg-panel .prompt")
    assert page.count("#pg-panel .text :is(script, img)") == 0
    assert page.tab.evaluate("window.hacked") is None
    page.go("Runs")
    page.tab.wait_for_selector("#pg-runs tbody tr")
    assert page.count("#pg-runs tbody :is(script, img)") == 0
    assert page.tab.evaluate("window.hacked") is None


def test_an_invalid_request_shows_one_sentence(page: GeneratePage) -> None:
    page.start("  ")
    page.wait_state("failed")
    assert "empty" in page.tab.inner_text("#pg-panel .alert")
    page.start("long " * 300)
    page.tab.locator("#pg-panel .alert", has_text="context").wait_for()
    page.set("seed", "<b>luck</b>")
    page.start("Hello.")
    page.tab.locator("#pg-panel .alert", has_text="seed must be").wait_for()
    assert page.tab.input_value("#pg-prompt textarea") == "Hello."


def test_faults_badge_and_cost_follow_what_is_typed(page: GeneratePage) -> None:
    page.set("max_new_tokens", "0")
    said = page.tab.locator(".pg-field-max_new_tokens.faulty .info-text")
    said.wait_for()
    assert said.inner_text().startswith("max_new_tokens must be greater than")
    page.set("max_new_tokens", "5")
    said.wait_for(state="detached")
    assert not page.tab.is_visible(".pg-field-top_p"), "only sampling reads it"
    page.set("temperature", "0.7")
    page.tab.wait_for_selector(".pg-field-top_p")
    page.pick_method("Scripted tree", "note")
    head = page.tab.locator("#pg-method-form .pg-group > button")
    assert "lossless" in head.inner_text()
    page.set("note", "lossy")
    head.filter(has_text="lossy").wait_for()
    unknown = page.tab.locator("#pg-expected").get_by_text("not known yet")
    for drafting, state in (("as set", "visible"), ("auto", "detached")):
        choose(page.tab, ".pg-field-drafting input", drafting)
        unknown.wait_for(state=state)


def test_chat_goes_on_and_starts_anew(page: GeneratePage) -> None:
    page.short(12)
    page.generate("One.")
    page.generate("Two.")
    assert page.count("#pg-panel .turn.user") == 2
    first = page.tab.locator("#pg-panel .tokens").first
    first.locator("span").nth(3).click()
    page.tab.wait_for_selector("#pg-panel .tree-view svg")
    assert "current" in (first.locator("span").nth(3).get_attribute("class") or "")
    page.tab.click("#pg-again")
    page.wait_done()
    assert page.count("#pg-panel .turn.user") == 2
    page.tab.click("#pg-new")
    page.tab.wait_for_selector("#pg-panel .placeholder")
    assert page.count("#pg-panel .turn") == 0


def test_lost_batches_are_fetched_again(page: GeneratePage, served: Served) -> None:
    page.pick_method("Scripted tree", "max_draft_len")
    page.short(60)
    page.set("delay_ms", "10")
    page.tab.evaluate(
        """() => {
          const parse = JSON.parse;
          let seen = 0;
          JSON.parse = (text, ...rest) => {
            const value = parse(text, ...rest);
            const hasEvents = Object.values(value ?? {})[0]?.events?.length > 0;
            return hasEvents && ++seen % 3 === 0 ? {} : value;
          };
        }"""
    )
    page.generate("Lose some.")
    run = served.host.runs.all()[-1]
    assert run.finish is not None and page.text() == run.finish.text
    assert page.count("#pg-panel .tokens [data-n]") > 0


def test_a_method_file_is_pasted_opened_and_run(page: GeneratePage, tmp_path: Path) -> None:
    """What is wrong in it stands at the box, as at any other control."""
    tab, file = page.tab, tmp_path / "method.yaml"
    page.pick_method("Scripted tree", "max_draft_len")
    tab.click("#pg-method-file button")
    box, said = tab.locator("#pg-method-file-text textarea"), ".pg-field-method_file{} .info-text"
    box.fill("speculative_config:\n  decoding_type: NGram\n  max_draft_len: 0\n")
    tab.locator(said.format(".faulty"), has_text="max_draft_len must be").wait_for()
    assert "Scripted tree" in tab.input_value("#pg-method input")
    file.write_text("decoding_type: Autoregressive\n")
    with tab.expect_file_chooser() as chooser:
        tab.click("#pg-method-file-open")
    chooser.value.set_files(file)
    tab.locator(said.format(":not(.faulty)"), has_text="Read as Plain").wait_for()
    page.short()
    page.generate("Say it.")
    assert page.count(DRAFTS) == 0 < page.count(OWN)
