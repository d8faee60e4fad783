"""Tables of the run log. Changes go through a new file in `storage/migrations/versions`."""

from __future__ import annotations

from sqlalchemy import (
    Boolean,
    Column,
    DateTime,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
)

from storage.columns import AnyText, Real

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
    }
)

ORDERS = ("created_at", "tok_s", "mat", "ttft_s", "num_steps")

runs = Table(  # narrow: what is filtered, sorted and grouped; the rest is in run_details
    "runs",
    metadata,
    Column("id", String(32), primary_key=True),
    Column("created_at", DateTime, nullable=False),  # UTC, naive: SQLite has no time zones
    Column("owner", String(255), nullable=False),  # process that writes it; see storage.owner
    Column("heartbeat_at", DateTime, nullable=False),
    Column("status", String(16), nullable=False),
    Column("target", String(255), nullable=False),
    Column("decoding_type", String(64), nullable=False),
    Column("method_title", String(255), nullable=False),
    Column("lossless", Boolean, nullable=False),
    Column("dtype", String(32), nullable=False),
    Column("device", String(64), nullable=False),
    Column("setup_id", String(32), nullable=False),  # see storage.identity
    Column("prompt_id", String(32), nullable=False),
    Column("benchmark_id", String(32)),  # no foreign key: a run may be imported without it
    Column("num_prompt_tokens", Integer, nullable=False),
    Column("num_new_tokens", Integer, nullable=False),
    Column("num_steps", Integer, nullable=False),
    Column("num_accepted", Integer, nullable=False),
    Column("mat", Real),
    Column("tok_s", Real),
    Column("ttft_s", Real),
    Column("itl_ms", Real),
    Column("step_p50_ms", Real),
    Column("step_p95_ms", Real),
    Column("draft_acceptance", Real),
    Column("draft_s", Real),  # mean of a step, as the three below
    Column("verify_s", Real),
    Column("accept_s", Real),
    Column("other_s", Real),
    Column("finish_reason", String(32)),
    Column("name", String(255), nullable=False),
    Column("deleted_at", DateTime),
    # A page in these orders is read from the index alone, however deep it lies.
    *(Index(None, name, "id", "deleted_at") for name in ORDERS),
    Index(None, "status", "created_at"),
    Index(None, "target", "created_at"),
    Index(None, "decoding_type", "created_at"),
    Index(None, "method_title", "created_at"),
    Index(None, "benchmark_id", "created_at"),
    Index(None, "setup_id"),
    Index(None, "prompt_id"),
)

run_details = Table(
    "run_details",
    metadata,
    Column("run_id", ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True),
    Column("method", Text, nullable=False),  # JSON, as all Text columns of mappings and lists
    Column("sampling", Text, nullable=False),
    Column("limits", Text, nullable=False),
    Column("environment", Text, nullable=False),
    Column("prompt_ids", Text, nullable=False),
    Column("prompt_text", AnyText, nullable=False),
    Column("messages", Text, nullable=False),
    Column("first_token_id", Integer),
    Column("first_text", AnyText, nullable=False),
    Column("output_ids", Text),
    Column("text", AnyText),
    Column("metrics", Text),
    Column("error", AnyText),
    Column("note", AnyText, nullable=False),
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
    Column("title", String(255), primary_key=True),
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
    Column("payload", LargeBinary, nullable=False),  # see storage.codec
    sqlite_with_rowid=False,
)

tags = Table(
    "tags",
    metadata,
    Column("run_id", ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True),
    Column("tag", String(128), primary_key=True),
    Index(None, "tag", "run_id"),
    sqlite_with_rowid=False,
)

labels = Table(
    "labels",
    metadata,
    Column("run_id", ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True),
    Column("key", String(64), primary_key=True),
    Column("value", AnyText, nullable=False),
    Index(None, "key", "value", "run_id"),
    sqlite_with_rowid=False,
)

benchmarks = Table(
    "benchmarks",
    metadata,
    Column("id", String(32), primary_key=True),
    Column("created_at", DateTime, nullable=False),
    Column("finished_at", DateTime),
    Column("owner", String(255), nullable=False),
    Column("heartbeat_at", DateTime, nullable=False),
    Column("status", String(16), nullable=False),
    Column("name", AnyText, nullable=False),
    Column("plan", Text, nullable=False),
    Column("summary", Text, nullable=False),
    Index(None, "created_at"),
)

artifacts = Table(
    "artifacts",
    metadata,
    Column("id", String(32), primary_key=True),
    Column("kind", String(64), nullable=False),
    Column("key_digest", String(64), nullable=False),  # of key, which may be long
    Column("key", Text, nullable=False),
    Column("meta", Text, nullable=False),
    Column("run_id", ForeignKey("runs.id", ondelete="CASCADE")),
    Column("benchmark_id", ForeignKey("benchmarks.id", ondelete="CASCADE")),
    Column("created_at", DateTime, nullable=False),
    Column("payload", LargeBinary, nullable=False),
    Index(None, "kind", "key_digest"),
    Index(None, "run_id"),
    Index(None, "benchmark_id"),
)
