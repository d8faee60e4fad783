"""Reads golden cases: what a method's reference implementation did on a tiny model."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from engine.model.loading import load_target
from engine.model.sources import TargetSpec
from engine.model.target import Target

ROOT = Path(__file__).parents[2] / "golden"


@dataclass(frozen=True)
class GoldenCase:
    """A folder of golden data and its target, loaded."""

    folder: Path
    target: Target
    expected: dict[str, Any]
    tensors: dict[str, Tensor]


@functools.cache
def golden_case(name: str, suffix: str = "") -> GoldenCase:
    """The case `method/case`, loaded once; `suffix` of its expected data's files."""
    folder = ROOT / name
    spec = TargetSpec(name=name, path=str(folder / "target"))
    target = load_target(spec, dtype="float32", device="cpu", cache_dir=folder)
    expected = json.loads((folder / f"expected{suffix}.json").read_text())
    tensors = load_file(folder / f"expected{suffix}.safetensors")
    return GoldenCase(folder, target, expected, tensors)
