"""The trace format: one JSON object per line, `run`, then `step`s, then `end`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from engine.config import MethodConfig, Sampling
from engine.metrics import Metrics
from engine.model.target import Target
from engine.steps import End, Step


def run_line(
    target: Target, method: MethodConfig, prompt_ids: Sequence[int], sampling: Sampling
) -> dict[str, Any]:
    """What is being run."""
    return {
        "type": "run",
        "target": target.name,
        "method": method.model_dump(mode="json"),
        "prompt_ids": list(prompt_ids),
        "sampling": sampling.model_dump(mode="json"),
        "dtype": target.dtype_name,
        "device": str(target.device),
    }


def step_line(step: Step) -> dict[str, Any]:
    """One step; accepting counts as `other_s`."""
    return {
        "type": "step",
        "index": step.index,
        "tokens": list(step.tokens),
        "parents": list(step.parents),
        "accepted": list(step.accepted),
        "bonus": step.bonus,
        "draft_s": step.draft_s,
        "verify_s": step.verify_s,
        "other_s": step.accept_s + step.other_s,
    }


def end_line(end: End, text: str, metrics: Metrics) -> dict[str, Any]:
    """What came of it."""
    return {
        "type": "end",
        "output_ids": list(end.output_ids),
        "text": text,
        "finish_reason": end.finish_reason,
        "steps": end.num_steps,
        "mat": metrics.mat,
        "tok_s": metrics.tok_s,
        "ttft_s": metrics.ttft_s,
    }


def write(stream: TextIO, line: Mapping[str, Any]) -> None:
    """Append one line; flushed, so that a killed run leaves whole lines."""
    stream.write(json.dumps(line, ensure_ascii=False) + "\n")
    stream.flush()
