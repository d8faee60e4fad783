"""Which process owns a run or a benchmark, and the status it gets when that process ends."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import sqlalchemy as sa

STALE_AFTER = timedelta(minutes=10)
"""A run of another machine without a heartbeat for this long counts as dead."""


def now() -> datetime:
    """The time as the database keeps it: UTC, naive."""
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
    """Mark those of these rows that are `running` as `interrupted`."""
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
        self._table, self._lock = table, threading.Lock()
        self._ids: set[str] = set()
        self._unwritten: dict[str, str | None] = {}

    def begin(self, row_id: str) -> None:
        with self._lock:
            self._ids.add(row_id)

    @contextmanager
    def finishing(self, row_id: str, error: str | None = None) -> Iterator[None]:
        """Within the block it is written that a row is over; where that fails, it is unwritten."""
        try:
            yield
        except BaseException:
            with self._lock:
                self._unwritten[row_id] = error
            raise
        with self._lock:
            self._ids.discard(row_id)

    @contextmanager
    def unwritten(self) -> Iterator[Mapping[str, str | None]]:
        """Rows that are over although the log does not say so, with their errors.

        They are this caller's to write within the block, and unwritten again if that fails.
        """
        with self._lock:
            taken, self._unwritten = self._unwritten, {}
        try:
            yield taken
        except BaseException:
            with self._lock:
                self._unwritten = {**taken, **self._unwritten}
            raise
        with self._lock:
            self._ids.difference_update(taken)

    def interrupt(self, connection: sa.Connection) -> None:
        """All of them become `interrupted`."""
        with self._lock:
            ids = tuple(self._ids)
        interrupt(connection, self._table, ids)

    def __bool__(self) -> bool:
        return bool(self._ids)


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _started(pid: int) -> str:
    """Start time of a process in clock ticks since boot; empty if dead or /proc does not tell."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    # The command name in parentheses may hold spaces; the fields after it do not.
    after = stat.rpartition(")")[2].split()
    killed_but_not_reaped = after[0] in "ZX"
    return "" if killed_but_not_reaped else after[19]
