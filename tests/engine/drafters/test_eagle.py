"""EAGLE's promises on tiny models: lossless, every published layout, wrong heads refused."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.drafters.eagle import trees
from engine.drafters.eagle.head import HeadSession
from engine.drafters.eagle.methods import Eagle3Config, EagleConfig, EagleDrafter
from engine.drafters.method import MethodConfig
from engine.errors import ConfigError, PlaygroundError
from tests.engine.drafters import judges
from tests.engine.drafters.eagle_heads import save_eagle, save_eagle3
from tests.engine.drafters.golden import ROOT, golden_case
from tests.engine.tuning.controlled import AtRandom
from tests.models import build_context, tiny_target

GOLDEN3 = ROOT / "eagle" / "eagle3" / "head"
TREE = {"use_dynamic_tree": True}
SMALL_TREE = {
    "use_dynamic_tree": True,
    "max_draft_len": 3,
    "dynamic_tree_max_topK": 4,
    "max_non_leaves_per_layer": 2,
    "max_total_draft_tokens": 9,
}
SETTINGS: dict[str, tuple[type[EagleConfig] | type[Eagle3Config], dict[str, Any]]] = {
    "eagle1": (EagleConfig, {}),
    "eagle1-leaves": (EagleConfig, {"eagle_choices": [[0, 0, 0], [1, 0], [5]]}),
    "eagle2": (EagleConfig, TREE),
    "eagle2-small": (EagleConfig, SMALL_TREE),
    "eagle3-chain": (Eagle3Config, {"eagle3_layers_to_capture": [0, 1, 2]}),
    "eagle3-tree": (Eagle3Config, {**SMALL_TREE, "eagle3_layers_to_capture": [0, 1, 2]}),
}


Heads = Callable[[str, str], Path]


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Heads:
    """A head of either kind per family; EAGLE-3's reads the last layer's output too."""
    root = tmp_path_factory.mktemp("heads")

    @functools.cache
    def head(family: str, kind: str) -> Path:
        target = judges.target_of(family)
        if kind == "Eagle":
            return save_eagle(root / family / "eagle", target)
        return save_eagle3(root / family / "eagle3", target, (1, 2, 3), draft_vocab=140)

    return head


def config(heads: Heads, family: str, name: str) -> MethodConfig:
    kind, settings = SETTINGS[name]
    head = heads(family, kind.model_fields["decoding_type"].default)
    return kind.parse({"speculative_model": str(head), **settings})


# ---- lossless


@pytest.mark.parametrize("name", ["eagle1", "eagle2", "eagle3-chain"])
def test_the_text_fills_the_context_exactly(name: str, heads: Heads) -> None:
    judges.assert_lossless_to_the_context_end(config(heads, "llama", name), "llama")


@pytest.mark.parametrize("name", ["eagle1", "eagle3-tree"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_head_that_computes_nan_costs_speed_and_nothing_else(
    name: str,
    temperature: float,
    heads: Heads,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target, prompt = judges.target_of("llama"), judges.PROMPTS[0]
    drafter = config(heads, "llama", name).build(build_context(target))
    assert isinstance(drafter, EagleDrafter)
    healthy = drafter.head.logits

    def broken(outputs: Tensor) -> Tensor:
        logits = healthy(outputs).clone()
        logits[1:] = torch.nan
        return logits

    monkeypatch.setattr(drafter.head, "logits", broken)
    text = judges.write(target, drafter, prompt, temperature=temperature)
    assert len(text.output) == 24
    if temperature == 0:
        assert text.output == judges.plain_text("llama", tuple(prompt), 24)


@pytest.fixture(scope="module")
def sampled_heads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root, target = tmp_path_factory.mktemp("sampled"), judges.sampled_target()
    return {
        "Eagle": save_eagle(root / "eagle", target),
        "Eagle3": save_eagle3(root / "eagle3", target, (1,), draft_vocab=6),
    }


SAMPLED: dict[str, tuple[Any, dict[str, Any]]] = {
    "eagle1": (EagleConfig, {"eagle_choices": [[0, 0], [0, 1], [1, 0], [2]]}),
    "eagle2": (EagleConfig, {**SMALL_TREE, "dynamic_tree_max_topK": 3}),
    "eagle3-chain": (Eagle3Config, {"max_draft_len": 2, "eagle3_layers_to_capture": [0]}),
    "eagle3-tree": (Eagle3Config, {**SMALL_TREE, "eagle3_layers_to_capture": [0]}),
}


def sampled_drafter(heads: dict[str, Path], name: str) -> EagleDrafter:
    kind, settings = SAMPLED[name]
    head = heads[kind.model_fields["decoding_type"].default]
    built = kind.parse({"speculative_model": str(head), **settings})
    drafter = built.build(build_context(judges.sampled_target()))
    assert isinstance(drafter, EagleDrafter)
    return drafter


@pytest.mark.parametrize(
    "name", ["eagle1", "eagle3-tree", *map(judges.slow, ("eagle2", "eagle3-chain"))]
)
def test_sampled_text_follows_the_target_s_law(name: str, sampled_heads: dict[str, Path]) -> None:
    drafter = sampled_drafter(sampled_heads, name)
    drawn = name == "eagle1"
    assert judges.p_value(judges.sampled_target(), drafter, drawn=drawn) > 1e-3


@pytest.mark.parametrize("name", ["eagle1", *map(judges.slow, ("eagle2", "eagle3-chain"))])
def test_sampled_text_follows_the_law_whatever_is_drafted_when(
    name: str, sampled_heads: dict[str, Path]
) -> None:
    target = judges.sampled_target()
    drafter = AtRandom.around(sampled_drafter(sampled_heads, name), target)
    assert judges.p_value(target, drafter, drawn=name == "eagle1") > 1e-3


def test_drafts_that_were_not_drawn_as_they_claim_break_the_law(
    sampled_heads: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The power of the test above: the likeliest tokens, passed off as draws."""
    monkeypatch.setattr(
        trees,
        "draw_without_replacement",
        lambda probs, count, draws: probs.topk(count).indices,
    )
    drafter = sampled_drafter(sampled_heads, "eagle1")
    assert judges.p_value(judges.sampled_target(), drafter, drawn=True) < 1e-4


