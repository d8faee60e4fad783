"""Table rows ↔ frozen values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa

from storage import codec
from storage.identity import prompt_id, setup_id
from storage.marks import Marks
from storage.query import FIGURES, SHORT_PROMPT
from storage.records import NewRun, RunDetail, RunSummary, StepRow

SPLIT = ("draft_s", "verify_s", "accept_s", "other_s")
JSON_DETAILS = ("method", "sampling", "limits", "environment", "messages")
SAME = (
    "id",
    "status",
    "target",
    "decoding_type",
    "method_title",
    "lossless",
    "dtype",
    "device",
    "setup_id",
    "prompt_id",
    *FIGURES,
    "finish_reason",
    "name",
    "note",
    "benchmark_id",
)
"""Fields of a summary that are columns as they are."""


def summary_of(row: sa.Row[Any], marks: Marks) -> RunSummary:
    """A row of runs and what the table shows of its details, as a summary."""
    return RunSummary(**_common(row, marks, row.prompt_text[:SHORT_PROMPT]))


def detail_of(row: sa.Row[Any], marks: Marks, streamed: Sequence[StepRow]) -> RunDetail:
    """A row of runs with all its details.

    Args:
        streamed: steps of a run that has no output written yet; its output is theirs.
    """
    output_ids, text = _output(row, streamed)
    return RunDetail(
        **_common(row, marks, row.prompt_text),
        prompt_ids=tuple(codec.load(row.prompt_ids)),
        messages=tuple(codec.load(row.messages)),
        environment=codec.load(row.environment),
        first_token_id=row.first_token_id,
        first_text=row.first_text,
        output_ids=output_ids,
        text=text,
        metrics=codec.load(row.metrics) if row.metrics else {},
        error=row.error,
    )


def _output(row: sa.Row[Any], streamed: Sequence[StepRow]) -> tuple[tuple[int, ...], str]:
    if row.output_ids is not None:
        return tuple(codec.load(row.output_ids)), row.text or ""
    ids = [] if row.first_token_id is None else [row.first_token_id]
    text = row.first_text
    for step in streamed:
        committed = [*(step.tokens[node] for node in step.accepted), step.bonus]
        ids += committed[: step.num_committed]
        text += "".join(step.committed_texts)
    return tuple(ids), text


def _common(row: sa.Row[Any], marks: Marks, prompt_text: str) -> dict[str, Any]:
    return {
        **{key: getattr(row, key) for key in SAME},
        **{key: codec.load(getattr(row, key)) for key in ("method", "sampling", "limits")},
        "created_at": row.created_at.replace(tzinfo=UTC),
        "prompt_text": prompt_text,
        "tags": marks.tags,
        "labels": dict(marks.labels),
        "deleted": row.deleted_at is not None,
    }


def setup_of(run: NewRun | RunSummary) -> str:
    """The id of a run's settings."""
    return setup_id(
        target=run.target,
        method=run.method,
        sampling=run.sampling,
        limits=run.limits,
        dtype=run.dtype,
        device=run.device,
    )


def new_row(new: NewRun, *, run_id: str, owner: str, now: datetime) -> dict[str, Any]:
    """The row of runs for one that is about to start."""
    same = ("target", "method_title", "lossless", "dtype", "device", "benchmark_id")
    return {
        "id": run_id,
        "created_at": now,
        "heartbeat_at": now,
        "owner": owner,
        "status": "running",
        "decoding_type": str(new.method["decoding_type"]),
        "setup_id": setup_of(new),
        "prompt_id": prompt_id(new.prompt_text, new.messages, new.prompt_ids),
        "num_prompt_tokens": len(new.prompt_ids),
        "num_new_tokens": 0,
        "num_steps": 0,
        "num_accepted": 0,
        "name": "",
        **{key: getattr(new, key) for key in same},
    }


def new_details(new: NewRun, *, run_id: str) -> dict[str, Any]:
    """The row of details for a run that is about to start."""
    return {
        "run_id": run_id,
        **{key: codec.dump(getattr(new, key)) for key in JSON_DETAILS},
        "prompt_ids": codec.dump(list(new.prompt_ids)),
        "prompt_text": new.prompt_text,
        "first_text": "",
        "note": "",
    }


def figures_row(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of a finished run's figures; what it has no figure for stays as it is."""
    split = metrics.get("time_split") or {}
    known = {key: metrics.get(key) for key in FIGURES if key not in SPLIT}
    known |= {key: split.get(key) for key in SPLIT}
    return {key: value for key, value in known.items() if value is not None}
