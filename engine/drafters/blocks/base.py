"""A whole block drafted by one forward: a distribution per position, independent of each other.

A chain takes the most probable token of every position. A tree takes the most probable paths if
positions are taken as independent:

    position 1  a 0.6  b 0.4     paths of 3 nodes   a 0.6, ac 0.54, b 0.4
    position 2  c 0.9  d 0.1     nodes              a, b below the root, c below a

Both follow from the committed text alone, so they are lossless under sampling.
Source: arXiv:2604.12989 (DDTree), section 3.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from engine.config import setting
from engine.drafters.base import FeatureDrafter, FeatureSession, chain, root_only
from engine.drafters.eagle.trees import Candidates, kept_tree
from engine.drafters.heads.vocabulary import Vocabulary
from engine.drafters.method import MethodConfig, draft_nodes
from engine.kernels.cpu.operators import topk
from engine.proposal import Budget, Proposal

AT_ONCE = ", all in one forward"


class BlockMethod(MethodConfig):
    """The settings of methods that draft a block in one forward."""

    main_settings = "drafting max_draft_len use_dynamic_tree"
    without_effect = (
        ({"use_dynamic_tree": False}, "dynamic_tree_max_topK max_total_draft_tokens"),
    )

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
    max_total_draft_tokens: int = draft_nodes(32)

    def with_chain(self, length: int) -> Self:
        return super().with_chain(length).replace(use_dynamic_tree=False)

    def top_k(self, vocabulary: Vocabulary) -> int:
        return min(self.dynamic_tree_max_topK, vocabulary.size) if self.use_dynamic_tree else 1

    def fill(self, root: int, logits: Tensor, vocabulary: Vocabulary) -> Proposal:
        """The draft below the root from logits `(positions, size)` of a block."""
        top_k = self.top_k(vocabulary)
        best = topk(logits, top_k)
        ids = vocabulary.target_ids(best.ids)
        if not self.use_dynamic_tree:
            return chain(root, ids[:, 0], best.log_probs[:, 0].exp())
        keep = self.max_total_draft_tokens
        return kept_tree(root, _paths(ids, best.log_probs, keep), keep, top_k)


B = TypeVar("B", bound="BlockDrafter")


class BlockSession(FeatureSession[B]):
    def propose(self, budget: Budget) -> Proposal:
        drafter, length = self.drafter, min(self.drafter.max_len, budget.depth)
        if length < 1:
            return root_only(self.root, drafter.device)
        features, tokens = self.unread()
        budget = replace(budget, depth=length)
        proposal = drafter.fill(features, tokens, self.root, budget, self.cache)
        self.cursor.row = self.cache.length
        return proposal


class BlockDrafter(FeatureDrafter):
    """Keeps a network's cache in step with the target's features, and drafts one block per step.

    Attributes:
        max_len: positions of the longest block.
    """

    session = BlockSession
    max_len: int
    device: torch.device

    @abstractmethod
    def fill(
        self, features: Tensor, tokens: Tensor, root: int, budget: Budget, cache: Any
    ) -> Proposal:
        """A draft of `budget.depth` positions, after new rows that the cache gains.

        Args:
            features: `(n, width)` of the target; `tokens (n,)` follow them, the last is the root.
            cache: as `new_cache` made it.
        """


def _paths(ids: Tensor, log_probs: Tensor, keep: int) -> Candidates:
    """Nodes that may be among the `keep` best, from `(positions, k)` tokens of every position.

    A path is never more probable than its beginning: at every position, more than `keep` nodes
    with children cannot matter.
    """
    scores, parents = log_probs[0], torch.full_like(ids[0], -1)
    levels, first = [Candidates(ids[0], log_probs[0], scores, parents)], 0
    for tokens, level in zip(ids[1:], log_probs[1:], strict=True):
        expanded = scores.topk(min(keep, len(scores))).indices.sort().values
        parents = (first + expanded).repeat_interleave(len(tokens))
        first += len(scores)
        scores = (scores[expanded, None] + level).flatten()
        times = (len(expanded),)
        levels.append(Candidates(tokens.repeat(times), level.repeat(times), scores, parents))
    return Candidates(*(torch.cat(column) for column in zip(*levels, strict=True)))
