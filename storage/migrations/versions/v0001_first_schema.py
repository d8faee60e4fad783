"""The first schema: runs, their steps, their tags.

Revision: 0001, after
"""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "runs",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("created_at", sa.DateTime(), nullable=False),
        sa.Column("owner", sa.String(length=255), nullable=False),
        sa.Column("heartbeat_at", sa.DateTime(), nullable=False),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("target", sa.String(length=255), nullable=False),
        sa.Column("decoding_type", sa.String(length=64), nullable=False),
        sa.Column("method_title", sa.String(length=255), nullable=False),
        sa.Column("lossless", sa.Boolean(), nullable=False),
        sa.Column("dtype", sa.String(length=32), nullable=False),
        sa.Column("device", sa.String(length=64), nullable=False),
        sa.Column("method", sa.Text(), nullable=False),
        sa.Column("sampling", sa.Text(), nullable=False),
        sa.Column("limits", sa.Text(), nullable=False),
        sa.Column("environment", sa.Text(), nullable=False),
        sa.Column("prompt_ids", sa.Text(), nullable=False),
        sa.Column("prompt_text", sa.Text(), nullable=False),
        sa.Column("messages", sa.Text(), nullable=False),
        sa.Column("first_token_id", sa.Integer(), nullable=True),
        sa.Column("first_text", sa.Text(), nullable=False),
        sa.Column("num_prompt_tokens", sa.Integer(), nullable=False),
        sa.Column("num_new_tokens", sa.Integer(), nullable=False),
        sa.Column("num_steps", sa.Integer(), nullable=False),
        sa.Column("num_accepted", sa.Integer(), nullable=False),
        sa.Column("mat", sa.Float(), nullable=True),
        sa.Column("tok_s", sa.Float(), nullable=True),
        sa.Column("ttft_s", sa.Float(), nullable=True),
        sa.Column("finish_reason", sa.String(length=32), nullable=True),
        sa.Column("output_ids", sa.Text(), nullable=True),
        sa.Column("text", sa.Text(), nullable=True),
        sa.Column("metrics", sa.Text(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("name", sa.String(length=255), nullable=False),
        sa.Column("note", sa.Text(), nullable=False),
        sa.Column("deleted_at", sa.DateTime(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_runs")),
    )
    with op.batch_alter_table("runs", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_runs_created_at"), ["created_at"], unique=False)
        batch_op.create_index(
            batch_op.f("ix_runs_decoding_type_created_at"),
            ["decoding_type", "created_at"],
            unique=False,
        )
        batch_op.create_index(batch_op.f("ix_runs_mat"), ["mat"], unique=False)
        batch_op.create_index(
            batch_op.f("ix_runs_status_created_at"), ["status", "created_at"], unique=False
        )
        batch_op.create_index(
            batch_op.f("ix_runs_target_created_at"), ["target", "created_at"], unique=False
        )
        batch_op.create_index(batch_op.f("ix_runs_tok_s"), ["tok_s"], unique=False)
        batch_op.create_index(batch_op.f("ix_runs_ttft_s"), ["ttft_s"], unique=False)

    op.create_table(
        "steps",
        sa.Column("run_id", sa.String(length=32), nullable=False),
        sa.Column("index", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("payload", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(
            ["run_id"], ["runs.id"], name=op.f("fk_steps_run_id_runs"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("run_id", "index", name=op.f("pk_steps")),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "tags",
        sa.Column("run_id", sa.String(length=32), nullable=False),
        sa.Column("tag", sa.String(length=128), nullable=False),
        sa.ForeignKeyConstraint(
            ["run_id"], ["runs.id"], name=op.f("fk_tags_run_id_runs"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("run_id", "tag", name=op.f("pk_tags")),
        sqlite_with_rowid=False,
    )
    with op.batch_alter_table("tags", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_tags_tag_run_id"), ["tag", "run_id"], unique=False)
