"""Whole runs, out of one log and into another; nothing that is here is ever overwritten."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import sqlalchemy as sa

from storage import codec
from storage.identity import prompt_id
from storage.marks import check_labels, check_tags, read_marks, write_labels, write_tags
from storage.records import Arrival, RunDetail, StepRow, StoredRun
from storage.rows import JSON_DETAILS, SAME, detail_of, setup_of
from storage.schema import run_details, runs, steps
from storage.search import write_prompts, write_remark, write_titles

IMPORTED = "imported"
BATCH = 500
NOT_CONTENT = ("id", "setup_id", "prompt_id", "name", "note", "tags", "deleted")
"""Ids, which follow from the rest, and what people change of a run."""


def read_whole(connection: sa.Connection, run_id: str) -> StoredRun | None:
    """A run with all its steps; None if there is none of this id."""
    wanted = sa.select(runs, run_details).join_from(runs, run_details).where(runs.c.id == run_id)
    row = connection.execute(wanted).one_or_none()
    if row is None:
        return None
    all_steps = read_steps(connection, run_id, 0, None)
    marks = read_marks(connection, [run_id])[run_id]
    return StoredRun(detail_of(row, marks, all_steps), tuple(all_steps))


def read_steps(
    connection: sa.Connection, run_id: str, start: int, stop: int | None
) -> list[StepRow]:
    """Steps `start` ≤ index < `stop`, in order."""
    wanted = sa.select(steps.c.payload).where(steps.c.run_id == run_id, steps.c.index >= start)
    if stop is not None:
        wanted = wanted.where(steps.c.index < stop)
    rows = connection.execute(wanted.order_by(steps.c.index))
    return [codec.unpack_step(row.payload) for row in rows]


def write_whole(connection: sa.Connection, new: Sequence[StoredRun]) -> tuple[Arrival, ...]:
    """Add runs; one that is here already is left as it is, one whose id is taken gets a new id."""
    arrivals: list[Arrival] = []
    for batch in _without_repeats(new):
        ids = [stored.run.id for stored in batch]
        here = set(connection.execute(sa.select(runs.c.id).where(runs.c.id.in_(ids))).scalars())
        settled = [
            _settle(connection, stored) if stored.run.id in here else None for stored in batch
        ]
        _insert(
            connection,
            [
                stored if arrival is None else _with_id(stored, arrival.id)
                for stored, arrival in zip(batch, settled, strict=True)
                if arrival is None or arrival.kind == "renamed"
            ],
        )
        arrivals += [
            arrival or Arrival(i, i, "added") for i, arrival in zip(ids, settled, strict=True)
        ]
    return tuple(arrivals)


def _without_repeats(new: Sequence[StoredRun]) -> list[list[StoredRun]]:
    """Batches of bounded size in which every id occurs once."""
    found: list[list[StoredRun]] = [[]]
    seen: set[str] = set()
    for stored in new:
        if stored.run.id in seen or len(found[-1]) == BATCH:
            found.append([])
            seen = set()
        seen.add(stored.run.id)
        found[-1].append(stored)
    return found


def _settle(connection: sa.Connection, stored: StoredRun) -> Arrival:
    """What becomes of a run whose id is in the log: the same run, or another one."""
    given = stored.run.id
    content = content_of(stored)
    # Beside the run that has its id may stand a copy that was renamed when it came before.
    for run_id in (given, *_copies(connection, stored.run)):
        here = read_whole(connection, run_id)
        if here is not None and content_of(here) == content:
            return Arrival(run_id, given, "known")
    return Arrival(secrets.token_hex(8), given, "renamed")


def _with_id(stored: StoredRun, run_id: str) -> StoredRun:
    return replace(stored, run=replace(stored.run, id=run_id))


def content_of(stored: StoredRun) -> str:
    """What a run is, as text: equal for equal runs, NaN included; its id and marks left out."""
    values = {k: v for k, v in asdict(stored.run).items() if k not in NOT_CONTENT}
    values["status"] = _status(stored.run)
    values["created_at"] = stored.run.created_at.isoformat()
    return codec.canonical([values, [asdict(step) for step in stored.steps]])


def _copies(connection: sa.Connection, run: RunDetail) -> list[str]:
    """Runs that began at the same moment with the same settings."""
    same = (runs.c.setup_id == setup_of(run), runs.c.created_at == _naive(run))
    return list(connection.execute(sa.select(runs.c.id).where(*same)).scalars())


def _naive(run: RunDetail) -> Any:
    return run.created_at.replace(tzinfo=None)


def _status(run: RunDetail) -> str:
    """A run that was still going when it was copied goes on elsewhere; here it ends."""
    return "interrupted" if run.status == "running" else run.status


def _insert(connection: sa.Connection, new: Sequence[StoredRun]) -> None:
    if not new:
        return
    for stored in new:
        check_labels(stored.run.labels)
        check_tags(stored.run.tags)
    rows = [_row(stored) for stored in new]
    connection.execute(runs.insert(), rows)
    connection.execute(run_details.insert(), [_details(stored.run) for stored in new])
    write_prompts(
        connection,
        {row["prompt_id"]: s.run.prompt_text for row, s in zip(rows, new, strict=True)},
    )
    titles = {title for stored in new for title in (stored.run.target, stored.run.method_title)}
    write_titles(connection, titles)
    for stored in new:
        run = stored.run
        write_tags(connection, run.id, run.tags)
        write_labels(connection, run.id, run.labels)
        write_steps(connection, run.id, stored.steps)
        if run.name or run.note:
            write_remark(connection, run.id)


def _row(stored: StoredRun) -> dict[str, Any]:
    run = stored.run
    return {
        **{key: getattr(run, key) for key in SAME if key != "note"},
        "setup_id": setup_of(run),
        "prompt_id": prompt_id(run.prompt_text, run.messages, run.prompt_ids),
        "status": _status(run),
        "created_at": _naive(run),
        "heartbeat_at": _naive(run),
        "owner": IMPORTED,
        "num_accepted": sum(len(step.accepted) for step in stored.steps),
        "deleted_at": None,
    }


def _details(run: RunDetail) -> dict[str, Any]:
    same = ("prompt_text", "first_token_id", "first_text", "text", "error", "note")
    return {
        "run_id": run.id,
        **{key: codec.dump(getattr(run, key)) for key in JSON_DETAILS},
        **{key: codec.dump(list(getattr(run, key))) for key in ("prompt_ids", "output_ids")},
        **{key: getattr(run, key) for key in same},
        "metrics": codec.dump(run.metrics) if run.metrics else None,
    }


def write_steps(connection: sa.Connection, run_id: str, new: Sequence[StepRow]) -> None:
    """Add steps that are not stored yet."""
    rows = [{"run_id": run_id, "index": s.index, "payload": codec.pack_step(s)} for s in new]
    if rows:
        connection.execute(steps.insert(), rows)
