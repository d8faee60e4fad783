"""Writes runs: their rows, their search texts, and runs copied from another log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from storage.records import NewRun, RunDetail, StepRow, StoredRun
from storage.schema import (
    FIGURES,
    digest,
    fold,
    labels,
    prompt_texts,
    remarks,
    run_details,
    runs,
    steps,
    tags,
    titles,
)

MAX_NAME_CHARS = 255
MAX_NOTE_CHARS = 20_000
MAX_TAG_CHARS = 128
MAX_TAGS = 50
IMPORTED = "imported"


def values_of(run: NewRun | RunDetail, **more: Any) -> dict[str, Any]:
    """The column values of a run, with `more` values that it lacks itself."""
    # A setting that is an empty mapping counts as absent, as in runs that are older than it.
    drawn = {name: v for name, v in run.sampling.items() if name != "seed" and v != {}}
    setup = [run.target, run.method, drawn, run.limits, run.dtype, run.device]
    token_ids = [] if run.prompt_text or run.messages else run.prompt_ids
    prompt = [run.prompt_text, run.messages, token_ids]
    return {
        **{field.name: getattr(run, field.name) for field in fields(run)},
        "setup_id": getattr(run, "setup_id", "") or digest(setup)[:32],
        # Kept if known: lone surrogates of a text are not read back as they were.
        "prompt_id": getattr(run, "prompt_id", "") or digest(prompt)[:32],
        "lossless": bool(run.lossless),
        **more,
    }


def insert(connection: sa.Connection, new: Sequence[Mapping[str, Any]]) -> None:
    """Write runs from their values: rows, labels and search texts."""
    for table in (runs, run_details):
        rows = ({**run, "run_id": run["id"]} for run in new)
        names = table.c.keys()
        insert_rows(connection, table, [{n: row[n] for n in names if n in row} for row in rows])
    _write_folded(
        connection, prompt_texts.c.prompt_id, {run["prompt_id"]: run["prompt_text"] for run in new}
    )
    searched = {run[name] for run in new for name in ("target", "method_title")}
    _write_folded(connection, titles.c.title, {title: title for title in searched})
    for run in new:
        own = {**_key_labels(run), **run["labels"]}
        pairs = [{"run_id": run["id"], "key": k, "value": v} for k, v in own.items()]
        insert_rows(connection, labels, pairs)


def _key_labels(run: Mapping[str, Any]) -> dict[str, str]:
    """The labels that a request is filtered and grouped by."""
    if not run["configuration"]:
        return {}
    own = {name: str(run[name]) for name in ("suite", "prompt", "turn", "repeat", "configuration")}
    return own | ({"worker": run["worker"]} if run["worker"] else {})


def insert_rows(
    connection: sa.Connection, table: sa.Table, rows: Sequence[Mapping[str, Any]]
) -> None:
    """Add these rows, if any."""
    if rows:
        connection.execute(sa.insert(table), rows)


def _write_folded(connection: sa.Connection, key: sa.Column[str], texts: Mapping[str, str]) -> None:
    """Write search texts by their keys, each once."""
    insert = postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert
    new = insert(key.table).on_conflict_do_nothing()
    # Sorted, so that two processes cannot deadlock.
    rows = [{key.name: name, "folded": fold(text)} for name, text in sorted(texts.items())]
    connection.execute(new, rows)


def write_remark(connection: sa.Connection, run_id: str) -> None:
    """Update the search text of a run's name and note."""
    connection.execute(remarks.delete().where(remarks.c.run_id == run_id))
    query = sa.select(runs.c.name, run_details.c.note).join_from(runs, run_details)
    name, note = connection.execute(query.where(runs.c.id == run_id)).one()
    if name or note:
        folded = fold(f"{name}\n{note}")
        connection.execute(remarks.insert().values(run_id=run_id, folded=folded))


def write_tags(connection: sa.Connection, run_id: str, new: Sequence[str]) -> None:
    """Replace a run's tags."""
    connection.execute(tags.delete().where(tags.c.run_id == run_id))
    insert_rows(connection, tags, [{"run_id": run_id, "tag": tag} for tag in dict.fromkeys(new)])


def write_steps(connection: sa.Connection, run_id: str, new: Sequence[StepRow]) -> None:
    """Add steps that are not stored yet."""
    rows = [{"run_id": run_id, "index": step.index, "payload": step} for step in new]
    insert_rows(connection, steps, rows)


def erase(connection: sa.Connection, run_ids: Sequence[str]) -> int:
    """Delete hidden runs that have ended, and the search texts of prompts of no other run."""
    if connection.dialect.name == "postgresql":  # so that no new run relies on such a text
        connection.exec_driver_sql("LOCK TABLE prompt_texts IN SHARE ROW EXCLUSIVE MODE")
    erased = runs.c.id.in_(run_ids), runs.c.deleted_at.is_not(None), runs.c.status != "running"
    delete = runs.delete().where(*erased).returning(runs.c.prompt_id)
    prompt_ids = connection.scalars(delete).all()
    key = prompt_texts.c.prompt_id
    unused = key.in_(prompt_ids), ~sa.exists().where(runs.c.prompt_id == key)
    connection.execute(prompt_texts.delete().where(*unused))
    return len(prompt_ids)


def figures_of(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Column values of a run's figures; columns without a figure are not changed."""
    figures = {**metrics, **(metrics.get("time_split") or {})}
    columns = (*FIGURES, "num_accepted", "decode_s")
    return {key: figures[key] for key in columns if figures.get(key) is not None}


def write_whole(connection: sa.Connection, new: Sequence[StoredRun]) -> int:
    """Add runs of another log unless their ids exist; returns the number of new ones."""
    by_id = {stored.run.id: stored for stored in new}
    present = set(connection.scalars(sa.select(runs.c.id).where(runs.c.id.in_(by_id))))
    added = [stored for run_id, stored in by_id.items() if run_id not in present]
    if added:
        insert(connection, [_values_of_copy(stored) for stored in added])
    for stored in added:
        write_steps(connection, stored.run.id, stored.steps)
        write_tags(connection, stored.run.id, stored.run.tags)
        if stored.run.name or stored.run.note:
            write_remark(connection, stored.run.id)
    return len(added)


def _values_of_copy(stored: StoredRun) -> dict[str, Any]:
    """The column values of a copied run; one that was still running becomes interrupted."""
    run, created_at = stored.run, stored.run.created_at.replace(tzinfo=None)
    decode_s = run.metrics.get("decode_s")
    return values_of(
        run,
        status="interrupted" if run.status == "running" else run.status,
        heartbeat_at=created_at,
        owner=IMPORTED,
        num_accepted=sum(len(step.accepted) for step in stored.steps),
        decode_s=decode_s if isinstance(decode_s, float) else None,
        deleted_at=created_at if run.deleted else None,
        metrics=run.metrics or None,
    )
