"""An index for every order of the Runs page."""

from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

FIGURES = (
    *("num_prompt_tokens", "num_new_tokens", "num_steps", "itl_ms"),
    *("step_p50_ms", "step_p95_ms", "draft_acceptance"),
    *("draft_s", "verify_s", "accept_s", "other_s"),
)
NAMES = (
    *("benchmark_id", "target", "decoding_type", "status"),
    *("name", "dtype", "device", "finish_reason"),
)


def upgrade() -> None:
    for name in ("status", "benchmark_id"):
        op.drop_index(f"ix_runs_{name}", "runs")
    for name in FIGURES:
        op.create_index(f"ix_runs_{name}_order", "runs", [name, "id"])
    for name in NAMES:
        op.create_index(f"ix_runs_{name}_order", "runs", [name, "created_at", "id"])
