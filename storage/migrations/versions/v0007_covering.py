"""The index of every order holds what is filtered by most."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

FIGURES = (
    *("num_prompt_tokens", "num_new_tokens", "num_steps", "mat", "tok_s", "ttft_s", "itl_ms"),
    *("step_p50_ms", "step_p95_ms", "draft_acceptance"),
    *("draft_s", "verify_s", "accept_s", "other_s"),
)
NAMES = (
    *("benchmark_id", "target", "method_title", "decoding_type", "status"),
    *("name", "dtype", "device", "finish_reason"),
)
ORDERS = {
    "created_at": ("created_at", "id"),
    **{name: (name, "id") for name in FIGURES},
    **{name: (name, "created_at", "id") for name in NAMES},
}
COVERED = ("deleted_at", "experiment", "target", "method_title", "decoding_type", "status")
KEPT = "ix_runs_experiment_created_at_id_deleted_at_status"


def upgrade() -> None:
    """About four minutes for a million runs, on a busy machine."""
    for index in sa.inspect(op.get_bind()).get_indexes("runs"):
        if len(index["column_names"]) > 2 and index["name"] != KEPT:
            op.drop_index(str(index["name"]), "runs")
    for name, by in ORDERS.items():
        op.create_index(f"ix_runs_{name}_order", "runs", list(dict.fromkeys((*by, *COVERED))))
