"""What happens between a decoder's matrix products, in as few torch operators as it takes."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

from engine.kernels.cpu.rotary import Rotary


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension."""
    return rms_norm(x, weight.shape, weight, eps)


def gated(gate_up: Tensor) -> Tensor:
    """`(n, 2 · width)` → `silu(gate) · up` `(n, width)`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate).mul_(up)


def rotate(heads: Tensor, rotary: Rotary) -> None:
    """Apply rotary positions to `(n, heads, head_dim)` in place.

    Example, head_dim 4: (a b c d) · cos + (c d a b) · (-sin, -sin, sin, sin).
    """
    swapped = heads.unflatten(-1, (2, -1)).flip(-2).flatten(-2)
    torch.addcmul(heads * rotary.cos, swapped, rotary.signed_sin, out=heads)


def attend(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float
) -> Tensor:
    """Attention of `n` new rows over all rows.

    Args:
        query: `(n, heads, head_dim)`; keys, values: `(1, kv_heads, rows, head_dim)`.
        mask: additive `(1, 1, groups · n, rows)`, see `expand_mask`; None = everything for one
            row, causal for a prompt (n == rows).

    Returns:
        `(n, heads · head_dim)`.
    """
    n, heads, head_dim = query.shape
    kv_heads = keys.shape[1]
    groups = heads // kv_heads
    if mask is None and n > 1:
        out = scaled_dot_product_attention(
            query.transpose(0, 1)[None], keys, values, is_causal=True, scale=scale, enable_gqa=True
        )
        return out[0].transpose(0, 1).reshape(n, heads * head_dim)
    # The query heads of a group are extra rows of their key/value head: no key is copied.
    packed = query.view(n, kv_heads, groups, head_dim).permute(1, 2, 0, 3)
    out = scaled_dot_product_attention(
        packed.reshape(1, kv_heads, groups * n, head_dim), keys, values, attn_mask=mask, scale=scale
    )
    unpacked = out.view(kv_heads, groups, n, head_dim).permute(2, 0, 1, 3)
    return unpacked.reshape(n, heads * head_dim)


def expand_mask(mask: Tensor | None, groups: int, dtype: torch.dtype) -> Tensor | None:
    """A boolean mask `(1, 1, n, rows)` in the form that `attend` takes, made once per forward."""
    if mask is None:
        return None
    added = torch.zeros(mask.shape, dtype=dtype).masked_fill_(~mask, -torch.inf)
    return added.repeat(1, 1, groups, 1)
