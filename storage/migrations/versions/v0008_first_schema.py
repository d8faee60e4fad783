"""The first schema. A new database is created as `storage.schema` has it and stamped."""

revision = "0008"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Nothing is older: logs of unreleased schemas are refused."""
