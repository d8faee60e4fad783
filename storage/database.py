"""Opens the database: engine, migrations, transactions, retries while a server is unreachable."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from itertools import count
from pathlib import Path
from threading import Lock, RLock
from typing import TypeVar

import sqlalchemy as sa

from storage.dialects import (
    MAX_READING_S,
    advisory_lock,
    disk_is_full,
    engine_options,
    free_space,
    in_memory,
    is_locked,
    is_lost,
    num_dangling,
    prepare,
    redacted,
    refuse_once_removed,
    timed_out,
)
from storage.records import BusyError, OutOfReachError, StorageError
from storage.schema import metadata

MIGRATIONS = Path(__file__).parent / "migrations"
POSTGRESQL = "postgresql+psycopg"
INSTALL = "Install it: pip install 'speculative-decoding-playground[postgres]'."
LAST_TO_MIGRATE = "a version of 27 November 2026"
"""The last one that reads logs of schemas before the first of `MIGRATIONS`."""
PATIENCE_S = 120.0
"""How long a write is retried while the server is unreachable."""
RETRY_S = 0.5
Result = TypeVar("Result")
_MIGRATING = Lock()
"""Alembic keeps its context in module globals: one migration at a time per process."""


class Database:
    """A migrated database; all access goes through its transactions."""

    def __init__(self, url: str | None) -> None:
        self.url = _url(url)
        self.engine = _engine(self.url)
        self._lost_at: float | None = None
        # The threads of an in-memory log share one connection, and thus one transaction.
        self._connection_lock = RLock() if in_memory(self.url) else nullcontext()
        with ExitStack() as undo:
            undo.callback(self.engine.dispose)
            self._migrate()
            undo.pop_all()

    @contextmanager
    def transaction(
        self, *, reading: bool = False, limited: bool = True, rebuilding: bool = False
    ) -> Iterator[sa.Connection]:
        """A connection that commits at the end, rolls back on errors and translates the driver's.

        Args:
            reading: read-only; readers do not wait for SQLite's write lock.
            limited: whether a read is given up after `MAX_READING_S`.
            rebuilding: in SQLite, to drop a table and rebuild it deletes no row of the tables that
                refer to it.

        Raises StorageError: the database refused the transaction, or cannot be read.
        """
        with self._connection() as connection:
            limited = reading and limited
            connection.execution_options(reading=reading, limited=limited, rebuilding=rebuilding)
            with connection.begin():
                yield connection

    @property
    def out_of_reach(self) -> bool:
        """Whether a write waits for an unreachable server."""
        return self._lost_at is not None

    def persist(
        self,
        write: Callable[[sa.Connection], object],
        written: Callable[[sa.Connection], bool] = lambda connection: False,
    ) -> None:
        """Write in one transaction; retried while the server is unreachable.

        Args:
            written: whether an earlier attempt was committed although its reply was lost; may be
                omitted for idempotent writes.

        Raises:
            OutOfReachError: the server did not come back in time. Until a write succeeds, further
                calls do not wait.
            StorageError: the database refused.
        """
        tries = count(1)

        def once() -> None:
            with self.transaction() as connection:
                if next(tries) == 1 or not written(connection):
                    write(connection)

        self.wait_for(once)

    def wait_for(self, work: Callable[[], Result]) -> Result:
        """Do idempotent work, and repeat it while the server is unreachable.

        Raises:
            OutOfReachError: the server did not come back in time. Until some work succeeds, further
                calls do not wait.
        """
        while True:
            try:
                result = work()
            except OutOfReachError:
                now = time.monotonic()
                lost_at = self._lost_at = self._lost_at or now  # shared by all threads
                if now - lost_at > PATIENCE_S:
                    raise
            else:
                self._lost_at = None
                return result
            time.sleep(RETRY_S)

    @contextmanager
    def _connection(self) -> Iterator[sa.Connection]:
        try:
            with self._connection_lock, self.engine.connect() as connection:
                yield connection
        except (sa.exc.DBAPIError, sa.exc.TimeoutError, sqlite3.Error) as error:
            raise self._error(error) from error
        except UnicodeEncodeError as error:
            raise StorageError("An id must be text, got half a surrogate pair.") from error

    def _migrate(self) -> None:
        """Create the tables, or bring those of an older version up to date."""
        if in_memory(self.url):
            with self.transaction() as connection:
                metadata.create_all(connection)
            return
        # Imported here: it takes 0.2 s, and a log in memory does not need it.
        from alembic import command
        from alembic.config import Config
        from alembic.runtime.migration import MigrationContext
        from alembic.script import ScriptDirectory

        config = Config()
        config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
        scripts = ScriptDirectory.from_config(config)
        revisions = {script.revision for script in scripts.walk_revisions()}
        head = scripts.get_current_head()
        with _MIGRATING, self.transaction(rebuilding=True) as connection:
            advisory_lock(connection, "migration")
            config.attributes["connection"] = connection
            current = MigrationContext.configure(connection).get_current_revision()
            if self._is_new(connection, current, revisions):
                metadata.create_all(connection)
                command.stamp(config, "head")
            elif current != head:
                num_before = num_dangling(connection)
                command.upgrade(config, "head")
                if num_dangling(connection) > num_before:
                    raise StorageError(
                        f"The run log {redacted(self.url)} was not changed: after its update to "
                        f"schema {head}, rows would refer to missing ones. Use the version that "
                        "wrote it, or give another --db."
                    )

    def _is_new(self, connection: sa.Connection, current: str | None, revisions: set[str]) -> bool:
        """Whether the database is empty.

        Args:
            current: the revision that it is stamped with.
            revisions: all that this version knows.

        Raises StorageError: it is no run log, or of an unknown schema.
        """
        where = redacted(self.url)
        if current is None and sa.inspect(connection).get_table_names():
            raise StorageError(
                f"{where} holds tables of another program. "
                "Give the run log a database of its own with --db."
            )
        if current is not None and current not in revisions:
            remedy = "Use that or a newer one"
            if current < min(revisions):
                remedy = f"Open it once with {LAST_TO_MIGRATE}, which updates it"
            raise StorageError(
                f"The run log {where} was written by another version (schema {current}). "
                f"{remedy}, or give another --db."
            )
        return current is None

    def _error(self, error: Exception) -> StorageError:
        reason = next(iter(str(getattr(error, "orig", None) or error).strip().splitlines()), "")
        where = f"The run log {redacted(self.url)}"
        if timed_out(error):
            return StorageError(f"{where} did not answer within {MAX_READING_S:g} s. Ask for less.")
        if is_lost(error):
            remedy = "Check that its server is running and accepts this machine."
            return OutOfReachError(f"{where} cannot be reached: {reason}. {remedy}")
        if is_locked(error):
            return BusyError(f"{where} is locked by another program. End it, or try again later.")
        if disk_is_full(error):
            return StorageError(
                f"{where} cannot be written: the disk is full, or fails. Make room, or give "
                "another --db."
            )
        what = "file" if self.url.get_backend_name() == "sqlite" else "server"
        return StorageError(
            f"{where} cannot be used: {reason}. Check the {what}, or give another --db."
        )

    def free_space(self) -> None:
        """Shrink a SQLite file by what was deleted; PostgreSQL's server does so by itself."""
        with self._connection() as connection:
            free_space(connection)

    def close(self) -> None:
        self.engine.dispose()


