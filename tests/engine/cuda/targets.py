"""Tiny targets whose forwards are recorded, and the same under transformers' modules."""

from __future__ import annotations

import copy
from typing import Any

from engine.kernels.cuda.forward import CapturedForward, capture, why_not
from engine.kernels.cuda.recorder import Recorder, Tape
from engine.model.forward import prepare_attention
from engine.model.target import Target
from tests.engine.cpu.targets import VARIANTS, variant_model
from tests.models import tiny_model, tiny_tokenizer

PACKED = tuple(name for name in VARIANTS if "sliding" not in name)
MODULES = ("gpt_neox", "opt", "phi", "llama")
"""Families that are recorded as transformers' modules; Llama where packing is switched off."""


def model_of(name: str, **overrides: Any) -> Any:
    if name in VARIANTS:
        return variant_model(name, **overrides)
    model = tiny_model(name, **overrides)
    prepare_attention(model)
    return model


def captured(model: Any, recorder: Recorder | None = None, **options: Any) -> Target:
    """A target whose forwards are recorded; takes the model's weights over."""
    assert why_not(model) is None
    forward = capture(model, recorder or Tape(), **{"compiled": False, **options})
    return Target(model, tiny_tokenizer(), name="captured", forward=forward)


def forward_of(target: Target) -> CapturedForward:
    assert isinstance(target._forward, CapturedForward)
    return target._forward


def plain(model: Any) -> Target:
    """A target under transformers' modules, one operator at a time."""
    return Target(copy.deepcopy(model), tiny_tokenizer(), name="plain")
