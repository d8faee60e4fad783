"""On PostgreSQL names have any length and the order that SQLite gives them."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

NAMES = {
    "runs": (
        *("target", "decoding_type", "method_title", "dtype", "device"),
        *("benchmark_id", "experiment", "finish_reason", "name"),
    ),
    "run_details": ("prompt_text", "first_text", "text", "error", "note"),
    "prompt_texts": ("folded",),
    "titles": ("title", "folded"),
    "remarks": ("folded",),
    "tags": ("tag",),
    "labels": ("key", "value"),
    "benchmarks": ("name",),
    "artifacts": ("kind",),
}


def upgrade() -> None:
    """SQLite enforces no length and has one order."""
    if op.get_bind().dialect.name != "postgresql":
        return
    for table, columns in NAMES.items():
        for column in columns:
            op.alter_column(table, column, type_=sa.Text(collation="C"))
