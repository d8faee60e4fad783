"""The first released schema. A new database is created as `storage.schema` has it and stamped."""

revision = "0003"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Nothing is older: databases of earlier, unreleased schemas are refused."""
