"""A run names the request that it answers in columns, an experiment its kind."""

from collections import defaultdict
from typing import Any

import sqlalchemy as sa
from alembic import op

from storage.dialects import AnyText, Name
from storage.records import labelled_key

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

BATCH = 5000
TEXTS = ("trial", "suite", "prompt", "configuration", "worker")
BENCHMARKS = sa.table("benchmarks", sa.column("kind"), sa.column("plan", sa.Text))
LABELS = sa.table(
    "labels", sa.column("run_id"), sa.column("key", Name(64)), sa.column("value", AnyText)
)


def upgrade() -> None:
    """Fill the columns from labels and from ids like `SWEEP-TRIAL`, and drop those of the ids."""
    columns: list[sa.Column[Any]] = [
        sa.Column("experiment_id", Name(600)),
        sa.Column("kind", Name(16)),
        *(sa.Column(name, AnyText, nullable=False, server_default="") for name in TEXTS),
        *(sa.Column(n, sa.Integer, nullable=False, server_default="0") for n in ("turn", "repeat")),
    ]
    for column in columns:
        op.add_column("runs", column)
    _fill_runs()
    with op.batch_alter_table("runs") as runs:
        runs.drop_index("ix_runs_experiment_created_at_id")
        runs.drop_index("ix_runs_benchmark_id_order")
        runs.drop_column("experiment")
        runs.drop_column("benchmark_id")
        runs.create_index("ix_runs_experiment_id_order", ["experiment_id", "created_at", "id"])
    kind: sa.Column[str] = sa.Column("kind", Name(16), nullable=False, server_default="benchmark")
    op.add_column("benchmarks", kind)
    for name in ("compare", "fastest", "sweep"):
        its = BENCHMARKS.c.plan.startswith(f'{{"kind":"{name}"')  # a plan begins with it
        op.execute(BENCHMARKS.update().where(its).values(kind=name))


def _fill_runs() -> None:
    """Write the request of every run of an experiment, a batch of runs at a time."""
    types = {
        "experiment_id": Name(600),
        "benchmark_id": Name(32),
        **dict.fromkeys(TEXTS, AnyText()),
    }
    names = ("id", "benchmark_id", "experiment_id", "kind", *TEXTS, "turn", "repeat")
    runs = sa.table("runs", *(sa.column(name, types.get(name)) for name in names))
    page = sa.select(runs.c.id, runs.c.benchmark_id).order_by(runs.c.id).limit(BATCH)
    values: dict[str, Any] = {name: sa.bindparam(f"new_{name}") for name in names[2:]}
    fill = runs.update().where(runs.c.id == sa.bindparam("run_id")).values(values)
    connection, last = op.get_bind(), ""
    while rows := connection.execute(page.where(runs.c.id > last)).all():
        last = rows[-1].id
        labels: dict[str, dict[str, str]] = defaultdict(dict)
        its = LABELS.c.run_id.between(rows[0].id, last)
        for run_id, key, value in connection.execute(sa.select(LABELS).where(its)):
            labels[run_id][key] = value
        keys = {row.id: labelled_key(row.benchmark_id, labels[row.id]) for row in rows}
        filled = [
            {"run_id": run_id, **{f"new_{name}": getattr(key, name) for name in values}}
            for run_id, key in keys.items()
            if key.experiment_id
        ]
        if filled:
            connection.execute(fill, filled)
