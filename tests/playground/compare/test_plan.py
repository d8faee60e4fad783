"""What the Compare page holds becomes a plan, or one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.errors import PlaygroundError
from playground.experiments.forms import CompareForm
from playground.experiments.plan import BASELINE_NAME
from playground.host.catalog import Catalog
from presets import Prompt, PromptSuite
from tests.playground.compare.corrupted import Slot, held, with_corrupted
from tests.playground.tiny import tiny_catalog


@pytest.fixture
def catalog() -> Catalog:
    return with_corrupted(tiny_catalog(Path("nowhere")))


@pytest.mark.parametrize(
    ("configurations", "names"),
    [
        ([("scripted", {}), ("plain", {})], ["Scripted tree"]),
        (
            [("scripted", {}), ("scripted", {"max_draft_len": "5"}), ("corrupted", {})],
            [f"Scripted tree · max_draft_len {n}" for n in (3, 5)] + ["Corrupted"],
        ),
        (
            [("scripted", {}), ("scripted", {"scripted_choices": "[[0], [1]]"})],
            ["Scripted tree (1)", "Scripted tree (2)"],
        ),
    ],
)
def test_plain_decoding_is_first_and_others_are_named_by_what_differs(
    catalog: Catalog, configurations: list[Slot], names: list[str]
) -> None:
    plan = CompareForm.parse(held(*configurations)).plan(catalog)
    assert plan.names == [BASELINE_NAME, *names] and plan.reference.is_baseline


def test_a_suite_gives_prompts_of_every_category_in_turn(catalog: Catalog) -> None:
    def prompts(category: str, n: int) -> list[Prompt]:
        turns = [(f"{category} {i}", "more") for i in range(n)]
        return [Prompt(category=category, turns=t, id=t[0]) for t in turns]

    suite = PromptSuite(name="s", title="S", prompts=(*prompts("chat", 9), *prompts("code", 9)))
    catalog.suites["s"] = suite  # type: ignore[index]
    plan = CompareForm.parse(held(suite="s", prompt="", options={"num_prompts": "5"})).plan(catalog)
    assert [item.id for item in plan.items] == ["chat 0", "chat 1", "chat 2", "code 0", "code 1"]
    assert plan.items[3].turns == ("code 0",), "only the first turn is asked"


BAD: list[tuple[dict[str, Any], str]] = [
    (held(prompt=""), "empty"),
    (held(("plain", {})), "takes 1 to 4 .* got 0"),
    (held(("scripted", {}), ("scripted", {})), "are the same"),
    (held(("scripted", {"draft_len": "2"})), "max_draft_len"),
    (held(options={"repeats": "0"}), "repeats"),
    (held(suite="unheard"), "suite must be one of"),
    (held(*(("scripted", {"max_draft_len": n}) for n in range(1, 6))), "takes 1 to 4 .* got 5"),
    (held(configurations=[{"settings": {}}]), "configurations.0.method is missing"),
    (held(compare=[]), "compare must be a valid dictionary"),
    ({"target": "tiny"}, "configurations is missing"),
]


@pytest.mark.parametrize(("raw", "words"), BAD, ids=range(len(BAD)))
def test_what_cannot_be_compared_is_one_sentence(
    catalog: Catalog, raw: dict[str, Any], words: str
) -> None:
    with pytest.raises(PlaygroundError, match=words):
        CompareForm.parse(raw).plan(catalog)
