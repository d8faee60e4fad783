"""Runs an EAGLE head over a whole pack as in drafting: fed its own outputs, over several depths.

At depth 0 every entry of the pack is fed the target's feature. A chain then starts at entry i and
is fed its own outputs: its row of depth k is entry i + k. It attends to the base rows up to its
start and to its own rows, as in drafting; chains never see each other.

    chain from entry 1     depth 1 = entry 2 sees base 0 1 and itself
                           depth 2 = entry 3 sees base 0 1, its rows of depth 1 and 2
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from engine.drafters.eagle.head import DraftHead
from engine.drafters.heads.layer import HeadLayer
from engine.training.packs import Pack


def unroll(
    head: DraftHead, fused: Tensor, pack: Pack, depths: int, starts: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield `entries (m,)` and the head's outputs `(m, hidden)` there, for depth 0, 1, …

    Entry j is fed the token after it. Depth 0 has all n entries, deeper ones have the chains in
    order; rows of a chain that has left its dialogue are to be ignored.

    Args:
        fused: `(n, hidden)` fused features of the pack.
        starts: `(m,)` ascending entries where chains start. If empty, only depth 0 is yielded.
    """
    entries = torch.arange(len(pack.tokens), device=fused.device)
    tokens, past = pack.tokens.roll(-1), _Chains(pack, starts)
    out: Tensor = head(fused, tokens, pack.positions, past)
    yield entries, out
    out = out[starts]
    for depth in range(1, depths if len(starts) else 1):
        entries = (starts + depth).clamp_max(len(pack.tokens) - 1)
        out = head(out, tokens[entries], pack.positions[starts] + depth, past)
        yield entries, out


class _Chains:
    """Keys and values of the base entries, then of every chain's own rows."""

    def __init__(self, pack: Pack, starts: Tensor) -> None:
        sizes = torch.unique_consecutive(pack.segments, return_counts=True)[1].tolist()
        counts = torch.bincount(pack.segments[starts], minlength=len(sizes)).tolist()
        self._sizes, self._counts, self._starts = sizes, counts, starts
        self._base: tuple[Tensor, Tensor] | None = None
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def attend(
        self, layer: HeadLayer, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None
    ) -> Tensor:
        """Attention per dialogue, which is much shorter than a pack.

        In float32: in bfloat16, kernels would be compiled for the length of every dialogue.
        """
        with torch.autocast(query.device.type, enabled=False):
            query, keys, values = query.float(), keys.float(), values.float()
            if self._base is None:
                self._base = keys, values
                return self._causal(query)
            self._keys.append(keys)
            self._values.append(values)
            return self._own_and_base(query)

    def _causal(self, query: Tensor) -> Tensor:
        assert self._base is not None
        parts = zip(*(x.split(self._sizes, dim=1) for x in (query, *self._base)), strict=True)
        outputs = [
            scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=True)
            for q, k, v in parts
        ]
        return torch.cat([output[0] for output in outputs], dim=1).transpose(0, 1)

    def _own_and_base(self, query: Tensor) -> Tensor:
        """One softmax over base rows up to the chain's start and the chain's own rows."""
        assert self._base is not None
        heads, m, width = query.shape
        kv_heads = self._base[0].shape[0]
        grouped = query.view(kv_heads, heads // kv_heads, m, width) * width**-0.5
        keys, values = torch.stack(self._keys, dim=2), torch.stack(self._values, dim=2)
        own = torch.einsum("hgmd,hmkd->hgmk", grouped, keys)
        outputs, begin, first = [], 0, 0
        for size, count in zip(self._sizes, self._counts, strict=True):
            rows, base = slice(first, first + count), slice(begin, begin + size)
            begin, first = begin + size, first + count
            if not count:
                continue
            columns = torch.arange(base.start, base.stop, device=query.device)
            is_later = columns[None] > self._starts[rows, None]
            scores = torch.einsum("hgmd,hnd->hgmn", grouped[:, :, rows], self._base[0][:, base])
            scores = scores.masked_fill(is_later, -torch.inf)
            weights = torch.cat([scores, own[:, :, rows]], dim=-1).softmax(dim=-1)
            base_weights, own_weights = weights.split([size, keys.shape[2]], dim=-1)
            outputs.append(
                torch.einsum("hgmn,hnd->hgmd", base_weights, self._base[1][:, base])
                + torch.einsum("hgmk,hmkd->hgmd", own_weights, values[:, rows])
            )
        return torch.cat(outputs, dim=2).reshape(heads, m, width).transpose(0, 1)
