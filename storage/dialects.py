"""Differences between databases: unsupported texts and floats, settings, locks, errors."""

from __future__ import annotations

import math
import re
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.pool import StaticPool

from storage.records import StorageError

BUSY_TIMEOUT_MS = 15_000
MAX_READING_S = 10.0
"""For reads that search; those of whole runs by their ids take as long as the runs are."""
INSTRUCTIONS = 50_000
"""SQLite's virtual-machine instructions between two checks of the clock: about a millisecond."""
LOCKED = ("SQLITE_BUSY", "SQLITE_LOCKED", "55P03")
NO_ROOM = (
    *("SQLITE_FULL", "SQLITE_IOERR", "SQLITE_IOERR_WRITE", "SQLITE_IOERR_SHMSIZE"),
    "53100",
)
PAGES = 1000
"""Pages that are given back in one transaction."""
LOST_AFTER_S = 30
"""A server that does not answer for this long counts as lost."""
_ESCAPE = re.compile(r"\\u(?!d[89a-f])([0-9a-f]{4})")
_PAIR = r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_LONE = re.compile(rf"{_PAIR}|\\(u[dD][89a-fA-F][0-9a-fA-F]{{2}})|\\.")


def readable(json_text: str) -> str:
    """JSON without lone surrogates: each becomes its six-character escape.

    `"a\\ud800"` becomes `"a\\\\ud800"`.
    """
    if "\\u" not in json_text:
        return json_text
    return _LONE.sub(lambda match: f"\\\\{match[1]}" if match[1] else match[0], json_text)


class AnyText(sa.types.TypeDecorator[str]):
    """Text with NULs or lone surrogates in it; those are stored as \\u and four digits.

    A lone surrogate is read back as these six characters: no response or terminal can show it.
    PostgreSQL sorts the text as SQLite does, whatever the server's locale.
    """

    impl: Any = sa.Text
    cache_ok = True
    refused = re.compile("[\\x00\ud800-\udfff]|\\\\(?=u[0-9a-f]{4})")

    def load_dialect_impl(self, dialect: sa.Dialect) -> Any:
        return sa.Text(collation="C") if dialect.name == "postgresql" else self.impl_instance

    def process_bind_param(self, value: str | None, dialect: sa.Dialect) -> str | None:
        if value is None:
            return None
        return self.refused.sub(lambda match: f"\\u{ord(match[0]):04x}", value)

    def process_result_value(self, value: Any, dialect: sa.Dialect) -> str | None:
        return None if value is None else _ESCAPE.sub(lambda match: chr(int(match[1], 16)), value)


class Name(AnyText):
    """A short text that is filtered and sorted by."""

    impl = sa.String
    cache_ok = True


class Real(sa.Float[float]):
    """A float that may be NaN, which SQLite would store as NULL: there it is the text "nan"."""

    def bind_processor(self, dialect: sa.Dialect) -> Callable[[Any], Any] | None:
        if dialect.name != "sqlite":
            return None
        return lambda value: "nan" if isinstance(value, float) and math.isnan(value) else value

    def result_processor(self, dialect: sa.Dialect, coltype: Any) -> Callable[[Any], Any]:
        return lambda value: None if value is None else float(value)


def in_memory(url: sa.URL) -> bool:
    return url.get_backend_name() == "sqlite" and url.database in (None, "", ":memory:")


def redacted(url: sa.URL) -> str:
    """The URL without its passwords, for messages."""
    secret = [name for name in url.query if "password" in name]
    return url.difference_update_query(secret).render_as_string()


def engine_options(url: sa.URL) -> dict[str, Any]:
    """Options of `create_engine`; settings in the URL take precedence."""
    if in_memory(url):
        return {"poolclass": StaticPool, "connect_args": {"check_same_thread": False}}
    if url.get_backend_name() != "postgresql":
        return {}
    settings = {
        "connect_timeout": LOST_AFTER_S // 3,
        "keepalives_idle": LOST_AFTER_S // 3,
        "keepalives_interval": LOST_AFTER_S // 6,
        "keepalives_count": 4,
        "tcp_user_timeout": 1000 * LOST_AFTER_S,
        "application_name": "speculative-decoding-playground",
    }
    connect_args = {name: value for name, value in settings.items() if name not in url.query}
    return {"pool_pre_ping": True, "connect_args": connect_args}


def is_lost(error: Exception) -> bool:
    """Whether the server cannot be reached, rather than refused the statement."""
    if not isinstance(error, sa.exc.OperationalError):
        return isinstance(error, sa.exc.DBAPIError) and error.connection_invalidated
    # A server's refusals have an SQLSTATE code; SQLite's errors have no such attribute.
    code = getattr(error.orig, "sqlstate", "")
    return error.connection_invalidated or code is None or code.startswith(("08", "57P"))


def _code(error: Exception) -> str:
    """SQLite's name of an error, or the server's SQLSTATE."""
    orig = getattr(error, "orig", None) or error
    return getattr(orig, "sqlite_errorname", None) or getattr(orig, "sqlstate", None) or ""


def is_locked(error: Exception) -> bool:
    """Whether others kept the database, or all of this process's connections, for too long."""
    return _code(error).startswith(LOCKED) or isinstance(error, sa.exc.TimeoutError)


