"""The decoder layer of draft networks: an EAGLE head has one, a DFlash model a few.

All n input rows of a layer add keys and values; the last m of them get outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from engine.kernels.cpu.decoder import Layer
from engine.kernels.cpu.operators import MULTIPLE, NativeLinear
from engine.model.cache import TreeCache
from engine.model.forward import tree_attention
from engine.tree import upload


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """Sizes and constants of a layer, as its checkpoint says.

    Attributes:
        rope: transformers' `rope_parameters`, and `divisors` of the frequencies where there are
            any; positions start at 0 whatever the target does.
        rotary_dim: leading dimensions of a head that RoPE rotates.
        window: rows that a row attends to, itself included; None = all.
        causal: whether rows after it are masked.
    """

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    rope: Mapping[str, Any]
    rotary_dim: int
    activation: str = "silu"
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    window: int | None = None
    causal: bool = True


class Past(Protocol):
    """Keys and values of a layer's earlier rows."""

    def attend(
        self, layer: HeadLayer, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None
    ) -> Tensor:
        """Add the rows, then attend to them and to earlier ones.

        Args:
            query: `(heads, m, head_dim)` of the last m of the n rows.
            keys, values: `(kv_heads, n, head_dim)`.
            mask: as `HeadLayer.forward`.

        Returns:
            `(m, heads, head_dim)`.
        """


class HeadCache(TreeCache):
    """Keys and values of a network's layers; rows of a forward stay once `length` counts them."""

    def attend(
        self, layer: HeadLayer, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None
    ) -> Tensor:
        """Write rows behind those that count; the queries attend to all."""
        self.reserve(keys.shape[1])
        all_keys, all_values = self.update(keys[None], values[None], layer.index)
        wide = None if mask is None else mask[None, None]
        attended, _ = tree_attention(layer, query[None], all_keys, all_values, wide)
        return attended[0]


class HeadLayer(nn.Module):
    """Attention, then a SwiGLU MLP; query, key, value and gate, up are one matrix each."""

    def __init__(self, spec: HeadSpec, attention_input: int, index: int = 0) -> None:
        from transformers.activations import ACT2FN  # takes seconds: not at the page's start

        super().__init__()
        self.spec, self.index = spec, index
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

    def published(self) -> dict[str, dict[str, int]]:
        """Per module: the names of its parts in checkpoints, and the rows of each."""
        spec = self.spec
        q, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        return {
            "qkv": {"self_attn.q_proj": q, "self_attn.k_proj": kv, "self_attn.v_proj": kv},
            "o_proj": {"self_attn.o_proj": spec.hidden},
            "q_norm": {"self_attn.q_norm": spec.head_dim},
            "k_norm": {"self_attn.k_norm": spec.head_dim},
            "gate_up": {f"mlp.{name}_proj": spec.intermediate for name in ("gate", "up")},
            "down_proj": {"mlp.down_proj": spec.hidden},
            "post_attention_norm": {"post_attention_layernorm": spec.hidden},
        }

    def forward(
        self,
        x: Tensor,
        residual: Tensor,
        positions: Tensor,
        past: Past,
        mask: Tensor | None,
    ) -> Tensor:
        """Outputs `(m, hidden)` of the last m of n rows.

        Args:
            x: `(n, attention input)`.
            residual: `(m, hidden)`.
            positions: `(n,)`, or `(1,)` where all are the same.
            past: earlier rows.
            mask: `(m, rows)` bool, True = may attend; None = everything for a single row, causal
                for n rows without earlier ones.
        """
        spec, n, m = self.spec, len(x), len(residual)
        num_rotated = spec.heads + spec.kv_heads
        qkv = self.qkv(x).view(n, num_rotated + spec.kv_heads, spec.head_dim)
        if spec.qk_norm:
            q, k = qkv[:, : spec.heads], qkv[:, spec.heads : num_rotated]
            rotated = torch.cat([self.q_norm(q), self.k_norm(k)], dim=1)
        else:
            rotated = qkv[:, :num_rotated]
        rotated = self._rotate(rotated.transpose(0, 1), positions)
        query, keys = rotated[: spec.heads, n - m :], rotated[spec.heads :]
        values = qkv[:, num_rotated:].transpose(0, 1)
        attended = past.attend(self, query, keys, values, mask)
        hidden = residual + self.o_proj(attended.reshape(m, -1))
        gate, up = self.gate_up(self.post_attention_norm(hidden)).chunk(2, dim=-1)
        out: Tensor = hidden + self.down_proj(self.activation(gate) * up)
        return out

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotary embedding of `(heads, n, head_dim)`."""
        if self._frequencies.device != x.device:
            self._frequencies = upload(self._frequencies, x.device)
        angles = positions[:, None].float() * self._frequencies
        cos = (angles.cos() * self._rope_scale).to(x.dtype)
        sin = (angles.sin() * self._rope_scale).to(x.dtype)
        x, rest = x[..., : self.spec.rotary_dim], x[..., self.spec.rotary_dim :]
        first, second = x.chunk(2, dim=-1)
        rotated = (first * cos - second * sin, second * cos + first * sin, rest)
        return torch.cat(rotated, dim=-1)

    def packed(self) -> Layer | None:
        """Its packed weights for the kernels; None where they cannot run all of it."""
        linears = (self.qkv, self.o_proj, self.gate_up, self.down_proj)
        matrices = [one.matrix for one in linears if isinstance(one, NativeLinear)]
        spec = self.spec
        if len(matrices) < len(linears) or spec.activation != "silu" or spec.window:
            return None
        sizes = (spec.hidden, spec.intermediate, spec.head_dim)
        if spec.rotary_dim < spec.head_dim or any(size % MULTIPLE for size in sizes):
            return None
        qkv, out, gate_up, down = matrices
        norms = [self.q_norm, self.k_norm] if spec.qk_norm else [None, None]
        query_norm, key_norm = (None if n is None else n.weight.detach().float() for n in norms)
        return Layer(
            qkv=[qkv],
            out=out,
            gate_up=[gate_up],
            down=down,
            mlp_norm=self.post_attention_norm.weight.detach().float(),
            query_norm=query_norm,
            key_norm=key_norm,
        )

    def rotary(self, count: int) -> Tensor:
        """Cosines of one half of a head, then its sines, `(1, count, head_dim)` float32."""
        angles = torch.arange(count)[None, :, None].float() * self._frequencies
        return torch.cat([angles.cos(), angles.sin()], dim=-1) * self._rope_scale


def within(visible: Tensor, window: int | None) -> Tensor:
    """A mask `(m, rows)` restricted to the last `window` visible rows of each row."""
    if window is None:
        return visible
    return visible & (visible.flip(-1).cumsum(-1).flip(-1) <= window)


def _frequencies(spec: HeadSpec) -> tuple[Tensor, float]:
    """Rotary frequencies `(rotary_dim / 2,)` float32 and the scale of cos and sin."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rope = dict(spec.rope)
    divisors = torch.tensor(rope.pop("divisors", 1.0), device="cpu")
    config = LlamaConfig(
        hidden_size=spec.heads * spec.rotary_dim,
        num_attention_heads=spec.heads,
        head_dim=spec.rotary_dim,
        rope_parameters=rope,
        max_position_embeddings=1 << 20,
    )
    with torch.device("cpu"):
        rotary = LlamaRotaryEmbedding(config)
    return rotary.inv_freq.detach().float() / divisors, float(rotary.attention_scaling)
