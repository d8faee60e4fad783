"""EAGLE heads on the compiled kernels draft what their modules draft."""

from __future__ import annotations

import ctypes
import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.drafters.autoregressive import AutoregressiveConfig
from engine.drafters.draft_target import DraftTargetConfig
from engine.drafters.eagle.head import DraftHead, Eagle1Head, Eagle3Head, Eagle3Spec, HeadEntries
from engine.drafters.eagle.methods import EagleDrafter
from engine.drafters.eagle.trees import DynamicTree, StaticTree, expand_candidates
from engine.drafters.heads.layer import HeadCache, HeadSpec
from engine.drafters.heads.vocabulary import FILE, DraftOutput, TokenEmbedding, Vocabulary
from engine.errors import DrafterError
from engine.kernels.cpu.operators import Matrix, NativeEmbedding, NativeLinear
from engine.model.packed import weight_of, weight_rows
from engine.model.target import Target
from engine.proposal import Needs
from engine.tree import ChoiceTree
from tests.engine.cpu.targets import deviation, native, wide_model
from tests.engine.device.conftest import device as device
from tests.engine.drafters.judges import write
from tests.engine.methods import moved
from tests.models import build_context, tiny_target

SPEC: dict[str, Any] = {
    "hidden": 64,
    "intermediate": 96,
    "heads": 2,
    "kv_heads": 1,
    "head_dim": 32,
    "eps": 1e-5,
    "rope": {"rope_theta": 10000.0},
    "rotary_dim": 32,
}


@pytest.fixture(scope="module")
def target(kernels: ctypes.CDLL) -> Target:
    return native(wide_model("llama"), kernels, 8)


def head_of(name: str, target: Target, **sizes: int) -> DraftHead:
    """A random head in bfloat16, whose norms and biases are not what they begin as."""
    torch.manual_seed(len(name))
    head: DraftHead
    if name.startswith("eagle1"):
        ids = torch.randperm(target.vocab_size)[:100] if "subset" in name else None
        output = DraftOutput(target, Vocabulary(ids, target.vocab_size))
        spec = HeadSpec(**SPEC | sizes, qkv_bias="biased" in name)
        head = Eagle1Head(spec, output, bias=True)
    else:
        spec = HeadSpec(**SPEC | sizes, qk_norm="qk" in name)
        own = None if "own" in name else DraftOutput(target)
        size = 128 if "own" in name else target.vocab_size
        flags: dict[str, Any] = {
            "norm_before_residual": "normed" in name,
            "norm_output": "fed" in name,
        }
        head = Eagle3Head(Eagle3Spec(spec, 3, 64, size, **flags), own)
    for parameter in head.parameters():
        if parameter.ndim == 1:
            parameter.data.add_(0.2 * torch.randn(parameter.shape))
    head.embedding = TokenEmbedding.of(target.embedding)
    return head.to(torch.bfloat16).requires_grad_(False)


HEADS = ("eagle1", "eagle1-biased", "eagle1-subset", "eagle3", "eagle3-own-qk", "eagle3-normed-fed")


@pytest.mark.parametrize("name", HEADS)
@torch.inference_mode()
def test_levels_of_a_tree_equal_the_modules(name: str, target: Target) -> None:
    modules = head_of(name, target)
    kernels = head_of(name, target)
    kernels.use_kernels(target.kernels)
    assert kernels.decoder is not None and modules.decoder is None
    for path, packed in kernels.named_modules():
        if isinstance(packed, NativeLinear):
            modules.get_submodule(path).weight = nn.Parameter(packed.unpack().bfloat16(), False)
    rng, caches = random.Random(3), (HeadCache(1), HeadCache(1))

    def near(count: int, visible: Any, *, last_only: bool = False) -> None:
        hidden = torch.randn(count, 64).bfloat16()
        tokens = torch.tensor([rng.randrange(200) for _ in range(count)])
        positions = torch.arange(count) + caches[0].length
        both = [
            head.predict(hidden, tokens, positions, cache, visible, last_only=last_only)
            for head, cache in zip((modules, kernels), caches, strict=True)
        ]
        for theirs, ours in zip(*both, strict=True):
            assert ours.shape == theirs.shape
            assert deviation(ours, theirs) < 0.05, (name, count)
        for cache in caches:
            cache.length += count

    near(23, None, last_only=True)
    base = caches[0].length
    near(4, torch.eye(4, dtype=torch.bool))
    seen = torch.cat([torch.eye(4, dtype=torch.bool)[[0, 0, 2]], torch.eye(3).bool()], dim=1)
    near(3, seen)
    for cache in caches:
        cache.truncate(base)
    near(1, None)
    near(1, None)
    everything = torch.tril(torch.ones(5, 5 + caches[0].length).bool(), caches[0].length)
    everything[:, 2:7] = False
    near(5, everything)


