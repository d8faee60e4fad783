"""Reads golden cases: what a method's reference implementation did on a tiny model."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from engine.config import Limits, Sampling
from engine.decode import decode
from engine.drafters.base import Drafter
from engine.model.loading import load_target
from engine.model.sources import TargetSpec
from engine.model.target import Target
from engine.steps import End, Prefill, Step

ROOT = Path(__file__).parents[2] / "golden"


@dataclass(frozen=True)
class GoldenCase:
    """A folder of golden data and its target, loaded."""

    folder: Path
    target: Target
    expected: dict[str, Any]
    tensors: dict[str, Tensor]


@functools.cache
def golden_case(name: str) -> GoldenCase:
    """The case `method/case`, loaded once."""
    folder = ROOT / name
    spec = TargetSpec(name=name, path=str(folder / "target"))
    target = load_target(spec, dtype="float32", device="cpu", cache_dir=folder)
    expected = json.loads((folder / "expected.json").read_text())
    return GoldenCase(folder, target, expected, load_file(folder / "expected.safetensors"))


def run(
    case: GoldenCase, drafter: Drafter, prompt_ids: list[int], *, temperature: float = 0.0
) -> tuple[int, list[Step], tuple[int, ...]]:
    """First root, steps and output of a run that is a few steps longer than the golden ones."""
    limits = Limits(max_new_tokens=64, ignore_eos=True)
    sampling = Sampling(temperature=temperature)
    records = list(decode(case.target, drafter, prompt_ids, sampling=sampling, limits=limits))
    prefill, *steps, end = records
    assert isinstance(prefill, Prefill) and isinstance(end, End)
    return prefill.token_id, [s for s in steps if isinstance(s, Step)], end.output_ids
