"""Where sweeps are kept: in Optuna's own tables, beside the run log and never among its tables.

Optuna versions its tables in a table `alembic_version`, as the run log does, so the two cannot
share a name space:

| run log | sweeps |
|---|---|
| SQLite file `runs.sqlite3` | SQLite file `runs.sweeps.sqlite3` beside it |
| PostgreSQL | same database, schema `sweeps` |
| in memory | in memory |
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from filelock import FileLock
from optuna.storages import BaseStorage, InMemoryStorage, RDBStorage

from storage import StorageError

SCHEMA = "sweeps"
BUSY_TIMEOUT_S = 15


def open_place(log_url: sa.URL) -> BaseStorage:
    """Optuna's storage for the sweeps of a run log; made if it is not there.

    Raises:
        StorageError: the database refused, or sweeps cannot be kept in one of its kind.
    """
    logging.getLogger("optuna").setLevel(logging.WARNING)
    backend = log_url.get_backend_name()
    if backend == "sqlite" and log_url.database in (None, "", ":memory:"):
        return InMemoryStorage()
    try:
        if backend == "sqlite":
            return _sqlite(Path(str(log_url.database)))
        if backend == "postgresql":
            return _postgresql(log_url)
    except (sa.exc.SQLAlchemyError, RuntimeError, OSError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        where = log_url.render_as_string()
        raise StorageError(f"The sweeps beside {where} cannot be used: {reason}") from error
    raise StorageError(
        f"Sweeps are kept in SQLite or PostgreSQL, not in {backend}. Give another --db."
    )


def close_place(storage: BaseStorage) -> None:
    """Give the connections back."""
    storage.remove_session()
    if isinstance(storage, RDBStorage):
        storage.engine.dispose()


def sqlite_file(log_file: Path) -> Path:
    """`runs.sqlite3` → `runs.sweeps.sqlite3`."""
    return log_file.with_name(f"{log_file.stem}.sweeps{log_file.suffix or '.sqlite3'}")


def _sqlite(log_file: Path) -> RDBStorage:
    file = sqlite_file(log_file)
    url = sa.URL.create("sqlite", database=str(file))
    # Optuna looks for its tables and then makes them: two that open a new file at once both try.
    with FileLock(f"{file}.lock", timeout=BUSY_TIMEOUT_S):
        storage = _storage(url, {"connect_args": {"timeout": BUSY_TIMEOUT_S}})
    storage.engine.dispose()  # the connections from now on are prepared
    sa.event.listen(storage.engine, "connect", _prepare_sqlite)
    return storage


def _prepare_sqlite(connection: Any, record: Any) -> None:
    """Write-ahead log, as for the run log: readers and the writer do not wait for each other."""
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=NORMAL")


def _postgresql(log_url: sa.URL) -> RDBStorage:
    engine = sa.create_engine(log_url)
    try:
        with engine.begin() as connection:
            connection.execute(sa.schema.CreateSchema(SCHEMA, if_not_exists=True))
    finally:
        engine.dispose()
    return _storage(log_url, {"connect_args": {"options": f"-csearch_path={SCHEMA}"}})


def _storage(url: sa.URL, options: dict[str, Any]) -> RDBStorage:
    # Optuna formats its URL, so braces in a path or password must be doubled.
    text = url.render_as_string(hide_password=False).replace("{", "{{").replace("}", "}}")
    return RDBStorage(text, engine_kwargs=options)
