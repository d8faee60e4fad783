"""P-EAGLE's network: an EAGLE-3 head with a few more layers, which reads masks as well.

Where EAGLE-3 looks further ahead by feeding its own output again, here as many masked entries
follow the base entries as tokens are wanted beside the first, all in one forward:

    base entries     (f_0, t_1) (f_1, t_2) … (f_N-1, root)        they stay cached
    masked entries   (mask_hidden, mask) (mask_hidden, mask) …    transient

`mask_hidden` takes the place of the target's features, before they are fused.
Source: arXiv:2602.01469, section 3; vLLM's llama_eagle3.py (how layers after the first are joined).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from engine.drafters.eagle.head import Eagle3Head, Eagle3Spec, OutputMatrix
from engine.drafters.heads.layer import HeadCache, HeadLayer, within


class ParallelHead(Eagle3Head):
    """The first layer joins token and feature as EAGLE-3's; the others are plain decoder layers."""

    mask_hidden: Tensor
    mask_token: int

    def __init__(
        self,
        windows: tuple[int | None, ...],
        spec: Eagle3Spec,
        lm_head: OutputMatrix | None = None,
    ) -> None:
        """`windows`: as `HeadSpec.window`, of every layer."""
        super().__init__(spec, lm_head)
        layer, others, self._windows = spec.layer, range(1, len(windows)), windows[1:]
        specs = [replace(layer, window=window) for window in self._windows]
        self.norms = nn.ModuleList(nn.RMSNorm(layer.hidden, eps=layer.eps) for _ in others)
        self.layers = nn.ModuleList(
            HeadLayer(own, layer.hidden, index) for index, own in enumerate(specs, 1)
        )
        named = {f"norms.{i - 1}": f"layers.{i}.input_layernorm" for i in others}
        self.aliases = {**Eagle3Head.aliases, **named}

    def fill(self, features: Tensor, tokens: Tensor, past: HeadCache, length: int) -> Tensor:
        """Logits `(length, draft vocabulary)` of the block behind n new base entries.

        The cache gains the base entries.

        Args:
            features: `(n, width)` of the target; `tokens (n,)` follow them, the last is the root.
        """
        n, begin = len(tokens), past.length
        masks = tokens.new_full((length - 1,), self.mask_token)
        masked = torch.cat([features, self.mask_hidden.expand(len(masks), -1)])
        x, out = self.join(
            self.fuse(masked), embedding(torch.cat([tokens, masks]), self.embedding_weight)
        )
        positions = torch.arange(begin, begin + len(x), device=x.device)
        seen = torch.arange(begin + len(x), device=x.device) <= positions[:, None]
        out = self.layer(x, out, positions, past, within(seen, self.layer.spec.window))
        for norm, layer, window in zip(self.norms, self.layers, self._windows, strict=True):
            out = layer(norm(out), out, positions, past, within(seen, window))
        past.length = begin + n
        return self.logits(self.norm(out[n - 1 :]) if self.spec.norm_output else out[n - 1 :])
