"""A layer's mixture of experts, run by one call of the kernels: see `experts.h`.

The router stays transformers' own; only the experts that it chose are read, and each once for all
rows that chose it. A row's result has the same bits, whatever rows are computed with it.
"""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Iterator, Sequence
from ctypes import POINTER, c_float, c_int32, c_void_p
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import gelu, silu

from engine.kernels.cpu.operators import MULTIPLE, Matrix, MatrixStruct, Struct, call, fields
from engine.model.packed import Packed

MAX_ROWS = 512
"""Rows of one call, which bounds its memory; each further call reads the experts again."""
CLAMPED = 2
"""In the kernels, a third activation besides `native.ACTIVATIONS`."""


class _ExpertsStruct(Struct):
    _fields_ = [
        *fields(c_int32, "count hidden intermediate activation"),
        *fields(c_float, "limit slope shift"),
        *fields(POINTER(MatrixStruct), "gate up down"),
    ]


class _CallStruct(Struct):
    _fields_ = [*fields(c_int32, "n k threads"), *fields(c_void_p, "x chosen weights out")]


@dataclass(frozen=True, slots=True)
class GateRule:
    """How experts join gate and up.

    Attributes:
        activation: 0 = SiLU, 1 = GELU by tanh, or `CLAMPED`, with
        limit, slope, shift: `g = min(gate, limit)`, `u = clamp(up, ±limit)`,
            `g · sigmoid(slope · g) · (u + shift)`.
    """

    activation: int
    limit: float = 0.0
    slope: float = 0.0
    shift: float = 0.0

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        if self.activation != CLAMPED:
            return silu(gate) * up if self.activation == 0 else gelu(gate, approximate="tanh") * up
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return gate * torch.sigmoid(self.slope * gate) * (up + self.shift)


def is_experts(module: nn.Module) -> bool:
    """Whether a module has the experts of a layer in transformers' stacked parameters."""
    return hasattr(module, "_apply_gate") and hasattr(module, "is_transposed")


def gate_rule(experts: Any) -> GateRule | None:
    """How these experts join gate and up, judged by what they compute; None if it is unknown."""
    limit = getattr(experts, "limit", None) or getattr(experts, "swiglu_limit", None)
    slope = getattr(experts, "alpha", None) or getattr(experts, "swiglu_alpha", None)
    rules = [GateRule(0), GateRule(1)]
    if limit is not None:
        rules += [GateRule(CLAMPED, limit, 1.0), GateRule(CLAMPED, limit, slope or 1.0, 1.0)]
    values = torch.linspace(-10, 10, 32)
    gate, up = values.repeat_interleave(32)[None], values.repeat(32)[None]
    joined = torch.stack([gate, up], dim=-1).flatten(1)
    if experts.is_concatenated:
        joined = torch.cat([gate, up], dim=-1)
    computed = experts._apply_gate(joined)
    return next((r for r in rules if torch.allclose(computed, r(gate, up), atol=1e-4)), None)


def unsupported_reason(experts: Any) -> str | None:
    """Why the kernels do not run these experts; None if they do."""
    name = type(experts).__name__
    if not experts.has_gate or experts.has_post_expert_norm:
        return f"{name} have no gate, or a norm of their own"
    sizes = experts.down_proj.shape[1:]
    if any(size % MULTIPLE for size in sizes):
        return f"experts must be multiples of {MULTIPLE} wide, got {tuple(sizes)}"
    if gate_rule(experts) is None:
        return f"the activation of {name} is not one of the kernels'"
    return None


def has_plain_experts(model: nn.Module) -> bool:
    """Whether a model has experts that stay floats: the kernels do not run them."""
    return any(
        unsupported_reason(module) is not None if is_experts(module) else _is_stack(module)
        for module in model.modules()
    )


def _is_stack(module: nn.Module) -> bool:
    """Whether a module of another kind holds one matrix per expert."""
    names = (name for name, one in module.named_parameters(recurse=False) if one.ndim == 3)
    return any("proj" in name for name in names)


def expert_matrices(experts: Any, name: str) -> Tensor:
    """The matrices of a parameter, `(experts, out, in)`."""
    values: Tensor = getattr(experts, name)
    return values.mT if experts.is_transposed else values


def split_rows(experts: Any, name: str) -> tuple[slice, ...]:
    """Which rows of an expert's `gate_up_proj` are gate and up; all rows of `down_proj`."""
    if not name.startswith("gate_up_proj"):
        return (slice(None),)
    if not experts.is_concatenated:
        return slice(0, None, 2), slice(1, None, 2)
    half = expert_matrices(experts, "gate_up_proj").shape[1] // 2
    return slice(0, half), slice(half, None)


