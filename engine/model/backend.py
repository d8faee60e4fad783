"""What a target's forwards run on, why nothing faster does, and how its weights are stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, slots=True)
class Backend:
    """What a target's forwards run on.

    Attributes:
        name: for people and the run log.
        why_not: a faster backend's key in the run log → why it is not used, or how it came to be.
        remark: sentences on its speed or tokenizer, told with every figure; "" = none.
        row_invariant: whether a row's bits do not depend on the rows computed with it.
    """

    name: str
    why_not: Mapping[str, str] = field(default_factory=dict)
    remark: str = ""
    row_invariant: bool = False

    def environment(self) -> dict[str, str]:
        """Its entries in the run log."""
        remark = {"remark": self.remark} if self.remark else {}
        return {"forward": self.name, **self.why_not, **remark}


@dataclass(frozen=True, slots=True)
class Precision:
    """How a model's weights are stored, and what it computes in.

    Attributes:
        dtype: of everything but quantized matrices.
        bits: minimum bits per weight of the matrices that the compiled kernels pack, 16 = bfloat16;
            None = they pack none.
    """

    dtype: torch.dtype
    bits: int | None = None

    @property
    def is_quantized(self) -> bool:
        return self.bits is not None and self.bits < 16

    @property
    def name(self) -> str:
        """As in the settings: `bfloat16`, `q8`, …"""
        return f"q{self.bits}" if self.is_quantized else str(self.dtype).removeprefix("torch.")

    @property
    def companion(self) -> str:
        """The dtype of a model that drafts for this one: quantized where this one is."""
        return "q8" if self.is_quantized else self.name
