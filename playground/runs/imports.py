"""Checks a run that comes from a file before it may enter the log: types, sizes, tree shapes."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import UTC
from typing import Any

from pydantic import TypeAdapter, ValidationError

from engine.errors import ConfigError
from engine.safe_text import short
from storage import RunDetail, StepRow, StoredRun

ID = re.compile(r"[0-9A-Za-z_-]{1,32}")
MAX_CHARS = {
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
YEARS = (1970, 9000)
MAX_COUNT = 2**31 - 1
COUNTS = ("num_prompt_tokens", "num_new_tokens", "num_steps")


@functools.cache
def _adapters() -> tuple[TypeAdapter[RunDetail], TypeAdapter[tuple[StepRow, ...]]]:
    return TypeAdapter(RunDetail), TypeAdapter(tuple[StepRow, ...])


def checked_run(values: Mapping[str, Any], rows: Any, where: str) -> StoredRun:
    """A run and its steps from plain data.

    Raises ConfigError: naming the run, the field and what is wrong.
    """
    run_type, steps_type = _adapters()
    try:
        run, steps = run_type.validate_python(values), steps_type.validate_python(rows)
    except RecursionError as error:
        raise ConfigError(f"{where}: its values are nested too deeply.") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "it"
        raise ConfigError(
            f"{where}: {field} is refused: {first['msg']}, got {short(first['input'], 60)}."
        ) from error
    for fault in (*_run_faults(run), *(f for n, s in enumerate(steps) for f in _step_faults(n, s))):
        raise ConfigError(f"{where}: {fault}")
    zone = run.created_at.tzinfo or UTC
    created_at = run.created_at.replace(tzinfo=zone).astimezone(UTC)
    return StoredRun(replace(run, created_at=created_at), steps)


def _run_faults(run: RunDetail) -> Iterator[str]:
    if not ID.fullmatch(run.id):
        yield f"id must be letters and digits, at most 32, got {run.id!r:.60}."
    if not YEARS[0] <= run.created_at.year <= YEARS[1]:
        yield f"created_at must be in the years {YEARS[0]} to {YEARS[1]}."
    for name, most in MAX_CHARS.items():
        if len(getattr(run, name) or "") > most:
            yield f"{name} must have at most {most} characters, got {len(getattr(run, name))}."
    if run.method.get("decoding_type") != run.decoding_type:
        yield f"method must be of decoding_type {run.decoding_type!r:.60}."
    if not all(isinstance(turn.get("role"), str) for turn in run.messages):
        yield "every message must have a role and content."
    counts = [getattr(run, name) for name in COUNTS]
    yield from _number_faults(*counts, run.first_token_id or 0, *run.prompt_ids, *run.output_ids)


def _number_faults(*numbers: int) -> Iterator[str]:
    for number in numbers:
        if not 0 <= number <= MAX_COUNT:
            yield f"counts and token ids must be in [0, {MAX_COUNT}], got {number}."


def _step_faults(index: int, step: StepRow) -> Iterator[str]:
    """What is wrong with a step: the viewer walks its tree and relies on the shape."""
    num_nodes = len(step.tokens)
    columns = (step.parents, step.ranks, step.draft_probs, step.target_probs)
    if step.index != index:
        yield f"steps must be numbered from 0 without gaps, got {step.index} at {index}."
    if not num_nodes or any(len(column) != num_nodes for column in columns):
        yield f"step {index} must have parents, ranks and probabilities for all its tokens."
        return
    if len(step.token_texts) not in (0, num_nodes):
        yield f"step {index} must have a text for every token, or none."
    if step.parents[0] != -1 or any(not 0 <= p < i for i, p in enumerate(step.parents) if i):
        yield f"step {index} has a node whose parent does not come before it."
    for before, node in zip((0, *step.accepted), step.accepted, strict=False):
        if not 0 < node < num_nodes or step.parents[node] != before:
            yield f"step {index} has an accepted path that is not in its tree."
    if not 0 <= step.num_committed <= len(step.accepted) + 1:
        yield f"step {index} must commit at most its accepted tokens and one more."
    yield from _number_faults(*step.tokens, step.bonus)
