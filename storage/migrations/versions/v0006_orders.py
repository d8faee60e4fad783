"""Narrow indexes of the usual orders of the Runs page, and of what it filters by."""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

KEPT = (("setup_id",), ("prompt_id",))
INDEXES = {
    "created_at_order": ("created_at", "id"),
    **{f"{name}_order": (name, "id") for name in ("tok_s", "mat", "ttft_s")},
    "method_title_order": ("method_title", "created_at", "id"),
    "filtered": ("target", "method_title", "decoding_type", "status", "deleted_at"),
    "experiment_created_at_id": ("experiment", "created_at", "id"),
    "status": ("status",),
    "benchmark_id": ("benchmark_id",),
}


def upgrade() -> None:
    """For 200,000 runs 4 s on PostgreSQL and 16 s on SQLite, on a busy machine."""
    for index in sa.inspect(op.get_bind()).get_indexes("runs"):
        if tuple(index["column_names"]) not in KEPT:
            op.drop_index(str(index["name"]), "runs")
    for name, columns in INDEXES.items():
        op.create_index(f"ix_runs_{name}", "runs", list(columns))
    where = sa.text("deleted_at IS NOT NULL")
    wheres: dict[str, Any] = {f"{name}_where": where for name in ("sqlite", "postgresql")}
    op.create_index("ix_runs_deleted_at", "runs", ["deleted_at"], **wheres)
