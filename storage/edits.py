"""What people change of a run: its name, note and tags, and whether it is deleted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from storage import owner
from storage.errors import StorageError, UnknownRunError
from storage.marks import check_tags, write_tags
from storage.schema import run_details, runs, tags
from storage.search import write_remark

MAX_NAME_CHARS = 255
MAX_NOTE_CHARS = 20_000
BATCH = 500
"""Ids in one statement; a database takes only so many."""


def change(connection: sa.Connection, run_id: str, **values: Any) -> None:
    """Set columns of a run.

    Raises:
        UnknownRunError: no such run.
    """
    changed = connection.execute(runs.update().where(runs.c.id == run_id).values(**values))
    if changed.rowcount == 0:
        raise UnknownRunError(f"No run {run_id!r:.80} is in the log.")


def change_details(connection: sa.Connection, run_id: str, **values: Any) -> None:
    """Set columns of a run's details."""
    wanted = run_details.update().where(run_details.c.run_id == run_id)
    connection.execute(wanted.values(**values))


def rename(connection: sa.Connection, run_id: str, name: str) -> None:
    """Give a run a name."""
    if len(name) > MAX_NAME_CHARS:
        raise StorageError(
            f"A name must have at most {MAX_NAME_CHARS} characters, got {len(name)}. Shorten it."
        )
    change(connection, run_id, name=name)
    write_remark(connection, run_id)


def set_note(connection: sa.Connection, run_id: str, note: str) -> None:
    """Write a run's note."""
    if len(note) > MAX_NOTE_CHARS:
        raise StorageError(
            f"A note must have at most {MAX_NOTE_CHARS} characters, got {len(note)}. Shorten it."
        )
    refuse_unknown(connection, [run_id])
    change_details(connection, run_id, note=note)
    write_remark(connection, run_id)


def set_tags(connection: sa.Connection, run_id: str, new: Sequence[str]) -> None:
    """Replace a run's tags."""
    check_tags(new)
    refuse_unknown(connection, [run_id])
    write_tags(connection, run_id, new)


def retag(
    connection: sa.Connection, run_ids: Sequence[str], *, add: Sequence[str], remove: Sequence[str]
) -> None:
    """Add tags to runs, and take others from them."""
    check_tags(add)
    refuse_unknown(connection, run_ids)
    taken = {*add, *remove}
    for some in batches(run_ids):
        gone = tags.delete().where(tags.c.run_id.in_(some), tags.c.tag.in_(taken))
        connection.execute(gone)
        new = [{"run_id": run_id, "tag": tag} for run_id in some for tag in dict.fromkeys(add)]
        if new:
            connection.execute(tags.insert(), new)


def set_deleted(connection: sa.Connection, run_ids: Sequence[str], deleted: bool) -> None:
    """Hide runs, or show them again."""
    refuse_unknown(connection, run_ids)
    when = owner.now() if deleted else None
    for some in batches(run_ids):
        connection.execute(runs.update().where(runs.c.id.in_(some)).values(deleted_at=when))


def refuse_unknown(connection: sa.Connection, run_ids: Sequence[str]) -> None:
    """Raises UnknownRunError: one of these is not in the log."""
    for some in batches(run_ids):
        known = set(connection.execute(sa.select(runs.c.id).where(runs.c.id.in_(some))).scalars())
        for run_id in some:
            if run_id not in known:
                raise UnknownRunError(f"No run {run_id!r:.80} is in the log.")


def batches(run_ids: Sequence[str]) -> list[Sequence[str]]:
    """The ids without repeats, a bounded number at a time."""
    ids = list(dict.fromkeys(run_ids))
    return [ids[start : start + BATCH] for start in range(0, len(ids), BATCH)]
