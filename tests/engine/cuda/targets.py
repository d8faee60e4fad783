"""Tiny targets that are run by graphs, and the same one operator at a time."""

from __future__ import annotations

import copy
from typing import Any

from engine.kernels.cuda.graphs import CudaGraphs
from engine.kernels.cuda.runner import GraphRunner, unsupported_reason
from engine.model.forward import prepare_attention
from engine.model.target import Target
from tests.engine.cpu.targets import VARIANTS, variant_model
from tests.engine.cuda.tape import Tape
from tests.models import tiny_model, tiny_tokenizer

FAMILIES = (*(name for name in VARIANTS if "sliding" not in name), "gpt_neox", "opt", "phi")


def model_of(name: str, **overrides: Any) -> Any:
    if name in VARIANTS:
        return variant_model(name, **overrides)
    model = tiny_model(name, **overrides)
    prepare_attention(model)
    return model


def captured(model: Any, capturer: CudaGraphs | None = None) -> Target:
    """A target whose forwards are captured."""
    assert unsupported_reason(model) is None
    usual = CudaGraphs(model.device) if model.device.type == "cuda" else Tape()
    forward = GraphRunner(model, capturer or usual)
    return Target(model, tiny_tokenizer(), name="captured", forward=forward)


def runner_of(target: Target) -> GraphRunner:
    assert isinstance(target._forward, GraphRunner)
    return target._forward


def plain(model: Any) -> Target:
    """A target under transformers' modules, one operator at a time."""
    return Target(copy.deepcopy(model), tiny_tokenizer(), name="plain")
