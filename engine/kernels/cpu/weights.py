"""Weights in the layout that a processor's kernels want, in the places of a model's own modules.

oneDNN reorders a plain matrix on every call, which for few rows takes longer than the product; here
it is reordered once. Weights of 8 or 4 bits are multiplied as they are. No matrix is held twice,
and a module's call and its `weight` work as before.
"""

from __future__ import annotations

import contextlib
import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from engine.kernels.cpu.gguf import GGUFFile, QuantizedMatrix

if TYPE_CHECKING:  # seconds of importing, which the page's start does without
    from transformers import PreTrainedModel


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
        self.by_kernels = True

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
        if not self.by_kernels or (x.requires_grad and torch.is_grad_enabled()):
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


class QuantizedWeights:
    """A model's quantized matrices: those of a GGUF file as they are, or made on loading.

    Matrices that the file holds in another form are given 8 bits, as the output matrix always is:
    it moves the probabilities most.

    Attributes:
        bits: 4 or 8, of most matrices.
    """

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
    OUTPUT = ("output", "token_embd")
    """GGUF's names of the output matrix; the second where it is the embedding."""
    SAMPLE = 7
    """Every so many rows are compared with the model's own; odd, to meet every place in a head."""

    def __init__(self, model: PreTrainedModel, *, bits: int, file: GGUFFile | None) -> None:
        """`bits`: 4 or 8: as the file has them, or to make them in."""
        config = model.config.get_text_config()
        heads = config.num_attention_heads
        self._file = file
        self.bits = bits
        self._others = bits if file is None or file.bits is None else 8
        self._output = model.get_output_embeddings()
        self._embedding = getattr(model.get_input_embeddings(), "weight", None)
        self._head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)

    def of(self, name: str, linear: nn.Linear) -> QuantizedMatrix:
        """The matrix of a linear module, in the module's row order.

        Args:
            name: of the module within the model: `model.layers.3.mlp.up_proj`.
        """
        matrix = self.find(name, linear.weight)
        if matrix is not None:
            return matrix
        return QuantizedMatrix.quantize(
            linear.weight, 8 if linear is self._output else self._others
        )

    def keeps_plain(self, linear: nn.Linear) -> bool:
        """Whether a module's plain matrix is held anyway: it is the embedding's too."""
        return linear.weight is self._embedding

    def find(self, name: str, weight: Tensor) -> QuantizedMatrix | None:
        """The file's own; None if it has none, or other values than the model."""
        if self._file is None:
            return None
        *path, last = name.split(".")
        layer = next((part for part in path if part.isdigit()), None)
        names = [f"blk.{layer}.{self.NAMES[last]}"] if last in self.NAMES else self.OUTPUT
        orders = [torch.arange(len(weight))]
        if last in ("q_proj", "k_proj"):
            orders.append(rotary_order(len(weight), self._head_dim))
        for matrix in (self._file.matrix(f"{gguf_name}.weight") for gguf_name in names):
            if matrix is None or matrix.integers.shape != weight.shape:
                continue
            fits = (matrix.rows(order) for order in orders if self._same(matrix, weight, order))
            return next(fits, None)
        return None

    def _same(self, matrix: QuantizedMatrix, weight: Tensor, order: Tensor) -> bool:
        values = matrix.rows(order[:: self.SAMPLE]).dequantize()
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


def replace_linears(
    model: PreTrainedModel, make: Callable[[str, nn.Linear], PackedLinear | None]
) -> None:
    """Put packed matrices in the places of a model's linear modules.

    Args:
        make: from a module's name within the model and itself; None = it stays.
    """
    for parent, owner in list(model.named_modules()):
        for name, plain in list(owner.named_children()):
            packed = make(f"{parent}.{name}", plain) if type(plain) is nn.Linear else None
            if packed is not None:
                setattr(owner, name, packed)


def pack(model: PreTrainedModel) -> None:
    """Let oneDNN reorder the model's matrices, where it has products in their dtype.

    The output matrix is held both packed and plain: embedding, drafters and trainers read its rows.
    """
    if can_pack(model.dtype):
        output = model.get_output_embeddings()
        replace_linears(model, lambda name, plain: OneDNNLinear(plain, keep=plain is output))


@contextlib.contextmanager
def unpacked(model: PreTrainedModel) -> Iterator[None]:
    """Within it, packed modules multiply by their plain matrices: what kernels must agree with."""
    packed = [module for module in model.modules() if isinstance(module, PackedLinear)]
    for module in packed:
        module.by_kernels = False
    try:
        yield
    finally:
        for module in packed:
            module.by_kernels = True
