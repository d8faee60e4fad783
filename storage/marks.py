"""Tags and labels of runs: small tables beside the runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import sqlalchemy as sa

from storage.errors import StorageError
from storage.schema import labels, tags

MAX_LABEL_CHARS = 64
MAX_VALUE_CHARS = 500
MAX_TAG_CHARS = 128
MAX_TAGS = 50


@dataclass(frozen=True, slots=True)
class Marks:
    """What these tables hold of one run."""

    tags: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)


def check_labels(new: Mapping[str, str]) -> None:
    """Refuse what an index cannot hold.

    Raises:
        StorageError: a label is no text, or too long.
    """
    for key, value in new.items():
        if not (isinstance(key, str) and 1 <= len(key) <= MAX_LABEL_CHARS):
            raise StorageError(
                f"A label's name must be text of 1 to {MAX_LABEL_CHARS} characters, got {key!r}."
            )
        if not (isinstance(value, str) and len(value) <= MAX_VALUE_CHARS):
            raise StorageError(
                f"Label {key} must be text of at most {MAX_VALUE_CHARS} characters, "
                f"got {value!r:.80}."
            )


def check_tags(new: Sequence[str]) -> None:
    """Refuse what is no tag.

    Raises:
        StorageError: a tag is empty or too long, or there are too many.
    """
    if len(new) > MAX_TAGS:
        raise StorageError(f"A run must have at most {MAX_TAGS} tags, got {len(new)}.")
    for tag in new:
        if not (isinstance(tag, str) and tag.strip() and len(tag) <= MAX_TAG_CHARS):
            raise StorageError(f"A tag must be 1 to {MAX_TAG_CHARS} characters, got {tag!r:.80}.")


def write_tags(connection: sa.Connection, run_id: str, new: Sequence[str]) -> None:
    """Replace a run's tags."""
    connection.execute(tags.delete().where(tags.c.run_id == run_id))
    if new:
        connection.execute(
            tags.insert(), [{"run_id": run_id, "tag": t} for t in dict.fromkeys(new)]
        )


def write_labels(connection: sa.Connection, run_id: str, new: Mapping[str, str]) -> None:
    """Write a new run's labels."""
    if new:
        rows = [{"run_id": run_id, "key": key, "value": value} for key, value in new.items()]
        connection.execute(labels.insert(), rows)


def read_marks(connection: sa.Connection, run_ids: Sequence[str]) -> Mapping[str, Marks]:
    """The marks of each of these runs."""
    names: dict[str, list[str]] = defaultdict(list)
    pairs: dict[str, dict[str, str]] = defaultdict(dict)
    wanted = sa.select(tags).where(tags.c.run_id.in_(run_ids)).order_by(tags.c.tag)
    for row in connection.execute(wanted):
        names[row.run_id].append(row.tag)
    here = sa.select(labels).where(labels.c.run_id.in_(run_ids)).order_by(labels.c.key)
    for row in connection.execute(here):
        pairs[row.run_id][row.key] = row.value
    return {run_id: Marks(tuple(names[run_id]), pairs[run_id]) for run_id in run_ids}
