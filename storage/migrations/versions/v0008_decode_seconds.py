"""Runs have the seconds that they decoded, so that several are added up before they are divided."""

from __future__ import annotations

import json
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

ROWS = 1000
runs = sa.table("runs", *map(sa.column, ("id", "num_new_tokens", "tok_s", "decode_s")))
details = sa.table("run_details", *map(sa.column, ("run_id", "metrics")))


def upgrade() -> None:
    """The seconds are among a run's figures; earlier versions kept only the rate made of them."""
    op.add_column("runs", sa.Column("decode_s", sa.Float))
    connection = op.get_bind()
    figures = sa.select(runs.c.id, runs.c.num_new_tokens, runs.c.tok_s, details.c.metrics)
    figures = figures.join_from(runs, details, details.c.run_id == runs.c.id)
    figures = figures.where(runs.c.tok_s > 0).order_by(runs.c.id).limit(ROWS)
    update = runs.update().where(runs.c.id == sa.bindparam("run"))
    last = ""
    while rows := connection.execute(figures.where(runs.c.id > last)).all():
        values = [{"run": row.id, "seconds": _decode_s(row)} for row in rows]
        connection.execute(update.values(decode_s=sa.bindparam("seconds")), values)
        last = rows[-1].id


def _decode_s(row: Any) -> float:
    try:
        seconds = json.loads(row.metrics or "{}").get("decode_s")
    except (ValueError, AttributeError):  # damaged: the page of that run says so
        seconds = None
    if isinstance(seconds, float):
        return seconds
    return float((row.num_new_tokens - 1) / row.tok_s)
