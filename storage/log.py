"""The run log: begin a run, add to it while it streams, finish it, query it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

import sqlalchemy as sa

from storage import owner, schema, writing
from storage.benchmarks import Artifacts, Benchmarks, Experiments
from storage.database import Database
from storage.dialects import advisory_lock
from storage.query import RunReader, exists, read_summaries
from storage.records import LogWatcher, NewRun, StepRow, StorageError, StoredRun
from storage.schema import new_id, run_details, runs, steps

ERASED_AT_ONCE = 500
"""Runs per transaction, so that others can write in between."""


class RunLog(RunReader):
    """All runs in one database; safe to use from several threads and processes.

    One thread at a time writes a run. Readers never wait for writers. While the server is
    unreachable, `begin`, `add_prefill`, `add_steps`, `finish`, `artifacts.put` and `wait_for` wait.
    """

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self._owner = owner.this_process()
        self._open = owner.OpenRows(database, runs)
        self.artifacts = Artifacts(database)
        self.benchmarks = Benchmarks(database, self._owner)
        self.experiments = Experiments(database)
        self.watchers: list[LogWatcher] = []
        self.url = database.url
        self.wait_for = database.wait_for
        """For reads that must not fail where a write would wait; never on a thread of a page."""

    @classmethod
    def open(cls, url: str | None = None) -> RunLog:
        """Open, create or migrate; runs whose process died become `interrupted`.

        Args:
            url: SQLAlchemy URL, or the path of a SQLite file; None = in memory.

        Raises StorageError: not readable, written by another version, or no driver for it.
        """
        log = cls(Database(url))
        with log._database.transaction() as connection:
            owner.interrupt_dead(connection, runs)
            log.benchmarks.interrupt_dead(connection)
        return log

    @property
    def out_of_reach(self) -> bool:
        """Whether a write waits for the database's unreachable server."""
        return self._database.out_of_reach

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections; rows begun here and not finished become `interrupted`."""
        unfinished = [rows for rows in (self._open, self.benchmarks.open_rows) if rows.ids]
        if unfinished:
            with self._database.transaction() as connection:
                for rows in unfinished:
                    rows.interrupt(connection)
        self._database.close()

    def begin(self, new: NewRun) -> str:
        """Add a run that is about to start; returns its id."""
        values = writing.values_of(
            new,
            id=(run_id := new_id()),
            owner=self._owner,
            decoding_type=str(new.method["decoding_type"]),
            num_prompt_tokens=len(new.prompt_ids),
        )

        def insert(connection: sa.Connection, over: owner.Unwritten) -> None:
            for ended, error in over.items():
                details = run_details.update().where(run_details.c.run_id == ended)
                connection.execute(details.values(error=error))
            writing.insert(connection, [values])

        self._open.begin(run_id, insert)
        return run_id

    def add_prefill(
        self, run_id: str, *, token_id: int, text: str, num_prompt_tokens: int, ttft_s: float
    ) -> None:
        """Add the first token of a run."""
        values = {
            "num_prompt_tokens": num_prompt_tokens,
            "num_new_tokens": 1,
            "ttft_s": ttft_s,
            "first_token_id": token_id,
            "first_text": text,
        }
        self._database.persist(lambda connection: _change(connection, run_id, **values))

    def add_steps(
        self, run_id: str, new: Sequence[StepRow], metrics: Mapping[str, Any] | None = None
    ) -> None:
        """Add steps in one transaction.

        Args:
            metrics: the run's figures so far, which update those of its row.

        Raises StorageError: no such run, or one of these steps is stored already.
        """
        figures = writing.figures_of(metrics or {})

        def write(connection: sa.Connection) -> None:
            _change(connection, run_id, **figures)
            writing.write_steps(connection, run_id, new)

        first = (steps.c.run_id == run_id) & (steps.c.index == new[0].index)
        self._database.persist(write, lambda connection: exists(connection, first))
        for watcher in self.watchers:
            watcher.stepped(new)

    def finish(
        self,
        run_id: str,
        *,
        status: Literal["completed", "cancelled", "failed"],
        output_ids: Sequence[int],
        text: str,
        finish_reason: str | None,
        metrics: Mapping[str, Any],
        error: str | None = None,
        external: bool = False,
    ) -> None:
        """Write how a run ended. If that fails, the run becomes `interrupted` later.

        Args:
            external: whether another engine decoded it; watchers are told of this one's runs only.
        """
        figures = writing.figures_of(metrics)
        if output_ids or not figures:  # another engine's answer has text and figures only
            figures["num_new_tokens"] = len(output_ids)
        values = {
            "status": status,
            "finish_reason": finish_reason,
            "output_ids": list(output_ids),
            "text": text,
            "metrics": metrics,
            "error": error,
            **figures,
        }
        self._open.finish(run_id, lambda connection: _change(connection, run_id, **values), error)
        for watcher in () if external else self.watchers:
            watcher.finished(reason=finish_reason, metrics=metrics)

    def annotate(
        self,
        run_id: str,
        *,
        name: str | None = None,
        note: str | None = None,
        tags: Sequence[str] | None = None,
    ) -> None:
        """Set the run's name, note or tags; None leaves one as it is.

        Raises StorageError: no such run.
        """
        texts = {"name": name, "note": note}
        changes = {what: text for what, text in texts.items() if text is not None}
        with self._database.transaction() as connection:
            _change(connection, run_id, **changes)
            writing.write_remark(connection, run_id)
            if tags is not None:
                writing.write_tags(connection, run_id, tags)

    def retag(self, run_ids: Sequence[str], *, add: Sequence[str], remove: Sequence[str]) -> None:
        """Remove tags of runs and add others; unknown ids are skipped.

        Raises StorageError: a run would have too many; none is changed.
        """
        with self._database.transaction() as connection:
            advisory_lock(connection, "tags")
            for run in read_summaries(connection, run_ids):
                new = (*(tag for tag in run.tags if tag not in remove), *add)
                if (num := len({*new})) > writing.MAX_TAGS:
                    rule = f"tags of a run must be at most {writing.MAX_TAGS}, got {num}"
                    raise StorageError(f"{rule}. Remove some first.")
                writing.write_tags(connection, run.id, new)

    def set_deleted(self, run_ids: Sequence[str], deleted: bool = True) -> None:
        """Hide runs, or show them again; all of them or none.

        Raises StorageError: one of them is not in the log.
        """
        deleted_at = schema.now() if deleted else None
        change = runs.update().where(runs.c.id.in_(run_ids)).values(deleted_at=deleted_at)
        with self._database.transaction() as connection:
            if connection.execute(change).rowcount < len({*run_ids}):
                raise StorageError("One of these runs is not in the log. Load the page again.")

    def erase(self, run_ids: Sequence[str]) -> int:
        """Delete runs for good, and free their space; returns their number.

        Runs that are not hidden, or are still running, are kept.

        Raises StorageError: the log cannot be written, or not made smaller.
        """
        num_erased = 0
        for start in range(0, len(run_ids), ERASED_AT_ONCE):
            with self._database.transaction() as connection:
                ids = run_ids[start : start + ERASED_AT_ONCE]
                num_erased += writing.erase(connection, ids)
        try:
            self._database.free_space()
        except StorageError as error:
            raise StorageError(f"The runs are erased, but take up space: {error}") from error
        return num_erased

    def write_whole(self, new: Sequence[StoredRun]) -> int:
        """Add runs of another log in one transaction; returns the number of new ones.

        A run whose id exists is not changed, nor are its name, note and tags.

        Raises StorageError: the log cannot store a value.
        """
        with self._database.transaction() as connection:
            advisory_lock(connection, "import")  # so that two imports add no run twice
            return writing.write_whole(connection, new)


def _change(connection: sa.Connection, run_id: str, **values: Any) -> None:
    """Set columns of a run and of its details, and its heartbeat; raises StorageError."""
    values["heartbeat_at"] = schema.now()
    for table, key in ((runs, runs.c.id), (run_details, run_details.c.run_id)):
        own = {name: value for name, value in values.items() if name in table.c}
        change = table.update().where(key == run_id).values(own)
        if own and connection.execute(change).rowcount == 0:
            raise StorageError(f"No run {run_id!r:.80} is in the log.")
