"""Judges of tree verification: mask, logits and cache against plain causal forwards."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from engine.config import Limits
from engine.drafters.heads.vocabulary import DraftOutput, Vocabulary
from engine.model.batch import TextBatch
from engine.model.forward import MaskBuilder
from engine.model.target import Target
from engine.proposal import Needs, Proposal
from engine.tree import TreeShape
from tests.engine.drafters.judges import slow, write
from tests.engine.scripted import Parents, ScriptedDrafter, random_parents, tokens_of
from tests.models import FAMILIES, HYBRIDS, VOCAB, plain_greedy, tiny_model, tiny_target

SOME_FAMILIES = [f if f in ("llama", "gemma3_text") else slow(f) for f in FAMILIES]
"""Full attention, and windows of two layer types; the others are slow."""
TOLERANCE: dict[str, Any] = {"atol": 2e-4, "rtol": 1e-4}


def random_path(rng: random.Random, shape: TreeShape) -> tuple[int, ...]:
    return (0, *shape.path_to(rng.randrange(len(shape))))


def sees(parents: Parents, node: int, other: int) -> bool:
    while node not in (-1, other):
        node = parents[node]
    return node == other


def depth_of(parents: Parents, node: int) -> int:
    return 0 if node == 0 else 1 + depth_of(parents, parents[node])


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("committed", [0, 3, 11, 30])
def test_the_mask_is_ancestry_within_the_window(seed: int, committed: int) -> None:
    window = FAMILIES["gemma3_text"]["sliding_window"]
    builder = MaskBuilder(tiny_model("gemma3_text", num_hidden_layers=1, layer_types=None))
    builder.is_per_type, builder.additive = True, False
    rng = random.Random(seed)
    parents = random_parents(rng, rng.randint(2, 24))
    shape = TreeShape(parents)
    positions = shape.depths + committed
    masks = builder.build(positions, shape.ancestors, committed, torch.float32)
    for q in range(len(parents)):
        at = committed + depth_of(parents, q)
        places = list(range(committed)) + positions.tolist()
        full = [k < committed or sees(parents, q, k - committed) for k in range(len(places))]
        near = [see and at - places[k] < window for k, see in enumerate(full)]
        assert masks["full_attention"][0, 0, q].tolist() == full
        assert masks["sliding_attention"][0, 0, q].tolist() == near


def test_settings_that_the_architecture_does_not_know_change_no_mask() -> None:
    masks = MaskBuilder(
        tiny_model("llama", sliding_window=3, layer_types=["sliding_attention"] * 3)
    )
    assert not masks.is_per_type and masks.window is None


def plain_logits(target: Target, token_ids: list[int]) -> torch.Tensor:
    """Last logits of a forward by transformers alone: no cache, no mask of ours."""
    config = target.model.config.get_text_config()
    ours = config._attn_implementation
    target.model.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            out = target.model(torch.tensor([token_ids]), use_cache=False)
    finally:
        target.model.set_attn_implementation(ours)
    return out.logits[0, -1]


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, **TOLERANCE)


SHAPES = {
    "chain": lambda rng: list(range(-1, 5)),
    "star": lambda rng: [-1] + [0] * 8,
    "any": lambda rng: random_parents(rng, rng.randint(1, 24)),
    "seldom": lambda rng: random_parents(rng, rng.choice([1, 1, 9])),
}


@pytest.mark.parametrize("family", SOME_FAMILIES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("truth", [0.0, 0.7, 1.0])
def test_greedy_output_equals_target_alone_on_any_tree(
    family: str, shape: str, truth: float
) -> None:
    target = tiny_target(family)
    prompt = tokens_of(random.Random(1), 10)
    output = plain_greedy(target, prompt, 25)
    drafter = ScriptedDrafter(output, vocab=VOCAB, shape=SHAPES[shape], truth=truth)
    text = write(target, drafter, prompt, limits=Limits(max_new_tokens=25))
    assert text.output == output
    assert (text.num_accepted > 0) == (truth > 0)
    if shape == "chain" and truth == 1.0:
        assert text.end.num_steps == -(-(len(output) - 1) // 6)


@pytest.mark.parametrize(
    "family", [*SOME_FAMILIES, "qwen3_5_text", *map(slow, ("jamba", "mamba2", "llama4_text"))]
)
def test_texts_of_a_batch_show_what_each_shows_alone(family: str) -> None:
    check_batch(tiny_target(family), **TOLERANCE)


def check_batch(target: Target, **near: Any) -> None:
    rng = random.Random(5)
    prompts = [tokens_of(rng, count) for count in (21, 4, 30)]
    batch = TextBatch(target, 4, 40)
    batch.advance([(row, 0, prompt) for row, prompt in enumerate(prompts)])
    # What is read at a position again, replaces it; a text that is not asked any more is over.
    for asked, count in (((0, 1, 2), 5), ((0, 1, 2), 1), ((0, 2), 3)):
        drafts = {row: tokens_of(rng, count) for row in asked}
        read = [(r, t, len(prompts[r]) + i) for r in asked for i, t in enumerate(drafts[r])]
        together = batch.step(read).unflatten(0, (len(asked), count))
        for shown, row in zip(together, asked, strict=True):
            cache = target.new_cache(40)
            target.prefill(prompts[row], cache, Needs())
            chain = Proposal(torch.tensor(drafts[row]), TreeShape.chain(count - 1))
            alone = target.verify(chain, cache, Needs())
            torch.testing.assert_close(shown, alone.logits, **near)
    batch.repeat(15)
    shown = batch.step([(3, 7, 15)])
    alone = target.prefill([*prompts[0][:15], 7], target.new_cache(40), Needs())
    torch.testing.assert_close(shown, alone.logits, **near)


SCALED: dict[str, dict[str, Any]] = {
    "gemma2": {},
    "granite": {"logits_scaling": 4.0},
    "hyperclovax": {"logits_scaling": 4.0},
    "minicpm3": {},
    "cohere": {"logit_scale": 0.25},
    **dict.fromkeys(("recurrent_gemma", "inkling_text", "inkling2_text"), {}),
    "falcon_h1": {"lm_head_multiplier": 0.5},
    "modernbert-decoder": {"bos_token_id": 0, "pad_token_id": 0},
}
"""Families whose logits are not the products of the last hidden state and the output matrix."""


@torch.inference_mode()
@pytest.mark.parametrize("family", ["llama", "gemma2", "granite", *map(slow, [*HYBRIDS, *SCALED])])
def test_a_draft_output_gives_hidden_states_the_logits_of_the_target(family: str) -> None:
    target = tiny_target(family, **SCALED.get(family, {}))
    shown = target.prefill([200, 150, 201], target.new_cache(8), Needs(hidden=True))
    assert shown.hidden is not None
    ids = torch.tensor([3, 50, 200])
    logits = DraftOutput(target)(shown.hidden)[-1, : target.vocab_size]
    some = DraftOutput(target, Vocabulary(ids, target.vocab_size))(shown.hidden)[-1]
    torch.testing.assert_close(logits, shown.logits[-1])
    torch.testing.assert_close(some, shown.logits[-1, ids])