# ---- the head's cache


@torch.inference_mode()
def test_base_entries_fed_in_pieces_between_trees_equal_one_pass() -> None:
    """300 entries cross the cache's first capacity; trees in between leave no trace."""
    target = golden_case("eagle/eagle3").target
    drafter = Eagle3Config(speculative_model=str(GOLDEN3)).build(build_context(target))
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(300, 144, generator=generator)
    tokens = torch.randint(0, 240, (300,), generator=generator)
    whole = HeadSession(drafter.head)
    whole.feed_base(features, tokens)
    pieces = HeadSession(drafter.head)
    for start, end in ((0, 250), (250, 253), (253, 254), (254, 300)):
        pieces.feed_base(features[start:end], tokens[start:end])
        for depth in (1, 2):
            mask = torch.eye(4, dtype=torch.bool).repeat(1, depth)
            pieces.expand(pieces.output.expand(4, -1), tokens[:4], depth, mask)
    torch.testing.assert_close(pieces.output, whole.output, atol=2e-5, rtol=0)
    every = drafter.head(drafter.head.fuse(features), tokens, torch.arange(300))
    torch.testing.assert_close(every[-1:], whole.output, atol=2e-5, rtol=0)


# ---- settings


@pytest.mark.parametrize("kind", [EagleConfig, Eagle3Config])
def test_keeping_more_nodes_than_are_drafted_names_both_numbers(kind: type[MethodConfig]) -> None:
    values = {**TREE, "max_draft_len": 3, "dynamic_tree_max_topK": 4}
    kind.parse({**values, "max_total_draft_tokens": 4 + 2 * 16})
    with pytest.raises(ConfigError, match="at most 36.*got 37"):
        kind.parse({**values, "max_total_draft_tokens": 37})
    kind.parse({**values, "max_total_draft_tokens": 37, "use_dynamic_tree": False})


# ---- runs


def test_half_precision_heads_follow_the_target_s_dtype(tmp_path: Path) -> None:
    target = tiny_target("llama", num_hidden_layers=7)
    target.model.to(torch.bfloat16)
    in_full = tiny_target("llama", num_hidden_layers=7)
    head = save_eagle3(tmp_path, in_full, (2, 3, 4), draft_vocab=50)
    values = {"speculative_model": str(head), **SMALL_TREE}
    drafter = Eagle3Config.parse(values).build(build_context(target))
    assert {weight.dtype for weight in drafter.head.parameters()} == {torch.bfloat16}
    text = judges.write(target, drafter, [5, 6, 7])
    assert len(text.output) == 24


# ---- the token map of FR-Spec


@pytest.mark.parametrize("form", ["list.pt", "tensor.pt", "list.json"])
def test_a_token_map_of_its_own_says_which_tokens_are_drafted(
    tmp_path: Path, heads: Heads, form: str
) -> None:
    """As published: a list of ids from torch.save, the most frequent first."""
    target, prompt = judges.target_of("llama"), judges.PROMPTS[0]
    written = judges.plain_text("llama", tuple(prompt), 40)
    ids = [*dict.fromkeys(written), *(i for i in range(60) if i not in written)][:40]
    file = tmp_path / form
    if form.endswith(".json"):
        file.write_text(json.dumps(ids))
    else:
        torch.save(ids if form == "list.pt" else torch.tensor(ids), file)
    for settings, allowed in (({}, ids), ({"draft_vocab": 20}, ids[:20])):
        values = {"speculative_token_map": str(file), "eagle_choices": [[0, 0, 0], [1, 0]]}
        config = EagleConfig.parse(
            {**values, **settings, "speculative_model": str(heads("llama", "Eagle"))}
        )
        text = judges.write(target, config.build(build_context(target)), prompt, tokens=40)
        assert text.output == written and text.num_accepted > 0
        assert {token for step in text.steps for token in step.tokens[1:]} <= set(allowed)


def test_a_wrong_token_map_is_named(tmp_path: Path, heads: Heads) -> None:
    target = judges.target_of("llama")
    torch.save([5, 5], tmp_path / "twice.pt")
    for named, words in (
        (str(tmp_path / "twice.pt"), "twice.pt must list different token ids below 288"),
        ("nowhere.pt", "'nowhere.pt' is neither a local file nor owner/repository/file"),
    ):
        config = EagleConfig(
            speculative_model=str(heads("llama", "Eagle")), speculative_token_map=named
        )
        with pytest.raises(PlaygroundError, match=words):
            config.build(build_context(target))
