"""Narrow runs: what is sorted and filtered apart from the texts; prompts folded for search.

Revision: 0003, after 0002
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

from storage import codec
from storage.columns import AnyText, Real
from storage.identity import fold, prompt_id, setup_id

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

DETAILS = (
    "method sampling limits environment prompt_ids prompt_text messages first_token_id first_text "
    "output_ids text metrics error note"
).split()
FIGURES = ("itl_ms", "step_p50_ms", "step_p95_ms", "draft_acceptance")
SPLIT = ("draft_s", "verify_s", "accept_s", "other_s")
BATCH = 500
TEXTS = (
    "id target method_title name dtype device method sampling limits prompt_ids messages metrics"
).split()
OLD = sa.table(
    "runs",
    *(sa.column(name, sa.Text) for name in (*TEXTS, "setup_id", "prompt_id")),
    *(sa.column(name, AnyText) for name in ("prompt_text", "note")),
    *(sa.column(name, Real) for name in (*FIGURES, *SPLIT)),
)
PROMPT_TEXTS = sa.table("prompt_texts", sa.column("prompt_id"), sa.column("folded", AnyText))
TITLES = sa.table("titles", sa.column("title"), sa.column("folded", AnyText))
REMARKS = sa.table("remarks", sa.column("run_id"), sa.column("folded", AnyText))


def upgrade() -> None:
    _create_tables()
    for name in ("setup_id", "prompt_id"):
        op.add_column("runs", sa.Column(name, sa.String(length=32), nullable=True))
    for name in (*FIGURES, *SPLIT):
        op.add_column("runs", sa.Column(name, sa.Float(), nullable=True))
    columns = ", ".join(f'"{name}"' for name in DETAILS)
    op.execute(f"INSERT INTO run_details (run_id, {columns}) SELECT id, {columns} FROM runs")
    _fill(op.get_bind())
    with op.batch_alter_table("runs", schema=None) as batch_op:
        for name in ("created_at", "mat", "tok_s", "ttft_s"):
            batch_op.drop_index(batch_op.f(f"ix_runs_{name}"))
        for name in DETAILS:
            batch_op.drop_column(name)
        for name in ("setup_id", "prompt_id"):
            batch_op.alter_column(name, existing_type=sa.String(length=32), nullable=False)
    for name in ("created_at", "tok_s", "mat", "ttft_s", "num_steps"):
        op.create_index(f"ix_runs_{name}_id_deleted_at", "runs", [name, "id", "deleted_at"])
    op.create_index("ix_runs_method_title_created_at", "runs", ["method_title", "created_at"])
    for name in ("setup_id", "prompt_id"):
        op.create_index(f"ix_runs_{name}", "runs", [name])


def _create_tables() -> None:
    op.create_table(
        "run_details",
        sa.Column("run_id", sa.String(length=32), nullable=False),
        sa.Column("method", sa.Text(), nullable=False),
        sa.Column("sampling", sa.Text(), nullable=False),
        sa.Column("limits", sa.Text(), nullable=False),
        sa.Column("environment", sa.Text(), nullable=False),
        sa.Column("prompt_ids", sa.Text(), nullable=False),
        sa.Column("prompt_text", sa.Text(), nullable=False),
        sa.Column("messages", sa.Text(), nullable=False),
        sa.Column("first_token_id", sa.Integer(), nullable=True),
        sa.Column("first_text", sa.Text(), nullable=False),
        sa.Column("output_ids", sa.Text(), nullable=True),
        sa.Column("text", sa.Text(), nullable=True),
        sa.Column("metrics", sa.Text(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("note", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["run_id"], ["runs.id"], name=op.f("fk_run_details_run_id_runs"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("run_id", name=op.f("pk_run_details")),
    )
    op.create_table(
        "prompt_texts",
        sa.Column("prompt_id", sa.String(length=32), nullable=False),
        sa.Column("folded", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("prompt_id", name=op.f("pk_prompt_texts")),
    )
    op.create_table(
        "titles",
        sa.Column("title", sa.String(length=255), nullable=False),
        sa.Column("folded", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("title", name=op.f("pk_titles")),
    )
    op.create_table(
        "remarks",
        sa.Column("run_id", sa.String(length=32), nullable=False),
        sa.Column("folded", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["run_id"], ["runs.id"], name=op.f("fk_remarks_run_id_runs"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("run_id", name=op.f("pk_remarks")),
    )


def _fill(connection: sa.Connection) -> None:
    """Ids, figures and search texts of the runs that are there; a bounded number at a time."""
    for column in (OLD.c.target, OLD.c.method_title):
        for title in connection.execute(sa.select(column).distinct()).scalars().all():
            _add_title(connection, title)
    wanted = sa.select(OLD).order_by(OLD.c.id).limit(BATCH)
    seen: set[str] = set()
    after = ""
    while rows := connection.execute(wanted.where(OLD.c.id > after)).all():
        for row in rows:
            values = _identity(row) | _figures(row)
            connection.execute(OLD.update().where(OLD.c.id == row.id).values(values))
            if values["prompt_id"] not in seen:
                seen.add(values["prompt_id"])
                text = {"prompt_id": values["prompt_id"], "folded": fold(row.prompt_text)}
                connection.execute(PROMPT_TEXTS.insert().values(text))
            if row.name or row.note:
                remark = {"run_id": row.id, "folded": fold(f"{row.name}\n{row.note}")}
                connection.execute(REMARKS.insert().values(remark))
        after = rows[-1].id


def _add_title(connection: sa.Connection, title: str) -> None:
    here = sa.select(TITLES.c.title).where(TITLES.c.title == title)
    if connection.execute(here).first() is None:
        connection.execute(TITLES.insert().values(title=title, folded=fold(title)))


def _identity(row: sa.Row[Any]) -> dict[str, Any]:
    plain = {name: codec.load(getattr(row, name)) for name in ("method", "sampling", "limits")}
    return {
        "setup_id": setup_id(target=row.target, dtype=row.dtype, device=row.device, **plain),
        "prompt_id": prompt_id(
            row.prompt_text, codec.load(row.messages), codec.load(row.prompt_ids)
        ),
    }


def _figures(row: sa.Row[Any]) -> dict[str, Any]:
    metrics = codec.load(row.metrics) if row.metrics else {}
    split = metrics.get("time_split") or {}
    return {name: metrics.get(name) for name in FIGURES} | {name: split.get(name) for name in SPLIT}
