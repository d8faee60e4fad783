"""The Tree page as a person uses it, for browser tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.tree import ChoiceTree
from engine.tuning.ranks import RankTable
from engine.tuning.replay import replay
from tests.browser.pages import GeneratePage
from tests.playground.serving import Served

DOCUMENTED = ChoiceTree.parse("[[0,0,0,0],[0,1,0],[1,0],[1,1]]")
PROMPTS = ("Tell me of ships.", "Tell me of birds.")
"""Of the runs that are in the log from the start."""


@dataclass(frozen=True)
class Tuned:
    """The served page, and the table that its Medusa method is replayed on."""

    served: Served
    table: RankTable


class TreePage:
    """The editor as a person uses it."""

    def __init__(self, page: GeneratePage) -> None:
        self.page = page
        self.tab = page.tab
        self.host = page.tab.locator("#pg-tree")

    def ready(self) -> None:
        """Wait until a method is picked and its table (if it has one) is replayed."""
        self.tab.wait_for_selector("#pg-tree [role=treeitem]")
        self.tab.wait_for_selector("#pg-tree .bar[aria-busy=false]", state="attached")

    def figure(self, name: str) -> str:
        return str(self.host.locator(f"[data-figure={name}]").inner_text())

    def nodes(self) -> list[str]:
        """Keys of all nodes on show, root included, in node order."""
        keys = "items => items.map(item => item.dataset.key)"
        return list(self.host.locator("[role=treeitem]").evaluate_all(keys))

    def focused(self) -> str | None:
        found = self.tab.evaluate("document.activeElement.getAttribute('data-key')")
        return None if found is None else str(found)

    def press(self, *keys: str) -> None:
        for key in keys:
            self.tab.keyboard.press(key)

    def tool(self, name: str) -> Any:
        return self.host.locator(f"[data-tool={name}]")

    def pick(self, picker: str, label: str) -> None:
        self.host.locator(f"[data-picker={picker}]").select_option(label=label)
        self.ready()

    def said(self) -> str:
        return str(self.host.locator("[data-part=live]").text_content())

    def wait_figure(self, name: str, wanted: str) -> None:
        self.tab.wait_for_function(
            "([name, wanted]) => new RegExp(wanted).test(document.querySelector("
            "`#pg-tree [data-figure=${name}]`)?.textContent)",
            arg=[name, wanted],
        )

    def wait_link(self, wanted: ChoiceTree) -> None:
        """The address follows the edits a moment later."""
        self.tab.wait_for_function(
            "wanted => new URLSearchParams(location.search).get('tree') === wanted",
            arg=linked(wanted),
        )


def linked(paths: ChoiceTree) -> str:
    return "_".join(".".join(map(str, path)) for path in paths.leaves)


def keys_of(tree: ChoiceTree) -> list[str]:
    return ["", *(".".join(map(str, path)) for path in tree.paths)]


def shown_mat(table: RankTable, tree: ChoiceTree) -> str:
    return f"{replay(table, tree).mat:.3f}"
