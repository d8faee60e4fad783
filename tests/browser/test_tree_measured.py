"""The Tree page in a real browser: optimise, measure, and use the tree."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from engine.tree import ChoiceTree
from engine.tuning.replay import replay
from playground.host.live import LiveRun
from playground.trees.measurements import Measurements
from tests.browser.trees import DOCUMENTED, PROMPTS, TreePage, Tuned, shown_mat

pytestmark = pytest.mark.browser


def test_the_best_tree_is_a_ghost_until_it_is_accepted(
    tree: TreePage, tuned: Tuned, shots: Path
) -> None:
    before = tree.nodes()
    why = re.compile(r"9 nodes as a chain accept \d\.\d\d drafts a step.*as the best tree \d")
    tree.host.locator("[data-part=against]", has_text=why).wait_for()
    assert tree.host.locator("[data-field=nodes]").input_value() == "9", "as large as the tree"
    tree.host.locator("[data-field=nodes]").fill("14")
    tree.tool("best").click()
    tree.tab.wait_for_selector("#pg-tree .node.add")
    assert tree.figure("nodes") == "9 / 4"
    state = tree.host.locator("[data-card=optimise] > .card-state").inner_text()
    assert state.startswith("14 nodes: MAT ")
    tree.tool("dismiss").click()
    assert tree.nodes() == before
    tree.tool("best").click()
    tree.tab.wait_for_selector("#pg-tree .node.add")
    tree.tool("accept").click()
    assert tree.figure("nodes").startswith("14 / ") and not tree.page.count("#pg-tree .node.add")
    paths = [[int(rank) for rank in key.split(".")] for key in tree.nodes()[1:]]
    best = ChoiceTree.parse(paths, form="candidates")
    assert tree.figure("mat") == shown_mat(tuned.table, best)
    assert replay(tuned.table, best).mat > replay(tuned.table, DOCUMENTED).mat
    tree.press("Control+z")
    assert tree.nodes() == before
    tree.tab.wait_for_selector("#pg-tree [data-card=optimise] .plot .scatterlayer .trace")
    tree.page.check_width(shots, "tree")
    tree.pick("category", "code")
    assert tree.figure("mat") == shown_mat(tuned.table.only("code"), DOCUMENTED)


def test_latency_is_measured_and_predicts_and_a_run_checks_it(tree: TreePage) -> None:
    assert tree.figure("tok_s") == "\u2013"
    tree.host.get_by_role("button", name="Measure latency").click()
    tree.wait_figure("tok_s", r"^\d")
    tree.tab.wait_for_selector("#pg-tree [data-card=latency] .plot .scatterlayer .trace")
    tree.tool("best-size").click()
    tree.tab.wait_for_function(
        "/nodes: MAT|best tree/.test(document.querySelector("
        "'#pg-tree [data-card=optimise] > .card-state').textContent)"
    )
    tree.tool("dismiss").click()
    tree.host.locator('[data-key="1"]').click()
    tree.press("Delete")
    tree.tool("child").focus()
    tree.host.get_by_role("button", name="Use in Generate").click()
    form = tree.tab.locator("#pg-method-form")
    form.get_by_role("button", name="List of paths").click()
    field = form.locator(".pg-field-medusa_choices textarea")
    field.wait_for(state="visible")
    pruned = "[[0],[0,0],[0,1],[0,0,0],[0,1,0],[0,0,0,0]]"
    assert field.input_value() == pruned
    tree.tab.get_by_label("Completion").check()
    tree.page.short(24)
    tree.page.generate("Say hello.")
    tree.page.go("Tree")
    card = tree.host.locator("[data-card=runs]")
    card.scroll_into_view_if_needed()  # it asks once it is seen
    row = card.locator("tbody tr", has_text="Say hello.")
    row.wait_for(state="visible")
    assert re.search(r"\d+\.\d \([+\u2212]\d+%\)", row.inner_text())
    tree.host.get_by_role("button", name="Use in Compare").click()
    form = tree.tab.locator("#pg-cmp-form")
    form.locator(".pg-group > button").click()
    form.get_by_role("button", name="List of paths").click()
    field = form.locator(".pg-field-medusa_choices textarea")
    field.wait_for(state="visible")
    assert field.input_value() == pruned


def test_a_forms_tree_is_edited_on_the_tree_page(tree: TreePage) -> None:
    tree.page.go("Generate")
    tree.page.pick_method("Tiny Medusa", "acceptance")
    form = tree.tab.locator("#pg-method-form")
    form.get_by_role("button", name="List of paths").click()
    form.locator(".pg-field-medusa_choices textarea").fill("[[0],[1],[2]]")
    form.locator("figcaption", has_text="3 nodes, 1 deep").wait_for()
    form.get_by_role("button", name="Edit on the Tree page").click()
    tree.host.locator('[data-key="2"]').wait_for()
    assert tree.host.locator('[data-key="0.0"]').count() == 0


def test_ranks_are_measured_with_progress_and_stop(
    tree: TreePage, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = Measurements._answer

    def until_stopped(self: Measurements, run: LiveRun, *more: Any) -> str:
        assert run.cancel_requested.wait(60.0), "nobody pressed Stop"
        return answer(self, run, *more)

    tree.pick("method", "Tiny EAGLE")
    label = tree.host.locator("[data-picker=source] option", has_text="suite Small").inner_text()
    tree.pick("source", label)
    assert "not measured yet" in tree.host.locator(".state").inner_text()
    job = tree.host.locator(".bar .job")
    with monkeypatch.context() as held:
        held.setattr(Measurements, "_answer", until_stopped)
        tree.host.get_by_role("button", name="Measure ranks").click()
        tree.host.locator(".bar .job-text", has_text="writing text 1 of 4").wait_for()
        assert job.locator("progress").get_attribute("value") == "0"
        job.get_by_role("button", name="Stop").click()
        tree.host.locator(".bar .job-text", has_text="Stopped").wait_for()
    tree.page.reload()
    tree.page.go("Tree")
    tree.ready()
    tree.pick("method", "Tiny EAGLE")
    tree.pick("source", label)
    tree.host.get_by_role("button", name="Measure ranks").click()
    tree.wait_figure("mat", r"^\d")
    tree.ready()
    assert "of 4 texts" in tree.host.locator(".state").inner_text()
    hit = tree.host.locator("[data-key='0'], [data-key='1'], [data-key='2'], [data-key='3']")
    names = hit.evaluate_all("nodes => nodes.map(node => node.getAttribute('aria-label'))")
    accepted = next(i for i, name in enumerate(names) if "accepted 0 " not in name)
    hit.nth(accepted).hover()
    tree.host.locator(".info .example q").wait_for()


def test_a_chain_is_a_slider_and_a_grown_tree_is_run(tree: TreePage) -> None:
    tree.pick("method", "N-gram")
    label = tree.host.locator("[data-picker=source] option", has_text=PROMPTS[0]).inner_text()
    tree.pick("source", label)
    tree.host.get_by_role("button", name="Measure ranks").click()
    tree.wait_figure("mat", r"^\d")
    slide = tree.host.get_by_label("draft length")
    slide.focus()
    tree.press("Home")
    assert tree.figure("nodes") == "1 / 1"
    tree.press("ArrowRight", "ArrowRight")
    assert tree.figure("nodes") == "3 / 3"
    tree.host.locator('[data-key="0"]').focus()
    tree.press("s")
    assert "ranks 0 to 0" in tree.host.locator(".hint").inner_text()
    tree.pick("method", "Tiny EAGLE-2")
    tree.host.get_by_role("button", name="Run it here").click()
    tree.wait_figure("nodes", "^12 / ")
    tree.host.locator("[data-field=max_total_draft_tokens]").fill("5")
    tree.host.get_by_role("button", name="Run it here").click()
    tree.wait_figure("nodes", "^5 / ")
    tree.press("Enter")
