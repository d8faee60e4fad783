"""One generation's use of an EAGLE head: base entries that stay, tree entries that do not."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.drafters.eagle_head import DraftHead, HeadCache
from engine.kernels.cpu.ranking import likeliest


class HeadSession:
    """Feeds a head and remembers what it has seen.

    Attributes:
        output: `(1, hidden)`, the output of the last base entry: it predicts the children of the
            root.
        root: `(1,)` int64, the token of the last base entry.
    """

    output: Tensor
    root: Tensor

    def __init__(self, head: DraftHead) -> None:
        self.head = head
        self._cache = HeadCache()

    def feed_base(self, features: Tensor, tokens: Tensor) -> None:
        """Add base entries and forget the tree of the last step.

        Only keys and values of a base entry outlive it, and of the outputs only the last one is
        ever read: so the layer attends and runs its MLP for that one alone.

        Args:
            features: `(n, feature width)` of the target at n consecutive positions.
            tokens: `(n,)` int64, the token after each of them; the last one is the root.
        """
        cache, head = self._cache, self.head
        cache.drop()
        positions = torch.arange(cache.num_base, cache.num_base + len(tokens), device=tokens.device)
        self.output = head(head.fuse(features), tokens, positions, cache, last_only=True)
        self.root = tokens[-1:]
        cache.keep()

    def expand(
        self, hidden: Tensor, tokens: Tensor, depth: int, ancestors: Tensor | None
    ) -> Tensor:
        """Outputs `(n, hidden)` of n tree entries of one depth; they predict the nodes' children.

        Args:
            hidden: `(n, hidden)` output of the entry that each node's token was predicted from.
            tokens: `(n,)` int64 tokens of the nodes.
            depth: their depth; children of the root have depth 1.
            ancestors: `(n, m)` bool over the m tree entries fed since the last base entry, these n
                last: who is an ancestor of, or is, each of the n. None for a chain, which has only
                ancestors.
        """
        num_base, mask = self._cache.num_base, None
        if ancestors is not None:
            mask = torch.cat([ancestors.new_ones(len(tokens), num_base), ancestors], dim=1)
        position = torch.full((1,), num_base + depth - 1, device=tokens.device)
        out: Tensor = self.head(hidden, tokens, position, self._cache, mask)
        return out

    def best_children(self, hidden: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The likeliest next tokens after each entry, best first.

        Args:
            hidden: `(n, hidden)` outputs of entries.

        Returns:
            Target ids `(n, count)` int64 and natural log-probabilities `(n, count)` float32.
        """
        ranked = likeliest(self.head.logits(hidden), count)
        return self.head.target_ids(ranked.ids), ranked.log_probs
