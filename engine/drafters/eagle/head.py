"""EAGLE's draft network: one Llama-style layer that continues the target's features.

Entry j joins what the target saw at position j with the token that followed it, `(feature f_j,
token t_j+1)`, and predicts the token after that. To look further ahead the layer is fed its own
output in place of a feature:

    base entries   (f_0, t_1) (f_1, t_2) … (f_N-1, root)    the target's features; they stay cached
    tree entries   (output of its parent's entry, token)    one per expanded draft node; transient

A tree entry of depth d sits at position N + d - 1 and sees all base entries, its expanded ancestors
and itself. Sources: arXiv:2401.15077, section 3; arXiv:2503.01840, section 3.1.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from engine.drafters.heads.layer import HeadCache, HeadLayer, HeadSpec, Past
from engine.kernels.cpu.operators import likeliest

OutputMatrix = Callable[[Tensor], Tensor]
"""Hidden vectors `(…, hidden)` → logits `(…, vocab)`."""


class DraftHead(nn.Module):
    """What EAGLE-1/2 and EAGLE-3 heads have in common.

    The target's embedding and output matrices are read, never owned: they are no parameters of
    this module, so training and saving a head leave them alone.
    """

    layer: HeadLayer
    embedding_weight: Tensor
    draft_vocab_size: int

    @abstractmethod
    def fuse(self, features: Tensor) -> Tensor:
        """Target features `(n, feature width)` → what an entry takes as its hidden vector."""

    @abstractmethod
    def join(self, hidden: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden vectors and embedded tokens, `(n, hidden)` each → the layer's input, residual."""

    @abstractmethod
    def logits(self, outputs: Tensor) -> Tensor:
        """`(n, hidden)` → `(n, draft_vocab_size)`."""

    def forward(
        self,
        hidden: Tensor,
        tokens: Tensor,
        positions: Tensor,
        past: Past | None = None,
        mask: Tensor | None = None,
        *,
        last_only: bool = False,
    ) -> Tensor:
        """Outputs `(n, hidden)` of n entries; other arguments as `HeadLayer.forward`.

        Args:
            hidden: `(n, hidden)`, fused features or earlier outputs.
            last_only: all entries leave keys and values, but only the last one gets an output.
        """
        x, residual = self.join(hidden, embedding(tokens, self.embedding_weight))
        if last_only:
            residual, mask = residual[-1:], None
        out: Tensor = self.layer(x, residual, positions, past, mask)
        return out

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """Ids of the draft vocabulary → ids of the target's."""
        return draft_ids


