"""Tables of the run log, and the types of their values: JSON, steps, ids, search texts.

A change of a table needs a migration in `storage/migrations/versions`.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import unicodedata
import zlib
from dataclasses import fields
from datetime import UTC, datetime
from typing import Any, get_args

import sqlalchemy as sa
from sqlalchemy import Boolean, Column, DateTime, ForeignKey, Index, Integer, String, Table

from storage.dialects import AnyText, Name, Real, readable
from storage.records import Figure, NameKey, StepRow, StorageError

FIGURES = get_args(Figure)
_STEP_FIELDS = tuple(field.name for field in fields(StepRow))
DAMAGED = "A value in the run log is damaged. Take the log from a copy, or delete this run."
ORDERS = {
    "created_at": ("created_at", "id"),
    **{name: (name, "id") for name in FIGURES},
    **{name: (name, "created_at", "id") for name in get_args(NameKey)},
}
"""The columns of each order of runs, and of its index; the id breaks ties, so that no run is on two
pages."""


def dump(value: Any, *, sort_keys: bool = False) -> str:
    """JSON text of plain values, including NaN and infinities; accepts any Mapping.

    With sorted keys, equal values give equal texts.
    """
    return json.dumps(value, separators=(",", ":"), sort_keys=sort_keys, default=dict)


def digest(value: Any) -> str:
    """SHA-256 of plain values, equal for equal ones; 64 hexadecimal digits."""
    return hashlib.sha256(dump(value, sort_keys=True).encode()).hexdigest()


def fold(text: str) -> str:
    """Text as it is searched: `fold(a) in fold(b)` ignores case in any script."""
    return unicodedata.normalize("NFC", text).casefold()


class Json(sa.types.TypeDecorator[Any]):
    """Plain values as JSON text; a list comes back as a tuple."""

    impl = sa.Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: sa.Dialect) -> str | None:
        return None if value is None else dump(value)

    def process_result_value(self, value: Any, dialect: sa.Dialect) -> Any:
        parsed = None if value is None else _parsed(value)
        return tuple(parsed) if isinstance(parsed, list) else parsed


class CompressedStep(sa.types.TypeDecorator[StepRow]):
    """A step as compressed JSON: a 64-node tree takes one or two kilobytes.

    Fields that are newer than the stored step have their defaults.
    """

    impl = sa.LargeBinary
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: sa.Dialect) -> bytes:
        values = {name: getattr(value, name) for name in _STEP_FIELDS}  # asdict copies deeply
        return zlib.compress(dump(values).encode(), 1)

    def process_result_value(self, value: Any, dialect: sa.Dialect) -> StepRow:
        try:
            values: dict[str, Any] = _parsed(zlib.decompress(value).decode())
            for name, one in values.items():
                values[name] = tuple(one) if isinstance(one, list) else one
            return StepRow(**values)
        except (zlib.error, UnicodeDecodeError, AttributeError, TypeError) as error:
            raise StorageError(DAMAGED) from error


def _parsed(text: str) -> Any:
    try:
        return json.loads(readable(text))
    except (ValueError, TypeError, RecursionError) as error:
        raise StorageError(DAMAGED) from error


class Utc(sa.types.TypeDecorator[datetime]):
    """An aware time, stored in UTC without its zone, which SQLite lacks."""

    impl = DateTime
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: sa.Dialect) -> datetime | None:
        if value is None or value.tzinfo is None:
            return value
        return value.astimezone(UTC).replace(tzinfo=None)

    def process_result_value(self, value: Any, dialect: sa.Dialect) -> datetime | None:
        return None if value is None else value.replace(tzinfo=UTC)


def new_id() -> str:
    return secrets.token_hex(8)


def now() -> datetime:
    """The time as stored: UTC, naive."""
    return datetime.now(UTC).replace(tzinfo=None)


metadata = sa.MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
    }
)

runs = Table(  # narrow: columns that are filtered, sorted or grouped by
    "runs",
    metadata,
    Column("id", String(32), primary_key=True),
    Column("created_at", Utc, nullable=False, default=now),
    Column("owner", String(255), nullable=False),  # process that writes it; see storage.owner
    Column("heartbeat_at", DateTime, nullable=False, default=now),
    Column("status", String(16), nullable=False, default="running"),
    Column("target", Name(255), nullable=False),
    Column("decoding_type", Name(64), nullable=False),
    Column("method_title", Name(255), nullable=False),
    Column("lossless", Boolean, nullable=False),
    Column("dtype", Name(32), nullable=False),
    Column("device", Name(64), nullable=False),
    Column("setup_id", String(32), nullable=False),
    Column("prompt_id", String(32), nullable=False),
    Column("experiment_id", Name(600)),  # no foreign key: a run may be imported without it
    Column("kind", Name(16)),
    *(
        Column(name, AnyText, nullable=False, server_default="")
        for name in ("trial", "suite", "prompt", "configuration", "worker")
    ),
    Column("turn", Integer, nullable=False, server_default="0"),
    Column("repeat", Integer, nullable=False, server_default="0"),
    Column("num_prompt_tokens", Integer, nullable=False),
    Column("num_new_tokens", Integer, nullable=False, default=0),
    Column("num_steps", Integer, nullable=False, default=0),
    Column("num_accepted", Integer, nullable=False, default=0),
    Column("decode_s", Real),  # first commit → last commit; what several runs' tok/s divides by
    *(Column(name, Real) for name in FIGURES if not name.startswith("num_")),
    Column("finish_reason", Name(32)),
    Column("name", Name(255), nullable=False, default=""),
    Column("deleted_at", DateTime),
    *(Index(f"ix_runs_{name}_order", *columns) for name, columns in ORDERS.items()),
    Index("ix_runs_filtered", "target", "method_title", "decoding_type", "status", "deleted_at"),
    Index(
        "ix_runs_deleted_at",
        "deleted_at",
        sqlite_where=sa.text("deleted_at IS NOT NULL"),
        postgresql_where=sa.text("deleted_at IS NOT NULL"),
    ),
    Index(None, "setup_id"),
    Index(None, "prompt_id"),
)

run_details = Table(
    "run_details",
    metadata,
    Column("run_id", ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True),
    Column("method", Json, nullable=False),
    Column("sampling", Json, nullable=False),
    Column("limits", Json, nullable=False),
    Column("environment", Json, nullable=False),
    Column("prompt_ids", Json, nullable=False),
    Column("prompt_text", AnyText, nullable=False),
    Column("messages", Json, nullable=False),
    Column("first_token_id", Integer),
    Column("first_text", AnyText, nullable=False, default=""),
    Column("output_ids", Json),
    Column("text", AnyText),
    Column("metrics", Json),
    Column("error", AnyText),
    Column("note", AnyText, nullable=False, default=""),
)

prompt_texts = Table(  # each prompt once, folded for search: benchmarks repeat theirs
    "prompt_texts",
    metadata,
    Column("prompt_id", String(32), primary_key=True),
    Column("folded", AnyText, nullable=False),
)

titles = Table(  # names of targets and methods, folded for search
    "titles",
    metadata,
    Column("title", Name(255), primary_key=True),
    Column("folded", AnyText, nullable=False),
)

remarks = Table(  # names and notes, folded for search; only of runs that have any
    "remarks",
    metadata,
    Column("run_id", ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True),
    Column("folded", AnyText, nullable=False),
)

steps = Table(
    "steps",
    metadata,
    Column("run_id", ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True),
    Column("index", Integer, primary_key=True, autoincrement=False),
    Column("payload", CompressedStep, nullable=False),
    sqlite_with_rowid=False,
)

tags = Table(
    "tags",
    metadata,
    Column("run_id", ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True),
    Column("tag", Name(128), primary_key=True),
    Index(None, "tag", "run_id"),
    sqlite_with_rowid=False,
)

labels = Table(
    "labels",
    metadata,
    Column("run_id", ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True),
    Column("key", Name(64), primary_key=True),
    Column("value", AnyText, nullable=False),
    Index(None, "key", "value", "run_id"),
    sqlite_with_rowid=False,
)

benchmarks = Table(
    "benchmarks",
    metadata,
    Column("id", String(32), primary_key=True),
    Column("created_at", Utc, nullable=False, default=now),
    Column("finished_at", Utc),
    Column("owner", String(255), nullable=False),
    Column("heartbeat_at", DateTime, nullable=False, default=now),
    Column("status", String(16), nullable=False, default="running"),
    Column("kind", Name(16), nullable=False, server_default="benchmark"),
    Column("name", AnyText, nullable=False),
    Column("plan", Json, nullable=False),
    Column("summary", Json, nullable=False, default={}),
    Index(None, "created_at"),
)

artifacts = Table(
    "artifacts",
    metadata,
    Column("id", String(32), primary_key=True),
    Column("kind", Name(64), nullable=False),
    Column("key_digest", String(64), nullable=False),  # of key, which may be long
    Column("key", Json, nullable=False),
    Column("meta", Json, nullable=False),
    Column("run_id", ForeignKey("runs.id", ondelete="CASCADE")),  # unused
    Column("benchmark_id", ForeignKey("benchmarks.id", ondelete="CASCADE")),
    Column("created_at", Utc, nullable=False, default=now),
    Column("payload", sa.LargeBinary, nullable=False),
    Index(None, "kind", "key_digest"),
    Index(None, "run_id"),
    Index(None, "benchmark_id"),
)
