"""Runs know their experiment, and plain decoding has one name."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

runs = sa.table(
    "runs",
    *map(sa.column, ("id", "benchmark_id", "experiment", "decoding_type", "method_title")),
)
labels = sa.table("labels", *map(sa.column, ("run_id", "key", "value")))
titles = sa.table("titles", *map(sa.column, ("title", "folded")))
PLAIN = "Plain decoding"


def upgrade() -> None:
    """Fill the new column from what the runs carry; statements are one per experiment."""
    with op.batch_alter_table("runs") as batch:
        batch.add_column(sa.Column("experiment", sa.String(600)))
    columns = ["experiment", "created_at", "id", "deleted_at"]
    op.create_index("ix_runs_experiment_created_at_id_deleted_at", "runs", columns)
    connection = op.get_bind()
    ids = sa.select(runs.c.benchmark_id).where(runs.c.benchmark_id.is_not(None)).distinct()
    for benchmark in connection.execute(ids).scalars().all():
        whole, dash, _ = benchmark.partition("-")
        _write(connection, runs.c.benchmark_id == benchmark, dash and "sweep" or "benchmark", whole)
    of_compare = sa.select(labels.c.value).where(labels.c.key == "compare").distinct()
    for compare in connection.execute(of_compare).scalars().all():
        its = sa.select(labels.c.run_id).where(labels.c.key == "compare", labels.c.value == compare)
        _write(connection, runs.c.id.in_(its), "compare", compare)
    plain = runs.update().where(runs.c.decoding_type == "Autoregressive")
    connection.execute(plain.values(method_title=PLAIN))
    if not connection.scalar(sa.select(sa.func.count()).where(titles.c.title == PLAIN)):
        connection.execute(titles.insert().values(title=PLAIN, folded=PLAIN.casefold()))


def _write(connection: sa.Connection, its: sa.ColumnElement[bool], kind: str, whole: str) -> None:
    unset = runs.c.experiment.is_(None)
    connection.execute(runs.update().where(its, unset).values(experiment=f"{kind}:{whole}"))
