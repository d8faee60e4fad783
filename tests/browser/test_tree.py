"""The Tree page in a real browser: edit by keyboard and mouse, import and export."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from engine.tree import ChoiceTree
from engine.tuning.replay import replay
from tests.browser.pages import GeneratePage, saved
from tests.browser.trees import DOCUMENTED, TreePage, Tuned, keys_of, linked, shown_mat
from tests.engine.tuning.tables import random_tree

pytestmark = pytest.mark.browser


def test_a_tree_is_built_by_keyboard_and_edits_are_undone(tree: TreePage, tuned: Tuned) -> None:
    for _ in range(150):
        tree.press("Tab")
        if tree.focused() is not None:
            break
    assert tree.focused() == ""
    tree.press("ArrowRight", "Delete", "Delete")
    assert tree.nodes() == [""] and tree.focused() == ""
    assert tree.figure("mat") == "1.000"
    tree.press("Enter", "Enter", "Enter", "Enter")
    assert tree.focused() == "0.0.0.0"
    tree.press("ArrowLeft", "ArrowLeft", "s", "Enter")
    assert tree.focused() == "0.1.0"
    tree.press("ArrowLeft", "ArrowLeft", "s", "Enter", "s")
    assert tree.nodes() == keys_of(DOCUMENTED)
    assert tree.figure("nodes") == "9 / 4"
    wanted = replay(tuned.table, DOCUMENTED)
    assert tree.figure("mat") == f"{wanted.mat:.3f}"
    assert tree.figure("steps").startswith(f"{wanted.num_steps} / ")
    assert tree.said().startswith("Added [1, 1]. 9 nodes, depth 4, MAT ")
    tree.wait_link(DOCUMENTED)
    assert tree.tool("redo").is_disabled()
    tree.tool("undo").click()
    tree.press("Control+z")
    assert tree.nodes() == [key for key in keys_of(DOCUMENTED) if key not in ("1.0", "1.1")]
    tree.press("Control+Shift+Z")
    tree.tool("redo").click()
    assert tree.nodes() == keys_of(DOCUMENTED) and tree.tool("redo").is_disabled()


def test_the_mouse_adds_folds_zooms_and_asks_what_a_node_is_worth(
    tree: TreePage, tuned: Tuned
) -> None:
    node = tree.host.locator('[data-key="1"]')
    node.click()
    tree.tool("next").click()
    assert tree.nodes()[1:4] == ["0", "1", "2"]
    node.dblclick()
    assert "1.2" in tree.nodes()
    node.click()
    tree.tool("fold").click()
    assert "1.0" not in tree.nodes()
    assert node.locator("text").last.text_content() == "+3"
    assert node.get_attribute("aria-expanded") == "false"
    node.focus()
    tree.press("ArrowRight")
    assert "1.0" in tree.nodes()
    tree.host.locator('[data-key="0"]').hover()
    paths = [path for path in tree.nodes() if path and not path.startswith("0")]
    rest = ChoiceTree.parse([[int(r) for r in path.split(".")] for path in paths])
    loss = tree.host.locator(".info .loss").inner_text()
    assert f"\u2192 {shown_mat(tuned.table, rest)}" in loss
    words = tree.host.locator(".info .facts").inner_text()
    assert re.search(r"tried \d+ times, accepted \d+ \(\d+% of tries", words)
    svg = tree.host.locator("svg[role=tree]")
    before = svg.bounding_box()["width"]
    tree.tool("in").click()
    assert svg.bounding_box()["width"] == pytest.approx(1.25 * before, rel=0.02)
    tree.tool("fit").click()
    assert svg.bounding_box()["width"] < 1.25 * before


def test_a_large_tree_is_edited_without_lag(
    chromium: Any, tuned: Tuned, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table has 10,000 positions; an edit ends when its figures and the tree are drawn."""
    size, limit_ms = 256, 200
    big = random_tree(size, depth=5, ranks=8, seed=4)
    assert len(big) == size and tuned.table.num_positions == 10_000
    path = f"/?tree={linked(big)}&method=medusa&target=tiny"
    with GeneratePage.opened(chromium, tuned.served.url, path=path) as page:
        tree = TreePage(page)
        tree.wait_figure("nodes", f"^{size} / 5$")
        tree.ready()
        assert tree.figure("mat") == shown_mat(tuned.table, big)
        clock = page.tab.context.new_cdp_session(page.tab)
        clock.send("Performance.enable", {"timeDomain": "threadTicks"})
        edits_ms = sorted(timed_edit(page.tab, clock, i) for i in range(30))
        with capsys.disabled():
            print(f"\n{size} nodes: median {edits_ms[15]:.1f} ms, worst {edits_ms[-1]:.1f} ms")
        assert edits_ms[15] < limit_ms
        left = tree.nodes()
        assert left != keys_of(big) and tree.figure("nodes").startswith(f"{len(left) - 1} / ")
        page.check_clean()