@pytest.mark.parametrize("name", ["eagle1", "eagle3"])
@pytest.mark.parametrize(
    "sizes", [{"intermediate": 80}, {"head_dim": 16, "rotary_dim": 16}, {"rotary_dim": 16}], ids=str
)
@torch.inference_mode()
def test_a_head_of_sizes_that_the_kernels_cannot_read_is_run_by_its_modules(
    name: str, sizes: dict[str, int], target: Target
) -> None:
    """The kernels read whole blocks of 32 columns."""
    head = head_of(name, target, **sizes)
    entries = torch.randn(5, 64).bfloat16(), torch.randint(200, (5,)), torch.arange(5)
    expected = head.predict(*entries, HeadCache(1))[1]
    head.use_kernels(target.kernels)
    assert deviation(head.predict(*entries, HeadCache(1))[1], expected) < 0.2
    assert head.decoder is None


@torch.inference_mode()
def test_a_packed_embedding_is_read_without_unpacking_it(target: Target) -> None:
    assert target.kernels is not None
    matrix = Matrix.of(target.kernels, weight_of(target.embedding), bits=8)
    packed = NativeEmbedding(target.embedding, matrix)  # type: ignore[arg-type]
    torch.manual_seed(7)
    entries = torch.randn(9, 64).bfloat16(), torch.randint(200, (9,)), torch.arange(9)
    logits = []
    for embedding in (TokenEmbedding.of(packed), TokenEmbedding(matrix.rows())):
        head = head_of("eagle3", target)
        head.embedding = embedding
        head.use_kernels(target.kernels)
        assert head.decoder is not None
        logits.append(head.predict(*entries, HeadCache(1))[1])
    assert deviation(*logits) < 0.03, "rounded to bfloat16 or not"
    assert TokenEmbedding.of(packed).for_kernels is matrix
    ids = torch.tensor([7, 3, 7])
    for module in (packed, target.embedding, target.lm_head):
        assert torch.equal(weight_rows(module, ids), weight_of(module)[ids])


def chains(head: DraftHead, least: float, steps: int = 4) -> list[tuple[list[int], list[float]]]:
    """What a session drafts step after step, in one call each and level by level."""
    at_once, by_level = HeadEntries(head, HeadCache(1)), HeadEntries(head, HeadCache(1))
    torch.manual_seed(7)
    found = []
    for step in range(steps):
        features = torch.randn(3 + step, 64 * (1 if isinstance(head, Eagle1Head) else 3)).bfloat16()
        tokens = torch.randint(200, (3 + step,))
        drafted = at_once.chain(features, tokens, 4, least)
        assert drafted is not None
        found.append((drafted[0].tolist(), drafted[1].tolist()))
        by_level.feed_base(features, tokens)
        grown = expand_candidates(by_level, DynamicTree(1, 4, 4, 1))
        found.append((grown.tokens.tolist(), grown.log_probs.tolist()))
    return found


@pytest.mark.parametrize("name", HEADS)
@torch.inference_mode()
def test_a_chain_in_one_call_is_the_chain_level_by_level(name: str, target: Target) -> None:
    head = head_of(name, target)
    head.use_kernels(target.kernels)
    found = chains(head, 0.0)
    for (tokens, log_probs), (others, said) in zip(found[::2], found[1::2], strict=True):
        assert tokens == others and len(tokens) == 4
        assert log_probs == pytest.approx(said, abs=1e-4)
    # It ends behind the first path that is less likely, and is the same up to there.
    least = float(torch.tensor(found[0][1][:2]).sum().exp()) * 1.001
    shorter = chains(head, least, steps=1)[0]
    assert shorter[0] == found[0][0][:2]


