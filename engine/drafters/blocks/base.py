"""A whole block drafted by one forward: a distribution per place, none of which knows the others.

A chain takes the likeliest token of every place. A tree takes the paths that are likeliest if the
places are taken as independent:

    place 1  a 0.6  b 0.4        paths of 3 nodes   a 0.6, ac 0.54, b 0.4
    place 2  c 0.9  d 0.1        nodes              a, b below the root, c below a

Both follow from the committed text alone, so they are lossless under sampling.
Source: arXiv:2604.12989 (DDTree), section 3.
"""

from __future__ import annotations

from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from engine.config import setting
from engine.drafters.base import chain
from engine.drafters.eagle.trees import Candidates, kept_tree
from engine.drafters.heads.vocabulary import Vocabulary
from engine.drafters.method import MethodConfig
from engine.kernels.cpu.operators import topk
from engine.proposal import Proposal

TREE = "dynamic_tree_max_topK max_total_draft_tokens"
"""Settings of a block's tree."""
AT_ONCE = ", all in one forward"


class BlockMethod(MethodConfig):
    """What methods share that draft a block in one forward."""

    size_settings: ClassVar[str] = f"max_draft_len {TREE}"
    without_effect: ClassVar[Any] = (({"use_dynamic_tree": False}, TREE),)

    mask_token_id: int | None = setting(
        None, "Mask token", "token id of the mask; None = what the checkpoint says", ge=0
    )
    use_dynamic_tree: bool = setting(
        False,
        "Dynamic tree",
        "draft the likeliest paths through the block (DDTree) instead of one chain",
    )
    dynamic_tree_max_topK: int = setting(
        8, "Children per node", "tree: likeliest tokens considered at each position", ge=1, le=64
    )
    max_total_draft_tokens: int = setting(
        32, "Draft tokens", "tree: drafted nodes kept", ge=1, le=1024
    )

    def with_chain(self, length: int) -> Self:
        return super().with_chain(length).replace(use_dynamic_tree=False)

    def fill(self, root: int, logits: Tensor, vocabulary: Vocabulary) -> Proposal:
        """The draft below the root that logits `(places, size)` of a block make."""
        top_k = min(self.dynamic_tree_max_topK, vocabulary.size) if self.use_dynamic_tree else 1
        best = topk(logits, top_k)
        ids = vocabulary.target_ids(best.ids)
        if not self.use_dynamic_tree:
            return chain(root, ids[:, 0], best.log_probs[:, 0].exp())
        keep = self.max_total_draft_tokens
        return kept_tree(ids.new_tensor([root]), _paths(ids, best.log_probs, keep), keep, top_k)


def _paths(ids: Tensor, log_probs: Tensor, keep: int) -> Candidates:
    """Nodes that may be among the `keep` likeliest, from `(places, k)` tokens of every place.

    A path is never likelier than its beginning: of every place, more than `keep` nodes with
    children cannot matter.
    """
    scores, parents = log_probs[0], torch.full_like(ids[0], -1)
    levels, first = [Candidates(ids[0], log_probs[0], scores, parents)], 0
    for tokens, level in zip(ids[1:], log_probs[1:], strict=True):
        grown = scores.topk(min(keep, len(scores))).indices.sort().values
        parents = (first + grown).repeat_interleave(len(tokens))
        first += len(scores)
        scores = (scores[grown, None] + level).flatten()
        again = (len(grown),)
        levels.append(Candidates(tokens.repeat(again), level.repeat(again), scores, parents))
    return Candidates(*(torch.cat(column) for column in zip(*levels, strict=True)))
