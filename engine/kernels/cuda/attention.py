"""Attention of a few rows over a long, partly empty context, at any length of it with one shape.

One block of the device works on one key/value head here, because few rows are few blocks; it would
read a long context at a fraction of the bandwidth. So the context is split into pieces that are
attended to at once, and their results are weighted by what each piece's scores sum to:

    out = Σ_s exp(lse_s) · out_s / Σ_s exp(lse_s)      lse_s = log Σ_j exp(score_j), j in piece s

The pieces are views: nothing is copied. Source: Flash-Decoding (Dao, Haziza, Massa, Sizov, 2023).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    added: Tensor,
    scale: float,
    pieces: int = 1,
    join: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Tensor:
    """Grouped-query attention of `n` rows over `context` rows.

    Args:
        query: `(n, heads, head_dim)`.
        keys, values: `(kv_heads, context, head_dim)`, rows contiguous.
        added: `(groups · n, context)` in the query's dtype, see `grouped`.
        pieces: how many to split the context into; divides it.
        join: `combine`, or what a compiler made of it.

    Returns:
        `(n, heads · head_dim)`.
    """
    n, heads, head_dim = query.shape
    kv_heads, context, _ = keys.shape
    groups = heads // kv_heads
    # The query heads of a group are extra rows of their key/value head: no key is copied.
    packed = query.view(n, kv_heads, groups, head_dim).permute(1, 2, 0, 3)
    packed = packed.reshape(kv_heads, 1, groups * n, head_dim)
    size = context // pieces
    split = (kv_heads, pieces, size, head_dim)
    keys, values = keys.view(split), values.view(split)
    mask = added.view(groups * n, pieces, size).transpose(0, 1)
    if pieces == 1:
        out = scaled_dot_product_attention(
            packed, keys, values, attn_mask=mask[None].expand(kv_heads, -1, -1, -1), scale=scale
        )[:, 0]
    else:
        packed = packed.expand(-1, pieces, -1, -1)
        mask = mask[None].expand(kv_heads, -1, -1, -1)
        out = (join or combine)(*_attend_pieces(packed, keys, values, mask, scale))
    out = out.view(kv_heads, groups, n, head_dim).permute(2, 0, 1, 3)
    return out.reshape(n, heads * head_dim)


def grouped(added: Tensor, groups: int) -> Tensor:
    """A mask `(n, context)` in the form that `attend` takes, made once per forward."""
    return added.repeat(groups, 1)


def _attend_pieces(
    query: Tensor, keys: Tensor, values: Tensor, added: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Per head and piece: outputs `(h, s, rows, head_dim)` and lse `(h, s, rows)` float32."""
    if query.device.type == "cuda":
        out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            query, keys, values, added, True, 0.0, False, scale=scale
        )
        # The kernel pads it to a multiple of its own.
        return out, lse[:, :, : query.shape[2]]
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, keys, values, 0.0, False, attn_mask=added, scale=scale
    )
    return out, lse


def combine(out: Tensor, lse: Tensor) -> Tensor:
    """One result of those of all pieces: `(h, s, rows, head_dim)`, `(h, s, rows)` → `(h, rows, …)`.

    Example: two pieces with sums 1 and 3 (lse 0 and log 3) count a quarter and three quarters.
    """
    weights = lse.float().softmax(dim=1).unsqueeze(-1)
    return (out * weights).sum(dim=1).to(out.dtype)


@torch.inference_mode()
def splits_agree(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether attention in pieces is there on this device, and equals attention in one."""
    generator = torch.Generator().manual_seed(0)
    query, keys, values = (
        torch.randn(shape, generator=generator).to(device, dtype)
        for shape in ((3, 4, head_dim), (2, 256, head_dim), (2, 256, head_dim))
    )
    added = torch.zeros(3, 256, device=device, dtype=dtype)
    added[:, 70:] = -30000.0
    added[0, 5:9] = -30000.0
    mask = grouped(added, 2)
    try:
        found = attend(query, keys, values, mask, 0.2, 2)
    except (RuntimeError, AttributeError, TypeError):
        return False
    expected = attend(query, keys, values, mask, 0.2, 1)
    return torch.allclose(found.float(), expected.float(), rtol=0.02, atol=0.02)
