"""Trees through a block: the likeliest paths, found as by trying all of them."""

from __future__ import annotations

import itertools

import pytest
import torch

from engine.drafters.blocks.base import BlockMethod
from engine.drafters.heads.vocabulary import Vocabulary
from engine.proposal import Proposal

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


def test_a_chain_is_the_likeliest_token_of_every_place() -> None:
    logits = torch.randn(5, SIZE, generator=torch.Generator().manual_seed(0))
    found = drafted(logits, use_dynamic_tree=False)
    assert found.tokens.tolist() == [99, *logits.argmax(dim=-1).tolist()]
    assert found.shape.is_chain