class Eagle1Head(DraftHead):
    """EAGLE-1 and EAGLE-2: embedding and feature are merged by one linear layer.

    The output approximates the target's next feature, so the target's own `lm_head` reads it.
    """

    def __init__(self, spec: HeadSpec, lm_head: OutputMatrix, *, vocab: int, bias: bool) -> None:
        super().__init__()
        self.fc = nn.Linear(2 * spec.hidden, spec.hidden, bias=bias)
        self.layer = HeadLayer(spec, spec.hidden)
        self.draft_vocab_size = vocab
        self._shared = (lm_head,)

    def fuse(self, features: Tensor) -> Tensor:
        return features

    def join(self, hidden: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        x = self.fc(torch.cat([embedded, hidden], dim=-1))
        return x, x

    def logits(self, outputs: Tensor) -> Tensor:
        return self._shared[0](outputs)


@dataclass(frozen=True, slots=True)
class Eagle3Spec:
    """How an EAGLE-3 head fuses features and where it normalises.

    Attributes:
        feature_width: width of one captured layer of the target.
        norm_before_residual: the residual is the normed hidden vector (`speculators`' default).
        norm_before_fc: one norm over all captured layers before they are fused.
        norm_each_feature: a norm per captured layer before they are fused.
        norm_output: the normed output is what the next depth is fed (EAGLE-3.1).
    """

    layer: HeadSpec
    num_features: int
    feature_width: int
    draft_vocab_size: int
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    norm_each_feature: bool = False
    norm_output: bool = False


class Eagle3Head(DraftHead):
    """EAGLE-3: several layers' features fused, own norm and output matrix, own vocabulary."""

    aliases: ClassVar = {name: f"layers.0.{name}" for name in ("hidden_norm", "input_layernorm")}
    d2t: Tensor | None

    def __init__(self, spec: Eagle3Spec, lm_head: OutputMatrix | None = None) -> None:
        super().__init__()
        layer, width = spec.layer, spec.num_features * spec.feature_width
        self.spec = spec
        self.draft_vocab_size = spec.draft_vocab_size
        if spec.norm_before_fc:
            self.input_norm = nn.RMSNorm(width, eps=layer.eps)
        if spec.norm_each_feature:
            norms = (
                nn.RMSNorm(spec.feature_width, eps=layer.eps) for _ in range(spec.num_features)
            )
            self.fc_norm = nn.ModuleList(norms)
        self.fc = nn.Linear(width, layer.hidden, bias=False)
        self.hidden_norm = nn.RMSNorm(layer.hidden, eps=layer.eps)
        self.input_layernorm = nn.RMSNorm(layer.hidden, eps=layer.eps)
        self.layer = HeadLayer(layer, 2 * layer.hidden)
        self.norm = nn.RMSNorm(layer.hidden, eps=layer.eps)
        self._shared = (lm_head,)
        if lm_head is None:
            self.lm_head = nn.Linear(layer.hidden, spec.draft_vocab_size, bias=False)
        self.register_buffer("d2t", None)

    def fuse(self, features: Tensor) -> Tensor:
        if self.spec.norm_before_fc:
            features = self.input_norm(features)
        if self.spec.norm_each_feature:
            parts = features.chunk(self.spec.num_features, dim=-1)
            pairs = zip(self.fc_norm, parts, strict=True)
            features = torch.cat([norm(part) for norm, part in pairs], dim=-1)
        fused: Tensor = self.fc(features)
        return fused

    def join(self, hidden: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        normed = self.hidden_norm(hidden)
        x = torch.cat([self.input_layernorm(embedded), normed], dim=-1)
        return x, normed if self.spec.norm_before_residual else hidden

    def forward(self, *args: Any, **options: Any) -> Tensor:
        out = super().forward(*args, **options)
        return self.norm(out) if self.spec.norm_output else out

    def logits(self, outputs: Tensor) -> Tensor:
        lm_head = self._shared[0] if self._shared[0] is not None else self.lm_head
        logits: Tensor = lm_head(outputs if self.spec.norm_output else self.norm(outputs))
        return logits

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        return draft_ids if self.d2t is None else draft_ids + self.d2t[draft_ids]


class HeadSession:
    """A generation's use of a head: base entries that stay, tree entries that do not.

    Attributes:
        output: `(1, hidden)`, the output of the last base entry: it predicts the children of the
            root.
        root: `(1,)` int64, the token of the last base entry.
    """

    output: Tensor
    root: Tensor

    def __init__(self, head: DraftHead) -> None:
        self.head = head
        self._cache = HeadCache(1)
        self._num_base = 0

    def feed_base(self, features: Tensor, tokens: Tensor) -> None:
        """Add base entries and forget the tree of the last step.

        Only keys and values of a base entry outlive it, and of the outputs only the last one is
        ever read: so the layer attends and runs its MLP for that one alone.

        Args:
            features: `(n, width)` of the target; `tokens (n,)` follow them, the last is the root.
        """
        cache, head = self._cache, self.head
        begin, end = self._num_base, self._num_base + len(tokens)
        cache.truncate(begin)
        positions = torch.arange(begin, end, device=tokens.device)
        self.output = head(head.fuse(features), tokens, positions, cache, last_only=True)
        self.root = tokens[-1:]
        self._num_base = cache.length = end

    def expand(
        self, hidden: Tensor, tokens: Tensor, depth: int, ancestors: Tensor | None
    ) -> Tensor:
        """Outputs `(n, hidden)` of n tree entries of one depth; they predict the nodes' children.

        Args:
            hidden: `(n, hidden)` output of the entry that each node's token was predicted from.
            ancestors: `(n, m)` bool over the m tree entries fed since the last base entry, these n
                last: who is an ancestor of, or is, each of the n. None for a chain, which has only
                ancestors.
        """
        base, mask = self._num_base, None
        if ancestors is not None:
            mask = torch.cat([ancestors.new_ones(len(tokens), base), ancestors], dim=1)
        position = torch.full((1,), base + depth - 1, device=tokens.device)
        out: Tensor = self.head(hidden, tokens, position, self._cache, mask)
        self._cache.length += len(tokens)
        return out

    def best_children(self, hidden: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The likeliest tokens after each entry, best first: ids and log-probs, `(n, count)`."""
        ranked = likeliest(self.head.logits(hidden), count)
        return self.head.target_ids(ranked.ids), ranked.log_probs
