"""The run log: every run with its step records, in SQLite or any database SQLAlchemy knows."""

from storage.errors import (
    SchemaError,
    StorageError,
    UnknownArtifactError,
    UnknownBenchmarkError,
    UnknownRunError,
)
from storage.filters import Circumstance, Facets, RunGroup, RunPage, RunQuery, Spread
from storage.log import RunLog
from storage.records import (
    Arrival,
    Artifact,
    Benchmark,
    NewRun,
    RunDetail,
    RunSummary,
    StepRow,
    StoredRun,
)

__all__ = [
    "Arrival",
    "Artifact",
    "Benchmark",
    "Circumstance",
    "Facets",
    "NewRun",
    "RunDetail",
    "RunGroup",
    "RunLog",
    "RunPage",
    "RunQuery",
    "RunSummary",
    "SchemaError",
    "Spread",
    "StepRow",
    "StorageError",
    "StoredRun",
    "UnknownArtifactError",
    "UnknownBenchmarkError",
    "UnknownRunError",
]
