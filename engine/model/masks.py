"""Attention masks of new rows over committed and new rows, in the form that each model takes."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel


class MaskBuilder:
    """Knows whether a model wants one mask or one per layer type, boolean or additive.

    Models with mixed layer types look their mask up by type; models without look at one mask.
    Attention by `eager` functions adds the mask to the scores, all others take booleans.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        config = model.config.get_text_config()
        kinds = set(getattr(config, "layer_types", None) or ())
        self.per_kind = bool(kinds) and _looks_up_by_kind(model)
        self.window = _window(config)
        self.all_sliding = self.window is not None and kinds <= {"sliding_attention"}
        self.additive = config._attn_implementation == "eager"

    def build(
        self, positions: Tensor, visible: Tensor | None, length: int, dtype: torch.dtype
    ) -> Any:
        """Mask for transformers' `attention_mask`; None where plain causal attention will do.

        Args:
            positions: `(n,)` of the new rows.
            visible: `(n, n)` bool among the new rows; None = causal.
            length: committed rows, at positions 0 … length-1, visible to every new row.
        """
        n = len(positions)
        crosses_window = self.window is not None and length + n > self.window
        plain = n == 1 or length == 0
        if visible is None and plain and not crosses_window and not self.additive:
            return {"full_attention": None, "sliding_attention": None} if self.per_kind else None
        if visible is None:
            visible = torch.ones(n, n, dtype=torch.bool, device=positions.device).tril()
        full = torch.cat([visible.new_ones(n, length), visible], dim=1)
        sliding = full
        if self.window is not None and crosses_window:
            keys = torch.cat([torch.arange(length, device=positions.device), positions])
            sliding = full & (keys[None, :] > positions[:, None] - self.window)
        if self.per_kind:
            return {
                "full_attention": self._finish(full, dtype),
                "sliding_attention": self._finish(sliding, dtype),
            }
        return self._finish(sliding if self.all_sliding else full, dtype)

    def _finish(self, mask: Tensor, dtype: torch.dtype) -> Tensor:
        if not self.additive:
            return mask[None, None]
        zeros = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
        return zeros.masked_fill_(~mask, torch.finfo(dtype).min)[None, None]


def _window(config: Any) -> int | None:
    """Width of sliding-window attention, if any layer uses it."""
    if getattr(config, "use_sliding_window", True) is False:
        return None
    window = getattr(config, "sliding_window", None)
    return None if window is None else int(window)


def _looks_up_by_kind(model: PreTrainedModel) -> bool:
    return "causal_mask_mapping" in inspect.getsource(type(model.base_model).forward)