class NativeExperts(Packed):
    """The experts of a layer, in packed matrices.

    Attributes:
        gate, up, down: one matrix per expert each; those of a kind have one format.
    """

    def __init__(
        self, plain: nn.Module, gate: Sequence[Matrix], up: Sequence[Matrix], down: Sequence[Matrix]
    ) -> None:
        """`plain`: the module that it replaces, whose parameters are not kept."""
        super().__init__()
        rule = gate_rule(plain)
        assert rule is not None
        self.gate, self.up, self.down = tuple(gate), tuple(up), tuple(down)
        self._template = (copy.copy(plain),)  # in a tuple: not a submodule
        self._template[0]._parameters = {
            key: nn.Parameter(torch.empty_like(one, device="meta"), requires_grad=False)
            for key, one in plain.named_parameters(recurse=False)
        }
        self.num_weights = sum(one.numel() for one in self._template[0].parameters())
        array = MatrixStruct * len(self.gate)
        stacks = {
            name: array(*(one.struct for one in matrices))
            for name, matrices in (("gate", gate), ("up", up), ("down", down))
        }
        hidden, intermediate = self.down[0].shape
        self._struct = _ExpertsStruct(
            count=len(self.gate),
            hidden=hidden,
            intermediate=intermediate,
            activation=rule.activation,
            limit=rule.limit,
            slope=rule.slope,
            shift=rule.shift,
            **stacks,
        )

    @property
    def matrices(self) -> Iterator[Matrix]:
        yield from (*self.gate, *self.up, *self.down)

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """The weighted sum of each row's experts.

        Args:
            hidden: `(n, hidden)`, rounded to bfloat16.
            chosen: `(n, k)` int64, experts; the number of experts stands for none.
            weights: `(n, k)`.
        """
        parts = (
            self._sum(*rows)
            for rows in zip(*(x.split(MAX_ROWS) for x in (hidden, chosen, weights)), strict=True)
        )
        return torch.cat(list(parts)).to(hidden.dtype)

    def _sum(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros(hidden.shape)
        arguments = _CallStruct(
            n=len(hidden),
            k=chosen.shape[1],
            threads=torch.get_num_threads(),
            x=hidden.detach().to(torch.bfloat16).contiguous(),
            chosen=chosen.to(torch.int64).contiguous(),
            weights=weights.detach().float().contiguous(),
            out=out,
        )
        call(self.gate[0].kernels.run_experts, self._struct, arguments)
        return out

    def unpack(self) -> dict[str, Tensor]:
        """The plain module's parameters, in bfloat16."""
        plain: Any = self._template[0]
        unpacked = {}
        for key, shape in ((key, one.shape) for key, one in plain.named_parameters(recurse=False)):
            values = torch.empty(shape, dtype=torch.bfloat16)
            is_bias, both = key.endswith("_bias"), (self.gate, self.up)
            stacks = both if key.startswith("gate_up") else (self.down,)
            rows = values.mT if plain.is_transposed and not is_bias else values
            for part, matrices in zip(split_rows(plain, key), stacks, strict=True):
                for expert, matrix in enumerate(matrices):
                    own = matrix.bias if is_bias else matrix.rows()
                    assert own is not None
                    rows[expert, part] = own[: matrix.shape[0]].to(torch.bfloat16)
            unpacked[key] = values
        return unpacked

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination.update({prefix + key: values for key, values in self.unpack().items()})

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        plain = copy.copy(self._template[0])
        plain._parameters = {
            key: nn.Parameter(values, requires_grad=False) for key, values in self.unpack().items()
        }
        return plain


def pack_experts(model: transformers.PreTrainedModel, kernels: ctypes.CDLL, bits: int) -> None:
    """Pack a model's experts for the kernels, in bfloat16 or quantized to 8 or 4 bits."""
    for name, module in list(model.named_modules()):
        if is_experts(module) and unsupported_reason(module) is None:
            model.set_submodule(name, pack_one(module, kernels, bits))


def pack_one(experts: Any, kernels: ctypes.CDLL, bits: int) -> NativeExperts:
    """The experts of one layer, packed for the kernels."""
    stacks: list[list[Matrix]] = []
    for key in ("gate_up_proj", "down_proj"):
        matrices, bias = expert_matrices(experts, key), getattr(experts, f"{key}_bias", None)
        for rows in split_rows(experts, key):
            own = [None if bias is None else bias[i, rows] for i in range(len(matrices))]
            pairs = zip(matrices, own, strict=True)
            stacks.append([Matrix.of(kernels, one[rows], b, bits=bits) for one, b in pairs])
    return NativeExperts(experts, *stacks)