def timed_edit(tab: Any, clock: Any, i: int) -> float:
    """Milliseconds of the page's own thread for an edit, up to the next frame."""
    tab.evaluate(
        """async (i) => {
          const nodes = document.querySelectorAll('#pg-tree [role=treeitem]');
          window.edited = nodes[(37 * i + 11) % nodes.length];
          window.edited.focus();
          await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
        }""",
        i,
    )

    def thread_ms() -> float:
        metrics = clock.send("Performance.getMetrics")["metrics"]
        return 1000 * next(float(m["value"]) for m in metrics if m["name"] == "TaskDuration")

    before = thread_ms()
    tab.evaluate(
        """async (i) => {
          const deep = window.edited.dataset.key.split('.').length > 4;
          const key = ['Enter', 's', 'Delete'][deep ? 2 : i % 2];
          window.edited.dispatchEvent(new KeyboardEvent('keydown', { key, bubbles: true }));
          await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
        }""",
        i,
    )
    return thread_ms() - before


def test_a_fault_of_an_import_is_named(tree: TreePage) -> None:
    before = tree.nodes()
    tree.tool("import").click()
    box = tree.host.locator("textarea[aria-label='tree as text']")
    alert = tree.host.locator(".sheet [role=alert]")
    box.fill("[[0], [0, x]]")
    tree.tool("read").click()
    tree.tab.wait_for_function(
        "document.querySelector('#pg-tree .sheet [role=alert]').textContent !== ''"
    )
    assert "as [[0], [0, 0]], got [0, 'x']" in alert.inner_text()
    assert box.get_attribute("aria-invalid") == "true"
    assert tree.nodes() == before
    box.fill("{0}, {1}, {0, 2}")
    tree.tool("read").click()
    tree.wait_figure("nodes", "^3 / 2$")
    assert tree.nodes() == ["", "0", "1", "0.2"]
    assert "Imported 3 nodes" in tree.said()


def test_a_tree_goes_out_and_comes_back_as_a_file(tree: TreePage, tmp_path: Path) -> None:
    tree.host.locator(".mask summary").click()
    tree.host.locator(".mask td", has_text="[0, 1, 3, 7, 9]").wait_for()
    assert tree.host.locator(".mask svg").count() == 10
    tree.tool("export").click()
    sheet = tree.host.locator(".sheet[aria-label='Export this tree']")
    sheet.locator("select").select_option(value="triton")
    tree.tab.wait_for_function(
        "document.querySelector('#pg-tree [aria-label=\"exported tree\"]').value.startsWith('{0}')"
    )
    file = tmp_path / "tree.txt"
    file.write_text(saved(tree.tab, "#pg-tree [data-tool=download]")[1])
    assert file.read_text().startswith("{0}, {1}, {0, 0}")
    before = tree.nodes()
    tree.host.locator('[data-key="0"]').click()
    tree.press("Delete")
    tree.tool("import").click()
    tree.host.locator("input[type=file]").set_input_files(file)
    tree.wait_figure("nodes", "^9 / 4$")
    assert tree.nodes() == before


def test_presets_open_and_own_trees_are_kept(tree: TreePage, tuned: Tuned) -> None:
    hostile = "<img src=x onerror='window.hacked = 1'> ${window.hacked = 2}"
    menu = tree.host.get_by_label("preset trees")
    label = menu.locator("option", has_text="25 nodes").first.inner_text()
    menu.select_option(label=label)
    tree.wait_figure("nodes", "^25 / 5$")
    tree.tool("save").click()
    tree.host.get_by_label("name of the tree").fill(hostile)
    tree.press("Enter")
    option = menu.locator("option", has_text=hostile)
    option.wait_for(state="attached")
    tree.host.locator('[data-key="0"]').click()
    tree.press("Delete")
    menu.select_option(label=option.inner_text())
    tree.wait_figure("nodes", "^25 / 5$")
    assert tree.tab.evaluate("window.hacked") is None
    tree.host.get_by_role("button", name="Delete the saved tree with this name").click()
    option.wait_for(state="detached")
