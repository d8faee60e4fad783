"""What lies between a decoder's matrix products on a device: few kernels, because each one waits.

A kernel that does next to nothing still takes microseconds, a share of a step that grows with the
device's bandwidth. Where torch can compile them, each of these functions is one kernel or two.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.cpu.operators import gated, rotate
from engine.kernels.cpu.rotary import Rotary
from engine.kernels.cuda.attention import combine


@dataclass(frozen=True, slots=True)
class Pointwise:
    """The functions, compiled or not.

    Attributes:
        heads: `split_heads`; gated: `operators.gated`; combine: `attention.combine`.
        note: why they are not compiled; empty if they are.
    """

    heads: Callable[[Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor]]
    gated: Callable[[Tensor], Tensor]
    combine: Callable[[Tensor, Tensor], Tensor]
    note: str = ""


def split_heads(
    qkv: Tensor, cos: Tensor, signed_sin: Tensor, num_query: int
) -> tuple[Tensor, Tensor]:
    """Rotated queries, and the rows to store.

    Args:
        qkv: `(n, query + 2 · key heads, head_dim)`; may be changed.
        cos, signed_sin: `(n, 1, head_dim)`, see `engine.kernels.cpu.rotary`.

    Returns:
        `(n, query heads, head_dim)` and `(2, key heads, n, head_dim)`.
    """
    num_key = (qkv.shape[1] - num_query) // 2
    rotate(qkv[:, : num_query + num_key], Rotary(cos, signed_sin))
    stored = qkv[:, num_query:].view(len(qkv), 2, num_key, qkv.shape[2])
    return qkv[:, :num_query], stored.permute(1, 2, 0, 3)


def _split_heads_anew(
    qkv: Tensor, cos: Tensor, signed_sin: Tensor, num_query: int
) -> tuple[Tensor, Tensor]:
    """The same without changing `qkv`: what a compiler makes one kernel of."""
    num_key = (qkv.shape[1] - num_query) // 2
    turned = qkv[:, : num_query + num_key]
    half = turned.shape[-1] // 2
    swapped = torch.cat([turned[..., half:], turned[..., :half]], dim=-1)
    turned = turned * cos + swapped * signed_sin
    values = qkv[:, num_query + num_key :]
    stored = torch.stack([turned[:, num_query:], values]).transpose(1, 2)
    return turned[:, :num_query].contiguous(), stored.contiguous()


def plain(note: str = "") -> Pointwise:
    """By torch's operators: on any device."""
    return Pointwise(split_heads, gated, combine, note)


def compiled(device: torch.device, dtype: torch.dtype) -> Pointwise:
    """Compiled where that works here and agrees with `plain`, else `plain` with a note."""
    if importlib.util.find_spec("triton") is None:
        return plain("Triton is not installed")
    found = compiled_by(torch.compile)
    fault = disagreement(found, device, dtype)
    return found if fault is None else plain(fault)


def compiled_by(compiler: Callable[..., Callable[..., object]]) -> Pointwise:
    """Each function under a compiler, with rows as a dynamic size."""

    def made(function: Callable[..., object]) -> Callable[..., object]:
        return compiler(function, dynamic=True)

    def gate(gate_up: Tensor) -> Tensor:
        left, right = gate_up.chunk(2, dim=-1)
        return torch.nn.functional.silu(left) * right

    return Pointwise(made(_split_heads_anew), made(gate), made(combine))  # type: ignore[arg-type]


@torch.inference_mode()
def disagreement(found: Pointwise, device: torch.device, dtype: torch.dtype) -> str | None:
    """What is wrong with compiled functions, in words; None if they agree with plain ones."""
    reference = plain()
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    try:
        for n in (1, 5):
            qkv, cos, sin = random(n, 8, 16), random(n, 1, 16), random(n, 1, 16)
            wide, out, lse = random(n, 64), random(2, 3, n, 16), random(2, 3, n)
            pairs = [
                (found.heads(qkv.clone(), cos, sin, 4), reference.heads(qkv.clone(), cos, sin, 4)),
                ((found.gated(wide),), (reference.gated(wide),)),
                ((found.combine(out, lse),), (reference.combine(out, lse),)),
            ]
            for ours, theirs in pairs:
                for mine, other in zip(ours, theirs, strict=True):
                    near = torch.allclose(mine.float(), other.float(), rtol=0.03, atol=0.05)
                    if mine.shape != other.shape or not near:
                        return "what torch.compile made of them differs"
    except (RuntimeError, OSError, ImportError, AttributeError) as error:
        return f"torch.compile failed ({type(error).__name__})"
    return None