@pytest.mark.parametrize("ids", [None, torch.arange(90, 20, -3)])
@torch.inference_mode()
def test_a_model_drafts_a_chain_in_one_call(target: Target, ids: Tensor | None) -> None:
    once, one_by_one = target.new_cache(64), target.new_cache(64)
    prompt = torch.arange(20, 31)
    target.prefill(prompt[:5], once, Needs())
    target.prefill(prompt[:5], one_by_one, Needs())
    found = target.draft_chain(prompt[5:], once, 5, ids=ids)
    assert found is not None
    feed, expected = prompt[5:], []
    for _ in range(5):
        logits = target.prefill(feed, one_by_one, Needs()).logits[-1].float()
        logits = logits if ids is None else logits[ids]
        best = logits.argmax()[None]
        feed = best if ids is None else ids[best]
        expected.append((int(feed), float(logits.log_softmax(-1)[best])))
    assert found[0].tolist() == [token for token, _ in expected]
    assert found[1].tolist() == pytest.approx([said for _, said in expected], abs=1e-4)
    assert once.length == one_by_one.length == 5 + 6 + 4


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("grown", [True, False])
@pytest.mark.parametrize("name", ["eagle1", "eagle1-subset"])
def test_heads_on_the_kernels_draft_without_changing_the_text(
    name: str, grown: bool, temperature: float, target: Target
) -> None:
    head = head_of(name, target)
    head.use_kernels(target.kernels)
    paths = ((0,), (1,), (0, 0), (0, 1), (0, 0, 0))
    tree = DynamicTree(3, 3, 8, 3) if grown else StaticTree(ChoiceTree(paths), torch.device("cpu"))
    drafter = EagleDrafter(head, tree, Needs(hidden=True))
    plain = AutoregressiveConfig().build(build_context(target))
    expected, text = (
        write(target, one, list(range(30, 45)), tokens=40, temperature=temperature, seed=4)
        for one in (plain, drafter)
    )
    assert len(expected.output) == len(text.output) == 40 and len(text.steps) > 5
    if not temperature:
        assert text.output == expected.output


# ---- which tokens are drafted


def test_a_file_beside_the_weights_says_which_tokens_are_drafted(
    target: Target, tmp_path: Path
) -> None:
    ids = random.Random(1).sample(range(target.vocab_size), 50)
    assert Vocabulary.beside(str(tmp_path), target, None).ids is None
    with pytest.raises(DrafterError, match="has no draft_vocab.json"):
        Vocabulary.beside(str(tmp_path), target, 16)
    (tmp_path / FILE).write_text(json.dumps(ids))
    vocabulary = Vocabulary.beside(str(tmp_path), target, 20)
    assert vocabulary.ids is not None and vocabulary.ids.tolist() == ids[:20]
    output = DraftOutput(target, vocabulary)
    hidden = torch.randn(2, 3, target.hidden_size).bfloat16()
    whole = target.output(hidden)
    torch.testing.assert_close(output(hidden), whole[..., ids[:20]], atol=0.05, rtol=0.05)
    places = vocabulary.index(torch.tensor([ids[3], ids[30]]))
    assert places.tolist() == [3, -1] and vocabulary.target_ids(torch.tensor([3])).tolist() == [
        ids[3]
    ]
    spread = vocabulary.spread(torch.full((1, 20), 0.05))
    assert spread.shape == (1, target.vocab_size) and torch.equal(
        spread[0, ids[:20]], torch.full((20,), 0.05)
    )


@pytest.mark.parametrize(
    ("temperature", "threshold"), [(0.0, 0.0), (0.0, 1e-6), (1.0, 0.0)], ids=str
)
def test_listed_tokens_are_drafted_by_a_model_on_another_device(
    temperature: float, threshold: float, target: Target, device: torch.device, tmp_path: Path
) -> None:
    """By the compiled kernels on the processor: in one call, token by token, and sampled."""
    listed = [*range(target.vocab_size)][::-1][:200]
    (tmp_path / FILE).write_text(json.dumps(listed))
    settings = {"speculative_model": str(tmp_path), "confidence_threshold": threshold}
    config = DraftTargetConfig.parse(settings)
    own = tiny_target(eos_token_id=None)
    texts = []
    for verifier in (own, moved(own, device)):
        drafter = config.build(build_context(verifier, **{str(tmp_path): target}))
        texts.append(write(verifier, drafter, [7, 8], temperature=temperature))
    drafted = {token for step in texts[1].steps for token in step.tokens[1:]}
    assert texts[1].output == texts[0].output and drafted and drafted <= {*listed}


@pytest.mark.parametrize("packed", [False, True])
def test_a_part_of_the_output_matrix_has_its_bias(packed: bool, kernels: ctypes.CDLL) -> None:
    torch.manual_seed(0)
    head = nn.Linear(64, 256, dtype=torch.bfloat16).requires_grad_(False)
    head.bias.normal_(0, 3)
    shared = kernels if packed else None
    target: Any = SimpleNamespace(
        lm_head=head, output=head, vocab_size=256, kernels=shared, config=tiny_target().config
    )
    ids, hidden = torch.arange(0, 256, 3), torch.randn(4, 64, dtype=torch.bfloat16)
    found = DraftOutput(target, Vocabulary(ids, 256))(hidden)
    torch.testing.assert_close(found.float(), head(hidden)[:, ids].float(), atol=0.1, rtol=0.05)
