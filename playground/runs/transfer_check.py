"""Checks a run that comes from a file before it may enter the log: types, sizes, tree shapes."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC
from typing import Any

from pydantic import TypeAdapter, ValidationError

from engine.errors import ConfigError
from storage import RunDetail, StepRow

ID = re.compile(r"[0-9A-Za-z_-]{1,32}")
MOST_CHARS = {
    "target": 255,
    "decoding_type": 64,
    "method_title": 255,
    "dtype": 32,
    "device": 64,
    "finish_reason": 32,
    "benchmark_id": 32,
    "name": 255,
    "note": 20_000,
}
MOST = 2**31 - 1
COUNTS = ("num_prompt_tokens", "num_new_tokens", "num_steps")


@functools.cache
def _adapters() -> tuple[TypeAdapter[RunDetail], TypeAdapter[tuple[StepRow, ...]]]:
    return TypeAdapter(RunDetail), TypeAdapter(tuple[StepRow, ...])


def check_run(
    values: Mapping[str, Any], rows: Any, where: str
) -> tuple[RunDetail, tuple[StepRow, ...]]:
    """A run and its steps from plain data.

    Raises:
        ConfigError: naming the run, the field and what is wrong.
    """
    run_of, steps_of = _adapters()
    try:
        run = run_of.validate_python(values)
        steps = steps_of.validate_python(rows)
    except (ValidationError, RecursionError) as error:
        raise ConfigError(f"{where}: {_sentence(error)}") from error
    fault = _fault(run) or next((f for n, s in enumerate(steps) if (f := _step_fault(n, s))), None)
    if fault:
        raise ConfigError(f"{where}: {fault}")
    zone = run.created_at.tzinfo or UTC
    return replace(run, created_at=run.created_at.replace(tzinfo=zone).astimezone(UTC)), steps


def _sentence(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return "its values lie too deep."
    first = error.errors(include_url=False)[0]
    field = ".".join(str(part) for part in first["loc"])
    return f"{field or 'it'} is refused: {first['msg']}, got {first['input']!r:.60}."


def _fault(run: RunDetail) -> str | None:
    if not ID.fullmatch(run.id):
        return f"id must be letters and digits, at most 32, got {run.id!r:.60}."
    for name, most in MOST_CHARS.items():
        value = getattr(run, name)
        if value is not None and len(value) > most:
            return f"{name} must have at most {most} characters, got {len(value)}."
    for name in COUNTS:
        if not 0 <= getattr(run, name) <= MOST:
            return f"{name} must be in [0, {MOST}], got {getattr(run, name)}."
    if run.method.get("decoding_type") != run.decoding_type:
        return f"method must be of decoding_type {run.decoding_type!r:.60}."
    if not all(isinstance(turn.get("role"), str) for turn in run.messages):
        return "every message must have a role and content."
    return _ids_fault((run.first_token_id or 0, *run.prompt_ids, *run.output_ids))


def _ids_fault(token_ids: Sequence[int]) -> str | None:
    bad = [i for i in token_ids if not 0 <= i <= MOST]
    return f"token ids must be in [0, {MOST}], got {bad[0]}." if bad else None


def _step_fault(number: int, step: StepRow) -> str | None:
    """What is wrong with a step: the viewer walks its tree and relies on the shape."""
    nodes = len(step.tokens)
    sides = (step.parents, step.ranks, step.draft_probs, step.target_probs)
    if step.index != number:
        return f"steps must be numbered from 0 without gaps, got {step.index} at {number}."
    if not nodes or any(len(side) != nodes for side in sides):
        return f"step {number} must have parents, ranks and probabilities for all its tokens."
    if len(step.token_texts) not in (0, nodes):
        return f"step {number} must have a text for every token, or none."
    if step.parents[0] != -1 or any(not 0 <= p < i for i, p in enumerate(step.parents) if i):
        return f"step {number} has a node whose parent does not come before it."
    for before, node in zip((0, *step.accepted), step.accepted, strict=False):
        if not 0 < node < nodes or step.parents[node] != before:
            return f"step {number} has an accepted path that is none of its tree's."
    if not 0 <= step.num_committed <= len(step.accepted) + 1:
        return f"step {number} must commit at most its accepted tokens and one more."
    return _ids_fault((*step.tokens, step.bonus))
