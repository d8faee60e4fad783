"""PARD drafts what its model says to the whole text and masks behind it; trees through a block."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch

from engine.drafters.blocks.base import BlockMethod
from engine.drafters.blocks.pard import PardConfig
from engine.drafters.heads.vocabulary import Vocabulary
from engine.model.target import Target
from engine.proposal import Proposal
from tests.engine.drafters import judges
from tests.engine.drafters.judges import PROMPTS, write
from tests.models import build_context, plain_greedy, tiny_target

MASK = 270


@functools.cache
def trained() -> Target:
    """The target itself with a mask: right one token ahead, random beyond."""
    return tiny_target(eos_token_id=None, pard_token=MASK)


def context(target: Target, model: Target | None = None) -> Any:
    return build_context(target, small=model or trained())


def config(**settings: Any) -> PardConfig:
    return PardConfig.parse({"decoding_type": "PARD", "speculative_model": "small", **settings})


@torch.inference_mode()
def whole_text_logits(model: Target, text: list[int], length: int) -> torch.Tensor:
    """As the authors' pard_infer.py: the text, length - 1 masks, and the last rows' logits."""
    ids = torch.tensor([[*text, *[MASK] * (length - 1)]])
    logits: torch.Tensor = model.model(ids, use_cache=False).logits
    return logits[0, -length:]


def drafts_of(length: int) -> judges.Reference:
    return lambda text: whole_text_logits(trained(), text, length).argmax(dim=-1).tolist()


@pytest.mark.parametrize("length", [1, 4, 12])
def test_every_draft_equals_the_model_s_on_the_whole_text(length: int) -> None:
    target = judges.target_of("llama")
    drafter = config(max_draft_len=length).build(context(target))
    assert judges.assert_drafts_equal(drafts_of(length), target, drafter) > 0


def test_the_text_fills_the_context_and_a_shorter_model_stops_before() -> None:
    target = judges.target_of("llama")
    short = tiny_target("llama", eos_token_id=None, pard_token=MASK, max_position_embeddings=40)
    for model, most in ((trained(), 256), (short, 40)):
        drafter = config(max_draft_len=7).build(context(target, model))
        prompt = ([7, 8, 9, 10] * 64)[: most - 9]
        text = write(target, drafter, prompt, tokens=9 if most == 256 else 20)
        assert text.output == plain_greedy(target, prompt, len(text.output))
        for step in text.steps:
            room = min(target.context_len - 1 - step.context_len, most - step.context_len)
            assert step.num_drafted == max(0, min(7, room))


def test_every_committed_token_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    target, model = judges.target_of("llama"), trained()
    drafter = config(max_draft_len=3).build(context(target, model))
    rows: list[int] = []
    verify = model.verify
    monkeypatch.setattr(
        model, "verify", lambda fed, *rest: rows.append(len(fed.tokens)) or verify(fed, *rest)
    )
    text = write(target, drafter, PROMPTS[1], tokens=20)
    read = sum(rows) - 2 * len(rows)
    assert read == len(PROMPTS[1]) + 1 + sum(len(step.committed) for step in text.steps[:-1])


# ---- trees through a block: the likeliest paths, found as by trying all of them

SIZE = 6


def drafted(logits: torch.Tensor, *, ids: torch.Tensor | None = None, **tree: int) -> Proposal:
    values = {"decoding_type": "Block", "use_dynamic_tree": True, **tree}
    return BlockMethod.parse(values).fill(99, logits, Vocabulary(ids, 100))


def paths(proposal: Proposal) -> set[tuple[int, ...]]:
    shape, tokens = proposal.shape, proposal.tokens.tolist()
    assert tokens[0] == 99 and shape.parents[0] == -1
    return {tuple(tokens[n] for n in shape.path_to(node)) for node in range(1, len(shape))}


def test_the_example_of_the_docstring() -> None:
    logits = torch.tensor([[0.6, 0.4, 1e-9, 1e-9], [1e-9, 1e-9, 0.9, 0.1]]).log()
    found = drafted(logits, dynamic_tree_max_topK=2, max_total_draft_tokens=3)
    assert paths(found) == {(0,), (0, 2), (1,)}
    assert found.sibling_ranks() == (0, 0, 1, 0)
    assert found.draft_probs is not None
    assert found.draft_probs.tolist() == pytest.approx([1.0, 0.6, 0.4, 0.9], rel=1e-5)


@pytest.mark.parametrize("keep", [1, 2, 7, 25, 200])
@pytest.mark.parametrize("top_k", [1, 2, 6])
def test_the_likeliest_paths_are_kept(keep: int, top_k: int) -> None:
    logits = 2 * torch.randn(4, SIZE, generator=torch.Generator().manual_seed(keep))
    log_probs = logits.log_softmax(dim=-1)
    best = [row.topk(top_k).indices.tolist() for row in log_probs]
    scores = {
        path: sum(float(log_probs[i, token]) for i, token in enumerate(path))
        for depth in range(1, 5)
        for path in itertools.product(*best[:depth])
    }
    wanted = sorted(scores, key=lambda path: -scores[path])[:keep]
    ids = torch.arange(SIZE) * 7
    found = drafted(logits, ids=ids, dynamic_tree_max_topK=top_k, max_total_draft_tokens=keep)
    assert paths(found) == {tuple(7 * token for token in path) for path in wanted}
