"""The recorded forward of Llama-like decoders: stacked matrices, residuals added within products.

    x = embedding(tokens)
    per layer
        query, key, value = rotated(qkv(norm(x)));  key, value → the cache's rows
        x += out(attend(query, cache));  x += down(gated(gate_up(norm(x))))
    logits = lm_head(norm(x))

`engine.kernels.cpu.architecture` says which models these are and takes their weights over.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear

from engine.kernels.cpu.decoder import Decoder, Layer
from engine.kernels.cpu.operators import norm
from engine.kernels.cpu.packing import Packer
from engine.kernels.cuda.attention import attend, grouped
from engine.kernels.cuda.buckets import num_pieces
from engine.kernels.cuda.inputs import RowInputs
from engine.kernels.cuda.pointwise import Pointwise
from engine.kernels.cuda.static_cache import StaticCache
from engine.proposal import Needs, TargetOutput


class Matrix:
    """A product `x Wᵀ + b`; `plus` adds it to the residual in place."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self._weight, self._bias)

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        """Changes and returns `residual`."""
        if self._bias is not None:
            residual.add_(self._bias)
        return residual.addmm_(x, self._weight.t())

    def weight(self) -> Tensor:
        return self._weight


class DevicePacker(Packer):
    """Stacks matrices and leaves them as they are."""

    def __init__(self) -> None:
        self.pack = Matrix


class PackedPass:
    """Launches a decoder over the rows of its inputs; everything it reads is on the device."""

    def __init__(self, decoder: Decoder, rotary: Any, pointwise: Pointwise, *, split: bool) -> None:
        """Take a decoder and its model's rotary module.

        Args:
            split: whether attention may work in pieces here, see `attention.splits_agree`.
        """
        self._decoder = decoder
        self._frequencies: Tensor = rotary.inv_freq.detach().float()
        self._scaling = float(rotary.attention_scaling)
        self._pointwise = pointwise
        self._split = split
        compiled = "" if pointwise.note else ", compiled between products"
        self.name = f"packed{compiled}" + ("" if split else ", attention in one piece")

    def __call__(
        self, inputs: RowInputs, context: int, cache: StaticCache, needs: Needs
    ) -> TargetOutput:
        """What the rows of `inputs` show; their keys and values go into the cache."""
        model, heads = self._decoder, self._decoder.heads
        x = embedding(inputs.tokens, model.embedding)
        added = grouped(inputs.added(context, x.dtype), heads.query // heads.key)
        places, turn = inputs.places(), self._turn(inputs.positions, x.dtype)
        pieces = num_pieces(context) if self._split else 1
        rows = cache.buffers[0]
        taken: dict[int, Tensor] = {}
        for i, layer in enumerate(model.layers):
            if i in needs.layers:
                taken[i] = x.clone()
            qkv = self._heads(layer, norm(x, layer.input_norm, model.eps))
            query, stored = self._pointwise.heads(qkv, *turn, heads.query)
            rows[2 * i : 2 * i + 2].index_copy_(2, places, stored)
            keys, values = rows[2 * i, :, :context], rows[2 * i + 1, :, :context]
            seen = attend(query, keys, values, added, heads.scale, pieces, self._pointwise.combine)
            x = layer.out.plus(seen, x)
            wide = self._pointwise.gated(layer.gate_up(norm(x, layer.mlp_norm, model.eps)))
            x = layer.down.plus(wide, x)
        taken[len(model.layers)] = x
        hidden = norm(x, model.norm, model.eps)
        layers = [taken[i] for i in needs.layers]
        return TargetOutput(
            model.lm_head(hidden),
            hidden if needs.hidden else None,
            torch.cat(layers, dim=-1) if layers else None,
        )

    def _turn(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines of these positions, `(n, 1, head_dim)`; the sine's first half negated.

        Computed as transformers does: in float32, then rounded.
        """
        angles = positions[:, None].float() * self._frequencies
        cos, sin = angles.cos() * self._scaling, angles.sin() * self._scaling
        return (
            torch.cat([cos, cos], dim=-1).to(dtype)[:, None],
            torch.cat([-sin, sin], dim=-1).to(dtype)[:, None],
        )

    def _heads(self, layer: Layer, x: Tensor) -> Tensor:
        """Queries, keys, values `(n, query + 2 · key heads, head_dim)`, normed per head (Qwen3)."""
        heads, eps = self._decoder.heads, self._decoder.eps
        qkv = layer.qkv(x).view(len(x), -1, heads.dim)
        if layer.query_norm is not None and layer.key_norm is not None:
            query, key, _ = qkv.split([heads.query, heads.key, heads.key], dim=1)
            query.copy_(norm(query, layer.query_norm, eps))
            key.copy_(norm(key, layer.key_norm, eps))
        return qkv
