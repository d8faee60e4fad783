"""Attention of a few query rows over a long cache, with an explicit mask, without copying keys.

`transformers` repeats every key/value head for its group of query heads before masked attention,
which copies the whole cache in every layer. Here the query heads of a group are laid out as extra
query rows of their key/value head instead.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

NAME = "tree_sdpa"
"""Name under which `register` makes the function known to transformers."""


def register() -> None:
    """Make `tree_attention` selectable as `attn_implementation`; harmless when repeated."""
    AttentionInterface.register(NAME, tree_attention)


def tree_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **_unused: Any,
) -> tuple[Tensor, None]:
    """Grouped-query attention of `n` new rows.

    Args:
        query: `(batch, heads, n, head_dim)`; decoding has a batch of 1.
        key, value: `(batch, kv_heads, rows, head_dim)`, new rows last.
        attention_mask: `(batch, 1, n, rows)` bool, True = may look; None = causal for a prompt
            (n == rows), everything for one row.

    Returns:
        `(batch, n, heads, head_dim)`, None (attention weights are never made).
    """
    if attention_mask is None and query.shape[2] > 1:
        out = scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=True
        )
        return out.transpose(1, 2).contiguous(), None
    batch, heads, n, head_dim = query.shape
    kv_heads = key.shape[1]
    groups = heads // kv_heads
    packed = query.reshape(batch, kv_heads, groups * n, head_dim)
    if attention_mask is not None and groups > 1:
        attention_mask = attention_mask.repeat(1, 1, groups, 1)
    out = scaled_dot_product_attention(packed, key, value, attn_mask=attention_mask, scale=scaling)
    return out.reshape(batch, heads, n, value.shape[3]).transpose(1, 2).contiguous(), None
