"""The process that owns a run or a benchmark, and the row's status when that process ends."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Collection, Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from storage.database import Database
from storage.query import exists
from storage.schema import now

Unwritten = Mapping[str, str | None]
"""Finished rows whose end could not be written, with their errors."""
STALE_AFTER = timedelta(minutes=10)
"""A run of another machine without a heartbeat for this long counts as dead."""


def this_process() -> str:
    """Host, boot, process id and its start time: unique even where process ids are reused."""
    pid = os.getpid()
    return f"{socket.gethostname()}|{_boot_id()}|{pid}|{_started(pid)}"


def is_alive(owner: str, heartbeat_at: datetime, now: datetime) -> bool:
    """Whether the process that wrote `owner` may still be writing."""
    host, boot, pid, started = (owner.split("|") + ["", "", "", ""])[:4]
    if host == socket.gethostname() and started and pid.isdigit():
        return boot == _boot_id() and _started(int(pid)) == started
    return now - heartbeat_at < STALE_AFTER


def interrupt(connection: sa.Connection, table: sa.Table, ids: Collection[str]) -> None:
    """Mark these rows as `interrupted` if they are `running`."""
    if ids:
        mine = table.c.id.in_(ids), table.c.status == "running"
        connection.execute(table.update().where(*mine).values(status="interrupted"))


def interrupt_dead(
    connection: sa.Connection,
    table: sa.Table,
    last_heartbeat: Callable[[Any], datetime] = lambda row: row.heartbeat_at,
) -> None:
    """Mark rows whose process has ended as `interrupted`."""
    query = sa.select(table.c.id, table.c.owner, table.c.heartbeat_at)
    running = connection.execute(query.where(table.c.status == "running")).all()
    dead = [row.id for row in running if not is_alive(row.owner, last_heartbeat(row), now())]
    interrupt(connection, table, dead)


class OpenRows:
    """Rows of a table that this process began and has not finished; any thread may use it.

    Attributes:
        ids: their ids.
    """

    def __init__(self, database: Database, table: sa.Table) -> None:
        self._database, self._table = database, table
        self.ids: set[str] = set()
        self._unwritten: dict[str, str | None] = {}

    def begin(self, row_id: str, insert: Callable[[sa.Connection, Unwritten], object]) -> None:
        """Add a row, and mark those whose end could not be written as `interrupted`.

        Args:
            insert: writes the row; it is also given those others, with their errors.
        """
        over = dict(self._unwritten)

        def write(connection: sa.Connection) -> None:
            interrupt(connection, self._table, over)
            insert(connection, over)

        self._database.persist(write, lambda c: exists(c, self._table.c.id == row_id))
        self.ids.add(row_id)
        for ended in over:
            self.ids.discard(ended)
            self._unwritten.pop(ended, None)

    def finish(
        self, row_id: str, write: Callable[[sa.Connection], object], error: str | None = None
    ) -> None:
        """Write the end of a row. If that fails, the next `begin` marks it, with this error."""
        try:
            self._database.persist(write)
        except BaseException:
            self._unwritten[row_id] = error
            raise
        self.ids.discard(row_id)

    def interrupt(self, connection: sa.Connection) -> None:
        """Mark all of them as `interrupted`."""
        interrupt(connection, self._table, tuple(self.ids))


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _started(pid: int) -> str:
    """Start time of a process in clock ticks since boot; empty if dead or unknown."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    # The command name in parentheses may hold spaces; the fields after it do not.
    after = stat.rpartition(")")[2].split()
    killed_but_not_reaped = after[0] in "ZX"
    return "" if killed_but_not_reaped else after[19]
