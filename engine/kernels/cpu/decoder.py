"""The forward of Llama-like decoders on a processor: the same sums with few operators.

    x = embedding(tokens)
    per layer
        x += out(attend(rotate(qkv(norm(x)))))     keys and values go straight into the cache's rows
        x += down(gated(gate_up(norm(x))))
    logits = lm_head(norm(x))

Per layer four matrix products with packed weights instead of seven, residuals added within them,
and no module calls in between. `architecture.py` says which models these are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding

from engine.kernels.cpu.operators import attend, expand_mask, gated, norm, rotate
from engine.kernels.cpu.projections import Projection
from engine.kernels.cpu.rotary import Rotary, RotaryTable
from engine.model.cache import TreeCache
from engine.model.forward import MaskBuilder
from engine.proposal import Needs, TargetOutput


@dataclass(frozen=True, slots=True)
class Heads:
    """Sizes of the attention heads."""

    query: int
    key: int
    dim: int
    scale: float


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer.

    Attributes:
        query_norm, key_norm: per-head norms (Qwen3).
        kind: `full_attention` or `sliding_attention`.
    """

    input_norm: Tensor
    qkv: Projection
    query_norm: Tensor | None
    key_norm: Tensor | None
    out: Projection
    mlp_norm: Tensor
    gate_up: Projection
    down: Projection
    kind: str


@dataclass(frozen=True, slots=True)
class Decoder:
    """Weights of a whole model."""

    embedding: Tensor
    layers: Sequence[Layer]
    norm: Tensor
    lm_head: Projection
    heads: Heads
    eps: float


class FusedForward:
    """Runs a decoder over new rows."""

    def __init__(
        self, decoder: Decoder, rotary: RotaryTable, masks: MaskBuilder, *, name: str
    ) -> None:
        self._decoder: Decoder | None = decoder
        self._rotary = rotary
        self._masks = masks
        self.name = name

    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        visible: Tensor | None,
        cache: TreeCache,
        needs: Needs,
        *,
        last_only: bool,
    ) -> TargetOutput:
        model = self._decoder
        assert model is not None
        x = embedding(tokens, model.embedding)
        rotary = self._rotary.rows(positions)
        masks = self._kinds(positions, visible, cache.length, x.dtype)
        new, keys, values = cache.stacked(len(tokens), model.heads.key, model.heads.dim, x.dtype)
        inputs: dict[int, Tensor] = {}
        for i, layer in enumerate(model.layers):
            if i in needs.layers:
                inputs[i] = x
            qkv = self._heads(layer, norm(x, layer.input_norm, model.eps), rotary)
            new[i].copy_(self._keys_values(qkv))
            query = qkv[:, : model.heads.query]
            seen = attend(query, keys[i], values[i], masks[layer.kind], model.heads.scale)
            x = layer.out.plus(seen, x)
            wide = gated(layer.gate_up(norm(x, layer.mlp_norm, model.eps)))
            x = layer.down.plus(wide, x)
        inputs[len(model.layers)] = x
        return self._show(x, inputs, needs, last_only)

    def _kinds(
        self, positions: Tensor, visible: Tensor | None, length: int, dtype: torch.dtype
    ) -> dict[str, Tensor | None]:
        """The mask of each kind of layer."""
        assert self._decoder is not None
        heads = self._decoder.heads
        groups = heads.query // heads.key
        masks = self._masks.build(positions, visible, length, dtype)
        if isinstance(masks, dict):
            return {kind: expand_mask(mask, groups, dtype) for kind, mask in masks.items()}
        one = expand_mask(masks, groups, dtype)
        return {"full_attention": one, "sliding_attention": one}

    def _heads(self, layer: Layer, x: Tensor, rotary: Rotary) -> Tensor:
        """Rotated queries and keys, and values: `(n, query + 2 · key heads, head_dim)`."""
        assert self._decoder is not None
        heads, eps = self._decoder.heads, self._decoder.eps
        qkv = layer.qkv(x).view(len(x), -1, heads.dim)
        rotated = qkv[:, : heads.query + heads.key]
        if layer.query_norm is not None and layer.key_norm is not None:
            query, key = rotated.split([heads.query, heads.key], dim=1)
            query.copy_(norm(query, layer.query_norm, eps))
            key.copy_(norm(key, layer.key_norm, eps))
        rotate(rotated, rotary)
        return qkv

    def _keys_values(self, qkv: Tensor) -> Tensor:
        """The rows to store, `(2, key heads, n, head_dim)`."""
        assert self._decoder is not None
        heads = self._decoder.heads
        stored = qkv[:, heads.query :].view(len(qkv), 2, heads.key, heads.dim)
        return stored.permute(1, 2, 0, 3)

    def _show(
        self, x: Tensor, inputs: dict[int, Tensor], needs: Needs, last_only: bool
    ) -> TargetOutput:
        assert self._decoder is not None
        model = self._decoder
        if last_only and not needs.hidden:
            x = x[-1:]
        hidden = norm(x, model.norm, model.eps)
        logits = model.lm_head(hidden[-1:] if last_only else hidden)
        layers = [inputs[i] for i in needs.layers]
        return TargetOutput(
            logits,
            hidden if needs.hidden else None,
            torch.cat(layers, dim=-1) if layers else None,
        )

    def close(self) -> None:
        self._decoder = None
