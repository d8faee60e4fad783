"""A drafter of one's own: registered by whoever starts the program, and never trusted."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint, EntryPoints
from typing import Any

import pytest
import torch

from engine.config import Sampling
from engine.drafters import user_provided
from engine.drafters.base import Drafter
from engine.drafters.user_provided import (
    UserDraft,
    UserProvidedConfig,
    load_user_drafter,
    register_user_drafter,
)
from engine.errors import ConfigError, DrafterError
from engine.model.target import Target
from engine.proposal import Budget, Needs, TargetOutput
from tests.engine.drafters import judges
from tests.engine.drafters.example_drafter import PairDrafter
from tests.models import build_context

EXAMPLE = "tests.engine.drafters.example_drafter:PairDrafter"
NAMED = UserProvidedConfig(drafter="mine")


@pytest.fixture(autouse=True)
def empty_registry(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(user_provided, "_factories", {})


def built(factory: Any) -> Any:
    register_user_drafter("mine", factory)
    return NAMED.build(build_context(judges.target_of("llama")))


def drafter_that_says(said: Any, **settings: Any) -> Any:
    """The session of a drafter whose object answers `said`."""

    class Says:
        def draft(self, token_ids, max_draft_len):
            return said

    user_provided._factories["mine"] = Says
    return judges.started(UserProvidedConfig(drafter="mine", **settings), [1, 2, 3])


@pytest.mark.parametrize(
    ("settings", "depth", "tokens", "parents"),
    [
        ({}, 99, [5, 6, 7, 8], [0, 1, 1, 0]),
        ({"max_draft_len": 1}, 99, [5, 8], [0, 0]),
        ({}, 1, [5, 8], [0, 0]),
        ({"max_total_draft_tokens": 3}, 99, [5, 6, 7], [0, 1, 1]),
        ({}, 0, [], []),
    ],
)
def test_candidates_are_merged_into_one_tree_and_cut(
    settings: dict[str, int], depth: int, tokens: list[int], parents: list[int]
):
    proposal = drafter_that_says([[5, 6], [5, 7], [8]], **settings).propose(Budget(depth))
    assert proposal.tokens.tolist() == [3, *tokens]
    assert proposal.shape.parents == (-1, *parents)


def test_a_name_that_nobody_registered_is_refused():
    bench = build_context(judges.target_of("llama"))
    with pytest.raises(ConfigError, match=r"got 'mine' \(registered: none\).*--drafter"):
        NAMED.build(bench)
    register_user_drafter("other", PairDrafter)
    with pytest.raises(ConfigError, match="registered: other"):
        NAMED.build(bench)
    with pytest.raises(ConfigError, match="got None"):
        UserProvidedConfig().build(bench)


def test_a_name_is_registered_once():
    register_user_drafter("mine", PairDrafter)
    register_user_drafter("mine", PairDrafter)
    with pytest.raises(ConfigError, match="'mine' is already registered"):
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
def test_a_drafter_that_cannot_be_loaded_is_named(spec: str, words: str):
    with pytest.raises(DrafterError, match=words):
        load_user_drafter(spec)


def test_an_entry_point_is_found_by_its_name(monkeypatch: pytest.MonkeyPatch):
    offered = EntryPoints([EntryPoint("pairs", EXAMPLE, user_provided.ENTRY_POINTS)])
    select: Callable[..., EntryPoints] = lambda group: offered.select(group=group)  # noqa: E731
    monkeypatch.setattr(user_provided, "entry_points", select)
    assert load_user_drafter("pairs") is PairDrafter


# ---- how it is made, and its life


@pytest.mark.parametrize("factory", [
    lambda: PairDrafter(None),
    lambda target: PairDrafter(target),
    lambda target=None: PairDrafter(target.name),
    lambda *args: PairDrafter(args),
])  # fmt: skip
def test_a_factory_takes_the_target_or_nothing(factory: Any):
    assert isinstance(built(factory), Drafter)


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        (lambda target: object(), "must have a method draft"),
        (lambda target, size: PairDrafter(target), "requires target, size"),
    ],
)
def test_what_cannot_draft_or_asks_for_more_than_the_target_is_refused(factory: Any, words: str):
    with pytest.raises(DrafterError, match=words):
        built(factory)


class Watched:
    """Drafts nothing and notes what it is told."""

    needs = Needs(hidden=True, layers=(1,))

    def __init__(self) -> None:
        self.seen: list[tuple[list[int], TargetOutput]] = []
        self.told: list[Any] = []

    def prepare(self, prompt_ids, sampling, limits):
        self.told.append((prompt_ids, sampling.temperature, limits.max_new_tokens))

    def draft(self, token_ids, max_draft_len, features):
        self.seen.append((list(token_ids), features))
        return [[1, 2]]

    def free(self):
        self.told.append("free")


def test_a_drafter_is_told_when_a_text_begins_and_ends():
    user = Watched()
    drafter = built(lambda: user)
    for prompt in ([5, 6], [7]):
        judges.write(judges.target_of("llama"), drafter, prompt, tokens=4)
    assert user.told == [([5, 6], 0.0, 4), "free", ([7], 0.0, 4), "free"]


def test_a_drafter_sees_the_targets_logits_and_hidden_states_row_by_row():
    target, user = judges.target_of("llama"), Watched()
    prompt = judges.PROMPTS[0]
    judges.write(target, built(lambda: user), prompt, tokens=12)
    text, _ = user.seen[-1]
    with torch.inference_mode():
        whole = target.model(torch.tensor([text]), output_hidden_states=True)
        normed = target.model.model(torch.tensor([text])).last_hidden_state[0]
    shown = [features for _, features in user.seen]
    hidden = torch.cat([each.hidden for each in shown if each.hidden is not None])
    layers = torch.cat([each.layers for each in shown if each.layers is not None])
    logits = torch.cat([each.logits for each in shown])
    assert len(hidden) == len(text) - 1 and len(logits) == len(text) - len(prompt)
    torch.testing.assert_close(hidden, normed[:-1], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(layers, whole.hidden_states[1][0, :-1], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(logits, whole.logits[0, len(prompt) - 1 : -1], atol=1e-3, rtol=1e-3)


# ---- trees and probabilities of its own


class Sampler:
    """Two siblings drawn from one row, without replacement, then a child of the first."""

    def __init__(self, vocab: int) -> None:
        self.generator = torch.Generator().manual_seed(3)
        self.rows = (12 * torch.rand(2, vocab, generator=self.generator)).softmax(-1)

    def draft(self, token_ids, max_draft_len):
        row, below = self.rows
        pair = torch.multinomial(row, 2, generator=self.generator).tolist()
        child = int(torch.multinomial(below, 1, generator=self.generator))
        return UserDraft([*pair, child], [-1, -1, 0], torch.stack([row, row, below]))


def sampler(target: Target) -> Drafter:
    register_user_drafter("sampler", lambda: Sampler(target.vocab_size))
    return UserProvidedConfig(drafter="sampler").build(build_context(target))


def test_a_tree_drawn_from_its_own_probabilities_follows_the_target():
    target = judges.sampled_target()
    assert judges.p_value(target, sampler(target), drawn=True) > 1e-3


def test_drawn_tokens_are_verified_with_what_they_were_drawn_from():
    drafter = sampler(judges.target_of("llama"))
    sampled = judges.begin(drafter, [1, 2, 3], sampling=Sampling(temperature=1.0))
    proposal = sampled.propose(Budget(9))
    assert proposal.shape.parents == (-1, 0, 0, 1) and proposal.dists is not None
    assert proposal.dists.row_of_parent == {0: 0, 1: 2}
    assert judges.begin(drafter, [1, 2, 3]).propose(Budget(9)).dists is None


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ([[288]], "drafted token 288, but the target's vocabulary has 288"),
        ([[5, -1]], "drafted token -1"),
        ([["a"]], r"lists of token ids, got \['a'\]"),
        ([7], "lists of token ids, got 7"),
        (UserDraft([5, 6], [-1]), "gave 2 tokens and 1 parents"),
        (UserDraft([5, 5], [-1, -1]), "gave a node twice"),
        (UserDraft([5, 6], [0, -1]), "parents must be"),
        (UserDraft([288]), "drafted token 288"),
        (UserDraft([5], None, torch.ones(1, 288)), "rows sum to 1"),
        (UserDraft([5], None, torch.ones(2, 3)), r"of shape \(1, 288\)"),
    ],
)
def test_drafts_without_sense_are_refused_with_a_sentence(said: Any, words: str):
    with pytest.raises((DrafterError, ConfigError), match=words):
        drafter_that_says(said).propose(Budget(99))


# ---- written for TensorRT-LLM

DOCUMENTED = "tests.engine.drafters.documented_drafter"


def test_a_class_written_from_tensorrt_llm_s_guide_runs_unchanged():
    drafter = built(load_user_drafter(f"{DOCUMENTED}:MyDrafter"))
    assert judges.assert_greedy_lossless(judges.target_of("llama"), drafter) > 0
    assert "tensorrt_llm" not in sys.modules


def test_its_resource_manager_lives_with_the_text():
    drafter = built(load_user_drafter(f"{DOCUMENTED}:speculative_config"))
    manager = sys.modules[DOCUMENTED].speculative_config.resource_manager
    manager.told.clear()
    steps = judges.write(judges.target_of("llama"), drafter, [1, 2, 1], tokens=6).steps
    expected = ["prepare"] + ["update", "prepare"] * (len(steps) - 1) + ["free"]
    assert manager.told == expected and not manager.pools
