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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from engine.kernels.cpu.operators import likeliest
from engine.model.forward import tree_attention

GROWTH = 256
"""The cache's capacity is a multiple of this many rows."""


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """Sizes and constants of a head's layer, as its checkpoint says.

    Attributes:
        rope: transformers' `rope_parameters`; positions start at 0 whatever the target does.
    """

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    rope: Mapping[str, Any] = field(default_factory=lambda: {"rope_theta": 10000.0})
    activation: str = "silu"
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False


class Past(Protocol):
    """Where a layer leaves the keys and values of its rows and finds those of earlier ones."""

    def attend(
        self, layer: nn.Module, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None
    ) -> Tensor:
        """Add the rows, then attend to them and to what came before.

        Args:
            query: `(heads, m, head_dim)` of the last m of the n rows.
            keys, values: `(kv_heads, n, head_dim)`.
            mask: as `HeadLayer.forward`.

        Returns:
            `(m, heads, head_dim)`.
        """


class HeadCache:
    """Preallocated keys and values: base entries, then the entries of the current draft tree."""

    def __init__(self) -> None:
        self.num_base = 0
        self.num_tree = 0
        self._rows: Tensor | None = None

    def attend(
        self, layer: nn.Module, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None
    ) -> Tensor:
        """Write rows behind those of the current tree; the queries attend to all rows."""
        start = self.num_base + self.num_tree
        end = start + keys.shape[1]
        rows = self._reserve(keys, start, end)
        rows[0, :, start:end] = keys
        rows[1, :, start:end] = values
        self.num_tree += keys.shape[1]
        return attention(layer, query, rows[0, :, :end], rows[1, :, :end], mask)

    def keep(self) -> None:
        """Make the rows written since the last `drop` base entries."""
        self.num_base += self.num_tree
        self.num_tree = 0

    def drop(self) -> None:
        """Forget the entries of the current tree."""
        self.num_tree = 0

    def _reserve(self, like: Tensor, used: int, end: int) -> Tensor:
        if self._rows is None or self._rows.shape[2] < end:
            capacity = -(-max(end, 2 * used) // GROWTH) * GROWTH
            grown = like.new_empty(2, like.shape[0], capacity, like.shape[2])
            if self._rows is not None:
                grown[:, :, :used] = self._rows[:, :, :used]
            self._rows = grown
        return self._rows


class HeadLayer(nn.Module):
    """Attention, then a SwiGLU MLP; query, key, value and gate, up are one matrix each."""

    def __init__(self, spec: HeadSpec, attention_input: int) -> None:
        super().__init__()
        self.spec = spec
        width = (spec.heads + 2 * spec.kv_heads) * spec.head_dim
        self.qkv = nn.Linear(attention_input, width, bias=spec.qkv_bias)
        self.o_proj = nn.Linear(spec.heads * spec.head_dim, spec.hidden, bias=spec.o_bias)
        self.post_attention_norm = nn.RMSNorm(spec.hidden, eps=spec.eps)
        self.gate_up = nn.Linear(spec.hidden, 2 * spec.intermediate, bias=False)
        self.down_proj = nn.Linear(spec.intermediate, spec.hidden, bias=False)
        self.activation = ACT2FN[spec.activation]
        if spec.qk_norm:
            self.q_norm = nn.RMSNorm(spec.head_dim, eps=spec.eps)
            self.k_norm = nn.RMSNorm(spec.head_dim, eps=spec.eps)
        self._frequencies, self._rope_scale = _frequencies(spec)

    def forward(
        self,
        x: Tensor,
        residual: Tensor,
        positions: Tensor,
        past: Past | None = None,
        mask: Tensor | None = None,
        *,
        last_only: bool = False,
    ) -> Tensor:
        """Outputs `(n, hidden)` of n entries, or `(1, hidden)` of the last one.

        Args:
            x: `(n, attention input)`.
            residual: `(n, hidden)`.
            positions: `(n,)`, or `(1,)` where all are the same.
            past: earlier rows; None = the n rows see only each other.
            mask: `(n, rows)` bool, True = may attend; None = causal among n rows without a past,
                or everything for a single row.
            last_only: all rows leave keys and values, but only the last one gets an output.
        """
        spec = self.spec
        n, turned = len(x), spec.heads + spec.kv_heads
        qkv = self.qkv(x).view(n, turned + spec.kv_heads, spec.head_dim)
        if spec.qk_norm:
            q, k = qkv[:, : spec.heads], qkv[:, spec.heads : turned]
            rotated = torch.cat([self.q_norm(q), self.k_norm(k)], dim=1)
        else:
            rotated = qkv[:, :turned]
        rotated = self._rotate(rotated.transpose(0, 1), positions)
        query, keys = rotated[: spec.heads], rotated[spec.heads :]
        values = qkv[:, turned:].transpose(0, 1)
        if last_only:
            query, residual, mask = query[:, -1:], residual[-1:], None
        attend = attention if past is None else past.attend
        attended = attend(self, query, keys, values, mask)
        hidden = residual + self.o_proj(attended.reshape(len(residual), -1))
        gate, up = self.gate_up(self.post_attention_norm(hidden)).chunk(2, dim=-1)
        out: Tensor = hidden + self.down_proj(self.activation(gate) * up)
        return out

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotary embedding of `(heads, n, head_dim)`, the two halves of a head as pairs."""
        if self._frequencies.device != x.device:
            self._frequencies = self._frequencies.to(x.device)
        angles = positions[:, None].float() * self._frequencies
        cos = (angles.cos() * self._rope_scale).to(x.dtype)
        sin = (angles.sin() * self._rope_scale).to(x.dtype)
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def attention(
    layer: nn.Module, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None
) -> Tensor:
    """Attention of the last rows; shapes as `Past.attend`."""
    wide = None if mask is None else mask[None, None]
    attended, _ = tree_attention(layer, query[None], keys[None], values[None], wide)
    return attended[0]


def _frequencies(spec: HeadSpec) -> tuple[Tensor, float]:
    """Rotary frequencies `(head_dim / 2,)` float32 and the scale of cos and sin."""
    config = LlamaConfig(
        hidden_size=spec.heads * spec.head_dim,
        num_attention_heads=spec.heads,
        head_dim=spec.head_dim,
        rope_parameters=dict(spec.rope),
        max_position_embeddings=1 << 20,
    )
    with torch.device("cpu"):
        rotary = LlamaRotaryEmbedding(config)
    return rotary.inv_freq.detach().float(), float(rotary.attention_scaling)


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
        """Outputs `(n, hidden)` of n entries; arguments as `HeadLayer.forward`.

        Args:
            hidden: `(n, hidden)`, fused features or earlier outputs.
            tokens: `(n,)` int64 ids of the target's vocabulary.
        """
        x, residual = self.join(hidden, embedding(tokens, self.embedding_weight))
        out: Tensor = self.layer(x, residual, positions, past, mask, last_only=last_only)
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