def timed_out(error: Exception) -> bool:
    """Whether a read exceeded its time limit."""
    return _code(error) in ("SQLITE_INTERRUPT", "57014")


def disk_is_full(error: Exception) -> bool:
    """Whether the disk or its quota is full; SQLite seldom tells that from a disk that fails."""
    return _code(error) in NO_ROOM


def prepare(engine: sa.Engine) -> None:
    """Set a database up: reads have a consistent snapshot and a time limit, writers queue.

    SQLite gets a write-ahead log, and transactions that wait for the write lock.
    """
    is_server = engine.dialect.name == "postgresql"
    sa.event.listen(engine, "connect", _prepare_postgresql if is_server else _prepare_sqlite)
    sa.event.listen(engine, "begin", _begin_postgresql if is_server else _begin_sqlite)


def advisory_lock(connection: sa.Connection, name: str) -> None:
    """Hold a lock until the transaction ends; on SQLite, its write lock suffices."""
    if connection.dialect.name == "postgresql":
        key = sa.func.hashtext(f"speculative-decoding-playground {name}")
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(key)))


def free_space(connection: sa.Connection) -> None:
    """Give the pages of deleted rows back to the disk, a few at a time, so that others can write.

    A file of an older version is first rewritten as a whole, while writers wait.
    """
    if connection.dialect.name == "postgresql":
        return
    connection.info["until"] = math.inf
    cursor = connection.connection.cursor()
    if cursor.execute("PRAGMA auto_vacuum").fetchone() != (2,):  # INCREMENTAL
        cursor.execute("VACUUM")
    while cursor.execute("PRAGMA freelist_count").fetchone() != (0,):
        cursor.execute(f"PRAGMA incremental_vacuum({PAGES})").fetchall()
    cursor.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def num_dangling(connection: sa.Connection) -> int:
    """Number of rows that refer to a missing one, which is possible only in SQLite."""
    if connection.dialect.name == "postgresql":
        return 0
    return len(connection.exec_driver_sql("PRAGMA foreign_key_check").all())


def _prepare_postgresql(connection: Any, record: Any) -> None:
    """No JIT, which takes longer than any of our queries, and a time limit on lock waits."""
    settings = {"jit": "off", "work_mem": "'32MB'", "lock_timeout": BUSY_TIMEOUT_MS}
    connection.execute("; ".join(f"SET {name} = {value}" for name, value in settings.items()))
    connection.commit()


def _begin_postgresql(connection: sa.Connection) -> None:
    """Readers see a consistent snapshot, as on SQLite."""
    options = connection.get_execution_options()
    if options.get("reading"):
        limit_ms = int(1000 * MAX_READING_S) if options.get("limited") else 0  # 0: none
        connection.exec_driver_sql(
            "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY; "
            f"SET LOCAL statement_timeout = {limit_ms}"
        )


def _prepare_sqlite(connection: Any, record: Any) -> None:
    """Use a write-ahead log, so that readers and the writer do not block each other."""
    connection.isolation_level = None  # the driver begins late, never before DDL; we begin
    cursor = connection.cursor()
    cursor.execute("PRAGMA auto_vacuum=INCREMENTAL")  # of a new file; see `free_space`
    cursor.execute(f"PRAGMA busy_timeout={BUSY_TIMEOUT_MS}")
    until = time.monotonic() + BUSY_TIMEOUT_MS / 1000
    while True:
        try:
            cursor.execute("PRAGMA journal_mode=WAL")
            break
        except sqlite3.OperationalError as error:  # SQLite does not wait while another switches it
            if "locked" not in str(error) or time.monotonic() > until:
                raise
            time.sleep(0.01)
    cursor.execute("PRAGMA synchronous=NORMAL")
    cursor.close()
    connection.set_progress_handler(
        lambda: time.monotonic() > record.info.get("until", math.inf), INSTRUCTIONS
    )


def _begin_sqlite(connection: sa.Connection) -> None:
    """Writers take the write lock at once, and so see the changes of the previous writer."""
    options = connection.get_execution_options()
    reading, keys = options.get("reading"), "OFF" if options.get("rebuilding") else "ON"
    limit_s = MAX_READING_S if options.get("limited") else math.inf
    connection.info["until"] = time.monotonic() + limit_s
    connection.exec_driver_sql(f"PRAGMA foreign_keys={keys}")  # without effect in a transaction
    connection.exec_driver_sql("BEGIN" if reading else "BEGIN IMMEDIATE")


def refuse_once_removed(engine: sa.Engine, file: Path) -> None:
    """Refuse transactions on a SQLite file that is removed or replaced from now on.

    Its open connections would continue to write to the unlinked file.

    Raises OSError: there is no such file.
    """
    stat = file.stat()
    opened = stat.st_dev, stat.st_ino

    def check(connection: sa.Connection) -> None:
        try:
            stat = file.stat()
            same = (stat.st_dev, stat.st_ino) == opened
        except OSError:
            same = False
        if not same:
            raise StorageError(
                f"{file} was removed or replaced while it was open, so nothing more can be kept "
                "in it. Put it back, or start the program again to begin a new one."
            )

    sa.event.listen(engine, "begin", check)
