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
from tests.playground.compare.corrupted import held, with_corrupted
from tests.playground.tiny import tiny_catalog


@pytest.fixture
def catalog() -> Catalog:
    return with_corrupted(tiny_catalog(Path("nowhere")))


def test_plain_decoding_is_always_the_first(catalog: Catalog) -> None:
    plan = CompareForm.parse(held(("scripted", {}), ("plain", {}))).plan(catalog)
    assert [c.name for c in plan.configurations] == [BASELINE_NAME, "Scripted tree"]
    assert plan.configurations[0].config.decoding_type == "Autoregressive"


def test_a_method_that_stands_twice_is_named_by_what_differs(catalog: Catalog) -> None:
    plan = CompareForm.parse(
        held(("scripted", {}), ("scripted", {"max_draft_len": "5"}), ("corrupted", {})),
    ).plan(catalog)
    assert [c.name for c in plan.configurations[1:]] == [
        "Scripted tree · max_draft_len 3",
        "Scripted tree · max_draft_len 5",
        "Corrupted",
    ]
    assert plan.configurations[2].config.model_dump()["max_draft_len"] == 5


def test_trees_have_no_short_name_and_are_numbered(catalog: Catalog) -> None:
    plan = CompareForm.parse(
        held(("scripted", {}), ("scripted", {"scripted_choices": "[[0], [1]]"}))
    ).plan(catalog)
    names = [c.name for c in plan.configurations]
    assert names[1:] == ["Scripted tree (1)", "Scripted tree (2)"]


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
    (held(("unheard", {})), "method must be one of"),
    (held(("scripted", {"max_draft_len": "0"})), "max_draft_len"),
    (held(("scripted", {"draft_len": "2"})), "max_draft_len"),
    (held(options={"repeats": "0"}), "repeats"),
    (held(options={"rounds": "3"}), "rounds"),
    (held(suite="unheard"), "suite must be one of"),
    (held(configurations=[]), "configurations must have at least 1"),
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
