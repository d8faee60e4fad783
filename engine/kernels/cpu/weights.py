"""Weights in the layout that a processor's kernels want, in the places of a model's own modules.

oneDNN reorders a plain matrix on every call, which for few rows takes longer than the product; here
it is reordered once. The 4-bit matrices of a GGUF file stay in 4 bits. Nothing is held twice, and
whoever calls a module or reads its `weight` finds what was there.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from engine.errors import TargetError
from engine.kernels.cpu.gguf import BLOCK, Blocks, GGUFFile

NOTHING_IN_4_BITS = (
    "dtype q4 runs matrices that a GGUF file holds in 4 bits (Q4_0, Q4_1, Q4_K), but this one has "
    "none that fit. Choose bfloat16 or float32."
)


class PackedLinear(nn.Module, ABC):
    """Stands where an `nn.Linear` was, whose matrix a kernel holds in a layout of its own.

    A deep copy is a plain `nn.Linear` again. Moving it to another dtype or device is refused.
    """

    def __init__(self, plain: nn.Linear, *, keep: bool = False) -> None:
        """`keep`: hold the plain matrix too, where others read its rows or hold it anyway."""
        super().__init__()
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self.bias = plain.bias
        self._bias = None if plain.bias is None else plain.bias.detach()
        # In a tuple, so that it is no parameter of this module: somebody else's already is.
        self._kept = (plain.weight,) if keep else ()

    @abstractmethod
    def product(self, x: Tensor) -> Tensor:
        """`(rows, in)` → `(rows, out)`, bias included."""

    @abstractmethod
    def unpacked(self) -> Tensor:
        """The plain matrix, made anew."""

    @property
    def weight(self) -> Tensor:
        return self._kept[0] if self._kept else self.unpacked()

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad and torch.is_grad_enabled():
            return linear(x, self.weight, self.bias)
        rows = self.product(x.reshape(-1, self.in_features))
        return rows.view(*x.shape[:-1], self.out_features)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Linear:
        plain = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        if self._kept:
            plain.weight = copy.deepcopy(self._kept[0], memo)
        else:
            plain.weight = nn.Parameter(self.weight.clone(), requires_grad=False)
        plain.bias = copy.deepcopy(self.bias, memo)
        return plain

    def _apply(self, fn: Any, recurse: bool = True) -> PackedLinear:
        raise TypeError(
            "A model with packed weights cannot change its dtype or device. Load it again, or "
            "change a deep copy of it."
        )

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = self.weight.detach()


class OneDNNLinear(PackedLinear):
    """A matrix in oneDNN's layout."""

    def __init__(self, plain: nn.Linear, *, keep: bool = False) -> None:
        super().__init__(plain, keep=keep)
        self._packed = torch.ops.mkldnn._reorder_linear_weight(plain.weight.detach())

    def product(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._packed, self._bias, "none", [], ""
        )
        return out

    def unpacked(self) -> Tensor:
        plain: Tensor = self._packed.to_dense()
        return plain


class FourBitLinear(PackedLinear):
    """A matrix in 4 bits, by torch's kernel: it unpacks codes on the fly, for bfloat16 rows.

    Its scales and zero points are in bfloat16, so that a value moves by at most 1/32 of the step
    between two codes and 1/256 of the block's middle value; on random rows products differ from
    the exact ones by 0.2 % (bfloat16 weights: 0.14 %).
    """

    MIDDLE = 8
    """The kernel's zero point: value = (code - 8) · scale + zero."""

    def __init__(self, plain: nn.Linear, blocks: Blocks) -> None:
        super().__init__(plain)
        codes = blocks.codes.to(torch.int32)
        self._packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
        zero = blocks.minimum + self.MIDDLE * blocks.scale
        pairs = torch.stack([blocks.scale.t(), zero.t()], dim=-1)
        self._scales = pairs.to(torch.bfloat16).contiguous()

    @staticmethod
    def takes(blocks: Blocks) -> bool:
        """Whether the kernel takes a matrix of this shape."""
        rows, columns = blocks.codes.shape
        return rows % 16 == 0 and columns % BLOCK == 0

    def product(self, x: Tensor) -> Tensor:
        out = self._without_bias(x)
        return out if self._bias is None else out.add_(self._bias)

    def unpacked(self) -> Tensor:
        ones = torch.eye(self.in_features, dtype=torch.bfloat16)
        return self._without_bias(ones).t().contiguous()

    def _without_bias(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
            x.contiguous(), self._packed, BLOCK, self._scales
        )
        return out


