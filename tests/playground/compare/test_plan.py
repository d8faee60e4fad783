"""What the Compare page holds becomes a plan, or one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.errors import PlaygroundError
from playground.experiments.forms import CompareForm
from playground.experiments.plan import BASELINE_NAME
from playground.host.catalog import Catalog
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
