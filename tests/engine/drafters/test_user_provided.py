"""A drafter of one's own: registered by whoever starts the program, and never trusted."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import Sampling
from engine.drafters import user_provided
from engine.drafters.base import Drafter, Start
from engine.drafters.user_provided import (
    UserProvidedConfig,
    load_user_drafter,
    register_user_drafter,
    registered_user_drafters,
)
from engine.errors import ConfigError, DrafterError
from engine.proposal import TargetOutput
from engine.sampling import SeededDraws
from tests.engine.drafters import judges
from tests.engine.drafters.example_drafter import PairDrafter
from tests.models import build_context

EXAMPLE = "tests.engine.drafters.example_drafter:PairDrafter"
NAMED = UserProvidedConfig(drafter="mine")


@pytest.fixture(autouse=True)
def empty_registry(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(user_provided, "_factories", {})


def drafter_that_says(said: Any, **settings: int) -> Drafter:
    """A started drafter whose object answers `said`."""

    class Says:
        def draft(self, token_ids, max_draft_len):
            return said

    register_user_drafter("mine", lambda target: Says())
    config = UserProvidedConfig(drafter="mine", **settings)
    drafter = config.build(build_context(judges.target_of("llama")))
    drafter.start(Start([1, 2], 3, TargetOutput(torch.zeros(1, 1)), Sampling(), SeededDraws(0)))
    return drafter


def test_the_example_fits_into_thirty_lines():
    source = Path(__file__).with_name("example_drafter.py").read_text()
    assert len(source.splitlines()) <= 30


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_neox", "opt"])
@pytest.mark.parametrize("length", [1, 2, 4, 8, 16])
def test_greedy_output_with_the_example_equals_target_alone(family: str, length: int):
    register_user_drafter("mine", load_user_drafter(EXAMPLE))
    config = UserProvidedConfig(drafter="mine", max_draft_len=length)
    assert judges.assert_greedy_lossless(config, family) > 0


def test_sampled_output_with_the_example_follows_the_target():
    register_user_drafter("mine", PairDrafter)
    target = judges.sampled_target()
    assert judges.p_value(target, NAMED.build(build_context(target))) > 1e-3


def test_context_end_is_reached_exactly():
    register_user_drafter("mine", PairDrafter)
    judges.assert_lossless_to_the_context_end(NAMED, "opt")


def test_candidates_are_merged_into_one_tree():
    proposal = drafter_that_says([[5, 6], [5, 7], [8]]).propose(99)
    assert proposal.tokens.tolist() == [3, 5, 6, 7, 8]
    assert proposal.shape.parents == (-1, 0, 1, 1, 0)


def test_candidates_are_cut_to_length_depth_and_number():
    assert drafter_that_says([[5, 6, 7]], max_draft_len=2).propose(99).tokens.tolist() == [3, 5, 6]
    drafter = drafter_that_says_again([[5, 6, 7], [8], [9]])
    assert drafter.propose(1).tokens.tolist() == [3, 5, 8, 9]
    drafter = drafter_that_says_again([[5, 6, 7], [8], [9]], max_total_draft_tokens=4)
    assert drafter.propose(99).tokens.tolist() == [3, 5, 6, 7, 8]
    assert drafter.propose(0).tokens.tolist() == [3]


def drafter_that_says_again(said: Any, **settings: int) -> Drafter:
    user_provided._factories.clear()
    return drafter_that_says(said, **settings)


def test_a_name_that_nobody_registered_is_refused():
    bench = build_context(judges.target_of("llama"))
    with pytest.raises(ConfigError, match=r"got 'mine' \(registered: none\).*--drafter"):
        NAMED.build(bench)
    register_user_drafter("other", PairDrafter)
    assert registered_user_drafters() == ("other",)
    with pytest.raises(ConfigError, match="registered: other"):
        NAMED.build(bench)
    with pytest.raises(ConfigError, match="got None"):
        UserProvidedConfig().build(bench)


def test_a_config_cannot_import_code():
    config = UserProvidedConfig(drafter=EXAMPLE)
    with pytest.raises(ConfigError, match="registered"):
        config.build(build_context(judges.target_of("llama")))


def test_a_name_is_registered_once():
    register_user_drafter("mine", PairDrafter)
    register_user_drafter("mine", PairDrafter)
    with pytest.raises(ConfigError, match="'mine' is registered already"):
        register_user_drafter("mine", lambda target: PairDrafter(target))
    with pytest.raises(ConfigError, match="must not be empty"):
        register_user_drafter(" ", PairDrafter)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("no_such_module:Class", "No module named"),
        ("math:Nothing", "has no attribute"),
        (":Class", "module:Class"),
        ("math:", "module:Class"),
        ("math:pi", "must be a class or function, got float"),
        ("nothing", "No installed package offers a drafter 'nothing'"),
    ],
)
def test_what_cannot_be_loaded_is_said(spec: str, words: str):
    with pytest.raises(DrafterError, match=words):
        load_user_drafter(spec)


def test_an_entry_point_is_found_by_its_name(monkeypatch: pytest.MonkeyPatch):
    offered = EntryPoints([EntryPoint("pairs", EXAMPLE, user_provided.ENTRY_POINTS)])
    select: Callable[..., EntryPoints] = lambda group: offered.select(group=group)  # noqa: E731
    monkeypatch.setattr(user_provided, "entry_points", select)
    assert load_user_drafter("pairs") is PairDrafter


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ([[288]], "drafted token 288, but the target's vocabulary has 288"),
        ([[5, -1]], "drafted token -1"),
        ([["a"]], r"lists of token ids, got \['a'\]"),
        ([7], "lists of token ids, got 7"),
    ],
)
def test_nonsense_is_refused_with_a_sentence(said: Any, words: str):
    with pytest.raises(DrafterError, match=words):
        drafter_that_says(said).propose(99)


def test_an_object_without_draft_is_refused():
    register_user_drafter("mine", lambda target: object())
    with pytest.raises(DrafterError, match="must have a method draft"):
        NAMED.build(build_context(judges.target_of("llama")))