class GGUFMatrices:
    """The 4-bit matrices of a GGUF file, by the modules of the model that was loaded from it."""

    NAMES = {
        "q_proj": "attn_q",
        "k_proj": "attn_k",
        "v_proj": "attn_v",
        "o_proj": "attn_output",
        "gate_proj": "ffn_gate",
        "up_proj": "ffn_up",
        "down_proj": "ffn_down",
    }
    """transformers' names of a decoder layer's matrices → GGUF's."""
    SAMPLE = 7
    """Every so many rows are compared with the model's own; odd, to meet every place in a head."""

    def __init__(self, path: Path, model: PreTrainedModel) -> None:
        config = model.config.get_text_config()
        heads = config.num_attention_heads
        self._file = GGUFFile(path)
        self._head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)

    def find(self, name: str, weight: Tensor) -> Blocks | None:
        """The matrix of a linear module, in the module's row order.

        None if it is not held in 4 bits, or holds other values than the model.

        Args:
            name: of the module within the model: `model.layers.3.mlp.up_proj`.
        """
        *path, last = name.split(".")
        layer = next((part for part in path if part.isdigit()), None)
        if layer is None or last not in self.NAMES:
            return None
        blocks = self._file.blocks(f"blk.{layer}.{self.NAMES[last]}.weight")
        if blocks is None or blocks.codes.shape != weight.shape:
            return None
        orders = [torch.arange(len(weight))]
        if last in ("q_proj", "k_proj"):
            orders.append(rotary_order(len(weight), self._head_dim))
        fits = (blocks.rows(order) for order in orders if self._same(blocks, weight, order))
        return next(fits, None)

    def _same(self, blocks: Blocks, weight: Tensor, order: Tensor) -> bool:
        values = blocks.rows(order[:: self.SAMPLE]).dequantised()
        return torch.equal(values.to(weight.dtype), weight[:: self.SAMPLE])


def rotary_order(rows: int, head_dim: int) -> Tensor:
    """Rows of GGUF's query and key matrices in transformers' order.

    GGUF's Llama files turn neighbouring columns of a head, transformers turns its halves: row
    2 i + j of a head there is row i + j · head_dim / 2 here. Example, head_dim 4: 0 2 1 3.
    """
    pairs = torch.arange(rows).view(-1, head_dim // 2, 2)
    return pairs.transpose(1, 2).flatten()


def can_pack(dtype: torch.dtype) -> bool:
    """Whether oneDNN has products in this dtype here."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def pack(model: PreTrainedModel, matrices: GGUFMatrices | None = None) -> str:
    """Put packed matrices in the places of a model's linear modules.

    The output matrix is held both packed and plain: embedding, drafters and trainers read its rows.

    Args:
        matrices: keep these in 4 bits; the others stay floats.

    Returns:
        What the log of a run calls the weights: `packed`, or `q4`.

    Raises:
        TargetError: there are `matrices`, but none fits.
    """
    dense, four_bit = can_pack(model.dtype), 0
    output = model.get_output_embeddings()
    for parent, owner in list(model.named_modules()):
        for name, plain in list(owner.named_children()):
            if type(plain) is not nn.Linear:
                continue
            at = f"{parent}.{name}"
            blocks = None if matrices is None else matrices.find(at, plain.weight)
            if blocks is not None and FourBitLinear.takes(blocks):
                setattr(owner, name, FourBitLinear(plain, blocks))
                four_bit += 1
            elif dense:
                setattr(owner, name, OneDNNLinear(plain, keep=plain is output))
    if matrices is not None and not four_bit:
        raise TargetError(NOTHING_IN_4_BITS)
    return "q4" if four_bit else "packed"
