"""The process that owns a run or a benchmark, and the row's status when that process ends."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import sqlalchemy as sa

STALE_AFTER = timedelta(minutes=10)
"""A run of another machine without a heartbeat for this long counts as dead."""


def now() -> datetime:
    """The time as stored: UTC, naive."""
    return datetime.now(UTC).replace(tzinfo=None)


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
    """Rows of a table that this process began and has not finished; any thread may use it."""

    def __init__(self, table: sa.Table) -> None:
        self._table = table
        self._ids: set[str] = set()
        self._unwritten: dict[str, str | None] = {}

    @property
    def unwritten(self) -> Mapping[str, str | None]:
        """Finished rows whose end could not be written, with their errors."""
        return dict(self._unwritten)

    def begin(self, row_id: str, *, written: Collection[str] = ()) -> None:
        """Add an open row; `written` are finished rows whose end is now written."""
        self._ids.add(row_id)
        for ended in written:
            self._ids.discard(ended)
            self._unwritten.pop(ended, None)

    @contextmanager
    def finishing(self, row_id: str, error: str | None = None) -> Iterator[None]:
        """Write the end of a row within the block; if that fails, the row becomes unwritten."""
        try:
            yield
        except BaseException:
            self._unwritten[row_id] = error
            raise
        self._ids.discard(row_id)

    def interrupt(self, connection: sa.Connection) -> None:
        """Mark all of them as `interrupted`."""
        interrupt(connection, self._table, tuple(self._ids))

    def __bool__(self) -> bool:
        return bool(self._ids)


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
