"""What databases differ in: texts and floats they refuse, hints, and how SQLite is set up."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.compiler import compiles

from storage.records import StorageError

BUSY_TIMEOUT_MS = 15_000
MAX_READING_S = 10.0
INSTRUCTIONS = 50_000
"""Of SQLite's machine, between two looks at the clock: about a millisecond."""
_REFUSED = re.compile("[\\x00\ud800-\udfff]|\\\\(?=u[0-9a-f]{4})")
_ESCAPE = re.compile(r"\\u(?!d[89a-f])([0-9a-f]{4})")
_PAIR = r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_LONE = re.compile(rf"{_PAIR}|\\(u[dD][89a-fA-F][0-9a-fA-F]{{2}})|\\.")


def readable(json_text: str) -> str:
    """JSON whose texts have no lone surrogate: it is read as six characters.

    `"a\\ud800"` becomes `"a\\\\ud800"`.
    """
    if "\\u" not in json_text:
        return json_text
    return _LONE.sub(lambda found: f"\\\\{found[1]}" if found[1] else found[0], json_text)


class AnyText(sa.types.TypeDecorator[str]):
    """Text with NULs or lone surrogates in it; those are stored as \\u and four digits.

    A lone surrogate is read as these six characters: no answer and no terminal can carry it.
    """

    impl = sa.Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: sa.Dialect) -> str | None:
        if value is None:
            return None
        return _REFUSED.sub(lambda found: f"\\u{ord(found[0]):04x}", value)

    def process_result_value(self, value: Any, dialect: sa.Dialect) -> str | None:
        if value is None:
            return None
        return _ESCAPE.sub(lambda found: chr(int(found[1], 16)), value)


class Real(sa.Float[float]):
    """A float that may be NaN; SQLite alone turns NaN into NULL, so there it is the text "nan"."""

    def bind_processor(self, dialect: sa.Dialect) -> Callable[[Any], Any] | None:
        if dialect.name != "sqlite":
            return None
        return lambda value: "nan" if isinstance(value, float) and math.isnan(value) else value

    def result_processor(self, dialect: sa.Dialect, coltype: Any) -> Callable[[Any], Any]:
        return lambda value: None if value is None else float(value)


class Unindexed(sa.sql.expression.ColumnElement[Any]):
    """A column that SQLite is not to look up in an index, for conditions that most rows may meet.

    Without statistics its planner takes every index for selective, and reads the table row by row
    in random order, several times slower than front to back.
    """

    inherit_cache = True
    _traverse_internals = [("column", sa.sql.visitors.InternalTraversal.dp_clauseelement)]

    def __init__(self, column: sa.ColumnElement[Any]) -> None:
        self.column = column
        self.type = column.type


@compiles(Unindexed)
def _plain(element: Unindexed, compiler: Any, **options: Any) -> str:
    return str(compiler.process(element.column, **options))


@compiles(Unindexed, "sqlite")
def _unary_plus(element: Unindexed, compiler: Any, **options: Any) -> str:
    return f"+{compiler.process(element.column, **options)}"


def in_memory(url: sa.URL) -> bool:
    return url.get_backend_name() == "sqlite" and url.database in (None, "", ":memory:")


def prepare(engine: sa.Engine) -> None:
    """Set SQLite up: a write-ahead log, and transactions that queue for writing."""
    if engine.dialect.name == "sqlite":
        sa.event.listen(engine, "connect", _prepare_sqlite)
        sa.event.listen(engine, "begin", _begin_sqlite)


def _prepare_sqlite(connection: Any, record: Any) -> None:
    """Write-ahead log, so that readers and the writer do not wait for each other."""
    connection.isolation_level = None  # the driver begins late and never before DDL; we do
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout={BUSY_TIMEOUT_MS}")
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=NORMAL")
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.close()
    connection.set_progress_handler(
        lambda: time.monotonic() > record.info.get("until", math.inf), INSTRUCTIONS
    )


def _begin_sqlite(connection: sa.Connection) -> None:
    """Writers take the write lock first, and so see what the writer before them left."""
    reading = connection.get_execution_options().get("reading")
    connection.info["until"] = time.monotonic() + MAX_READING_S if reading else math.inf
    connection.exec_driver_sql("BEGIN" if reading else "BEGIN IMMEDIATE")


def refuse_once_removed(engine: sa.Engine, file: Path) -> None:
    """Let no transaction begin on a SQLite file that was removed or replaced since now.

    Its connections would go on, and what they write is seen by nobody.

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


@contextmanager
def foreign_keys_off(connection: sa.Connection) -> Iterator[None]:
    """SQLite changes a table by copy and drop; that drop must not cascade to steps and tags."""
    driver: Any = connection.connection.dbapi_connection
    if connection.dialect.name != "sqlite":
        yield
        return
    driver.execute("PRAGMA foreign_keys=OFF")  # has no effect once a transaction has begun
    try:
        yield
    finally:
        driver.execute("PRAGMA foreign_keys=ON")
