"""What a model does to the products of its output matrix: a factor, and a cap."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor


@dataclass(frozen=True, slots=True)
class LogitTransform:
    """From products of the output matrix to logits.

    Attributes:
        factor: multiplies the products.
        softcap: logits become `softcap · tanh(logits / softcap)`; None = no cap.
    """

    factor: float = 1.0
    softcap: float | None = None

    @classmethod
    def of(cls, config: Any) -> Self:
        """That of a model with this text config."""
        scaling = getattr(config, "logits_scaling", None) or 1.0
        # HyperCLOVA X multiplies by what Granite and MiniCPM3 divide by.
        factor = scaling if config.model_type == "hyperclovax" else 1.0 / scaling
        factor *= getattr(config, "logit_scale", None) or 1.0  # Cohere
        factor *= getattr(config, "lm_head_multiplier", None) or 1.0  # Falcon-H1
        factor /= getattr(config, "logits_mup_width_multiplier", None) or 1.0  # Inkling
        softcap = getattr(config, "final_logit_softcapping", None)
        return cls(factor, softcap or getattr(config, "logits_soft_cap", None) or None)

    @property
    def is_identity(self) -> bool:
        return self.factor == 1.0 and self.softcap is None

    def __call__(self, products: Tensor) -> Tensor:
        logits = products if self.factor == 1.0 else products * self.factor
        return logits if self.softcap is None else self.softcap * (logits / self.softcap).tanh()
