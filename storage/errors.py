"""What can go wrong with the run log.

StorageError
├── SchemaError            the database was written by a newer program, or is no run log
├── UnknownRunError        no run has this id
├── UnknownBenchmarkError  no benchmark has this id
└── UnknownArtifactError   no artifact has this id
"""


class StorageError(Exception):
    """The run log cannot be read or written; the message says why and what to do."""


class SchemaError(StorageError):
    """The database was written by a newer program, or is no run log."""


class UnknownRunError(StorageError):
    """No run has this id."""


class UnknownBenchmarkError(StorageError):
    """No benchmark has this id."""


class UnknownArtifactError(StorageError):
    """No artifact has this id."""
