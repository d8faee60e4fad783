"""Opens the database: engine, pragmas, migrations, one transaction scope."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from threading import Lock, RLock
from typing import Any

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy.pool import StaticPool

from storage.dialects import (
    MAX_READING_S,
    foreign_keys_off,
    in_memory,
    prepare,
    refuse_once_removed,
)
from storage.records import SchemaError, StorageError
from storage.schema import metadata

MIGRATIONS = Path(__file__).parent / "migrations"
_MIGRATING = Lock()
"""Alembic keeps its context in module globals: one migration at a time per process."""


class Database:
    """A migrated database and the one door to it."""

    def __init__(self, url: str | None) -> None:
        self.url = _url(url)
        self.engine = _engine(self.url)
        # The threads of an in-memory log share one connection, and so one transaction.
        self._turn = RLock() if in_memory(self.url) else nullcontext()
        with ExitStack() as undo:
            undo.callback(self.engine.dispose)
            self._migrate()
            undo.pop_all()

    @contextmanager
    def transaction(self, *, reading: bool = False) -> Iterator[sa.Connection]:
        """A connection that commits at the end, rolls back on errors and translates the driver's.

        Args:
            reading: promise not to write; readers do not queue for SQLite's write lock.

        Raises:
            StorageError: the database refused or is not readable.
        """
        with self._connection() as connection:
            connection.execution_options(reading=reading)
            with connection.begin():
                yield connection

    @contextmanager
    def _connection(self) -> Iterator[sa.Connection]:
        try:
            with self._turn, self.engine.connect() as connection:
                yield connection
        except (sa.exc.DBAPIError, sa.exc.TimeoutError) as error:
            raise StorageError(self._sentence(error)) from error
        except UnicodeEncodeError as error:
            raise StorageError("A name must be text, got half a surrogate pair.") from error

    def _migrate(self) -> None:
        config = Config()
        config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
        scripts = ScriptDirectory.from_config(config).walk_revisions()
        known = sorted(script.revision for script in scripts)
        with _MIGRATING, self._connection() as connection:
            with foreign_keys_off(connection), connection.begin():
                config.attributes["connection"] = connection
                if self._is_new(connection, known):
                    metadata.create_all(connection)
                    command.stamp(config, "head")
                else:
                    command.upgrade(config, "head")

    def _is_new(self, connection: sa.Connection, known: list[str]) -> bool:
        """Whether the database is empty.

        Raises:
            SchemaError: it is no run log, or its schema is newer than this program or unreleased.
        """
        where = self.url.render_as_string()
        current = MigrationContext.configure(connection).get_current_revision()
        if current is None and sa.inspect(connection).get_table_names():
            raise SchemaError(
                f"{where} holds tables of another program. "
                "Give the run log a database of its own with --db."
            )
        if current is not None and current not in known:
            age, remedy = "a newer", "Update the program, or"
            if current < known[0]:
                age, remedy = "an unreleased", "Move it away, or"
            raise SchemaError(
                f"The run log {where} was written by {age} version (schema {current}). "
                f"{remedy} give another --db."
            )
        return current is None

    def _sentence(self, error: sa.exc.SQLAlchemyError) -> str:
        reason = next(iter(str(getattr(error, "orig", None) or error).strip().splitlines()), "")
        where = self.url.render_as_string()
        if reason == "interrupted":
            return f"The run log {where} did not answer within {MAX_READING_S:g} s. Ask for less."
        return (
            f"The run log {where} cannot be used: {reason}. Check the file, or give another --db."
        )

    def close(self) -> None:
        self.engine.dispose()


def _url(url: str | None) -> sa.URL:
    """The database's URL; a plain path is a SQLite file, None is in memory."""
    if url is None:
        return sa.URL.create("sqlite")
    if "://" in url:
        try:
            return sa.make_url(url)
        except sa.exc.ArgumentError as error:
            raise StorageError(f"{url!r} is no database URL, such as sqlite:///runs.db.") from error
    return sa.URL.create("sqlite", database=str(Path(url).expanduser().absolute()))


def _engine(url: sa.URL) -> sa.Engine:
    options: dict[str, Any] = {}
    if in_memory(url):
        options = {"poolclass": StaticPool, "connect_args": {"check_same_thread": False}}
    try:
        engine = sa.create_engine(url, **options)
    except (sa.exc.ArgumentError, ImportError) as error:
        raise StorageError(f"No driver for {url.drivername}: {error}.") from error
    is_file = url.get_backend_name() == "sqlite" and not in_memory(url)
    if is_file and "uri" not in url.query:  # else the name is no path
        file = Path(str(url.database))
        try:
            _create_private(file)
            refuse_once_removed(engine, file)  # first, so that it is what is said
        except OSError as error:
            raise StorageError(f"{file} cannot be created: {error.strerror}.") from error
    prepare(engine)
    return engine


def _create_private(file: Path) -> None:
    """The log, and its folder, for nobody else to read; those that are there stay as they are."""
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with suppress(FileExistsError):
        os.close(os.open(file, os.O_CREAT | os.O_EXCL, 0o600))