def _url(url: str | None) -> sa.URL:
    """The database's URL; a plain path is a SQLite file, None is in memory."""
    if url is None:
        return sa.URL.create("sqlite")
    if "://" not in url:
        return sa.URL.create("sqlite", database=str(Path(url).expanduser().absolute()))
    try:
        parsed = sa.make_url(url)
    except (sa.exc.ArgumentError, ValueError) as error:  # never printed: it may hold a password
        raise StorageError(
            "--db is not a database URL. Write one such as sqlite:///runs.db or "
            "postgresql+psycopg://user@host/runs."
        ) from error
    if parsed.drivername in ("postgres", "postgresql"):
        return parsed.set(drivername=POSTGRESQL)
    return parsed


def _engine(url: sa.URL) -> sa.Engine:
    try:
        engine = sa.create_engine(url, **engine_options(url))
    except (sa.exc.ArgumentError, ImportError) as error:
        remedy = f" {INSTALL}" if url.drivername == POSTGRESQL else ""
        raise StorageError(f"No driver for {url.drivername}: {error}.{remedy}") from error
    is_file = url.get_backend_name() == "sqlite" and not in_memory(url)
    if is_file and "uri" not in url.query:  # else the name is no path
        file = Path(str(url.database))
        try:
            _create_private(file)
            refuse_once_removed(engine, file)  # first, so that its message wins
        except OSError as error:
            raise StorageError(
                f"{file} cannot be created: {error.strerror}. Give another --db."
            ) from error
    prepare(engine)
    return engine


def _create_private(file: Path) -> None:
    """Create the log and its folder, readable by their owner only, unless they exist."""
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with suppress(FileExistsError):
        os.close(os.open(file, os.O_CREAT | os.O_EXCL, 0o600))
