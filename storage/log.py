"""The run log: begin a run, add to it while it streams, finish it, find it again."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import sqlalchemy as sa

from storage import codec, edits, owner
from storage.archive import read_steps, read_whole, write_steps, write_whole
from storage.artifacts import Artifacts
from storage.benchmarks import Benchmarks
from storage.database import Database
from storage.edits import change, change_details
from storage.errors import StorageError
from storage.filters import Circumstance, Facets, RunGroup, RunPage, RunQuery, Spread
from storage.groups import read_facets, read_groups, read_rates
from storage.marks import check_labels, check_tags, read_marks, write_labels, write_tags
from storage.query import all_ids_statement, count_statement, page_statement
from storage.records import Arrival, NewRun, RunDetail, StepRow, StoredRun
from storage.rows import detail_of, figures_row, new_details, new_row, summary_of
from storage.schema import run_details, runs, steps
from storage.search import write_prompts, write_titles


class RunLog:
    """All runs in one database; safe to use from several threads and processes.

    One thread at a time writes a run. Reading never waits for writing (SQLite's write-ahead log).
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._owner = owner.this_process()
        self._begun: set[str] = set()
        self.artifacts = Artifacts(database)
        self.benchmarks = Benchmarks(database, self._owner)

    @classmethod
    def open(cls, url: str | None = None) -> RunLog:
        """Open, create or migrate; runs whose process died become `interrupted`.

        Args:
            url: SQLAlchemy URL, or the path of a SQLite file; None = in memory.

        Raises:
            SchemaError: written by a newer version.
            StorageError: not readable, or no driver for it.
        """
        log = cls(Database(url))
        log._mark_interrupted()
        log.benchmarks.mark_interrupted()
        return log

    @property
    def url(self) -> sa.URL:
        """Where the log is; what belongs beside it goes there too."""
        return self._database.url

    def close(self) -> None:
        """Give the connections back; what was begun here and not finished becomes `interrupted`."""
        self.benchmarks.release()
        if self._begun:
            mine = runs.c.id.in_(self._begun), runs.c.status == "running"
            with self._database.transaction() as connection:
                connection.execute(runs.update().where(*mine).values(status="interrupted"))
        self._database.close()

    # ---- writing

    def begin(self, new: NewRun) -> str:
        """Write down a run that is about to start; returns its id.

        Raises:
            StorageError: a tag or label is no text, or too long.
        """
        check_labels(new.labels)
        check_tags(new.tags)
        run_id = secrets.token_hex(8)
        row = new_row(new, run_id=run_id, owner=self._owner, now=owner.now())
        with self._database.transaction() as connection:
            connection.execute(runs.insert().values(row))
            connection.execute(run_details.insert().values(new_details(new, run_id=run_id)))
            write_tags(connection, run_id, new.tags)
            write_labels(connection, run_id, new.labels)
            write_prompts(connection, {row["prompt_id"]: new.prompt_text})
            write_titles(connection, {new.target, new.method_title})
        self._begun.add(run_id)
        return run_id

    def add_prefill(
        self, run_id: str, *, token_id: int, text: str, num_prompt_tokens: int, ttft_s: float
    ) -> None:
        """The first token is there."""
        with self._database.transaction() as connection:
            change(
                connection,
                run_id,
                num_prompt_tokens=num_prompt_tokens,
                num_new_tokens=1,
                ttft_s=ttft_s,
                heartbeat_at=owner.now(),
            )
            change_details(connection, run_id, first_token_id=token_id, first_text=text)

    def add_steps(self, run_id: str, new: Sequence[StepRow]) -> None:
        """Add steps in one transaction; the summary's counts follow.

        Raises:
            UnknownRunError: no such run.
            StorageError: a step of one of these indices is stored already.
        """
        if not new:
            return
        num_steps = runs.c.num_steps + len(new)
        num_accepted = runs.c.num_accepted + sum(len(step.accepted) for step in new)
        with self._database.transaction() as connection:
            change(
                connection,
                run_id,
                num_steps=num_steps,
                num_accepted=num_accepted,
                mat=1 + sa.cast(num_accepted, sa.Float) / num_steps,
                num_new_tokens=runs.c.num_new_tokens + sum(s.num_committed for s in new),
                tok_s=_rate(new[-1].at_s, sum(s.num_committed for s in new)),
                heartbeat_at=owner.now(),
            )
            _refuse_stored(connection, run_id, new)
            write_steps(connection, run_id, new)

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
    ) -> None:
        """The run is over."""
        figures = {**figures_row(metrics), "num_new_tokens": len(output_ids)}
        with self._database.transaction() as connection:
            change(
                connection,
                run_id,
                status=status,
                finish_reason=finish_reason,
                heartbeat_at=owner.now(),
                **figures,
            )
            change_details(
                connection,
                run_id,
                output_ids=codec.dump(list(output_ids)),
                text=text,
                metrics=codec.dump(metrics),
                error=error,
            )
        self._begun.discard(run_id)

    def rename(self, run_id: str, name: str) -> None:
        """Give the run a name."""
        with self._database.transaction() as connection:
            edits.rename(connection, run_id, name)

    def set_note(self, run_id: str, note: str) -> None:
        """Write the run's note."""
        with self._database.transaction() as connection:
            edits.set_note(connection, run_id, note)

    def set_tags(self, run_id: str, new: Sequence[str]) -> None:
        """Replace the run's tags."""
        with self._database.transaction() as connection:
            edits.set_tags(connection, run_id, new)

    def retag(
        self, run_ids: Sequence[str], *, add: Sequence[str] = (), remove: Sequence[str] = ()
    ) -> None:
        """Add tags to runs and take others from them; all of them or none."""
        with self._database.transaction() as connection:
            edits.retag(connection, run_ids, add=add, remove=remove)

    def delete(self, *run_ids: str) -> None:
        """Hide runs, all of them or none; `restore` brings them back."""
        with self._database.transaction() as connection:
            edits.set_deleted(connection, run_ids, True)

    def restore(self, *run_ids: str) -> None:
        """Show deleted runs again."""
        with self._database.transaction() as connection:
            edits.set_deleted(connection, run_ids, False)

    def write_whole(self, new: Sequence[StoredRun]) -> tuple[Arrival, ...]:
        """Add runs of another log, all of them or none; what is here is never overwritten.

        A run that is here already is left alone, with its name, note and tags. One whose id another
        run has gets a new id.

        Raises:
            StorageError: a value that the log cannot hold.
        """
        with self._database.transaction() as connection:
            return write_whole(connection, new)

    def _mark_interrupted(self) -> None:
        """Runs whose process is gone are over."""
        now = owner.now()
        wanted = sa.select(runs.c.id, runs.c.owner, runs.c.heartbeat_at)
        with self._database.transaction() as connection:
            running = connection.execute(wanted.where(runs.c.status == "running")).all()
            dead = [r.id for r in running if not owner.is_alive(r.owner, r.heartbeat_at, now)]
            if dead:
                connection.execute(
                    runs.update().where(runs.c.id.in_(dead)).values(status="interrupted")
                )

    # ---- reading

    def find(self, query: RunQuery | None = None) -> RunPage:
        """One page of runs."""
        query = query or RunQuery()
        with self._database.transaction(reading=True) as connection:
            rows = connection.execute(page_statement(query)).all()
            total = int(connection.execute(count_statement(query)).scalar_one())
            marks = read_marks(connection, [row.id for row in rows])
        return RunPage(tuple(summary_of(row, marks[row.id]) for row in rows), total)

    def ids(self, query: RunQuery) -> tuple[str, ...]:
        """The ids of all runs that the filters let through, in order; limit and offset aside."""
        with self._database.transaction(reading=True) as connection:
            return tuple(connection.execute(all_ids_statement(query)).scalars())

    def get(self, run_id: str) -> RunDetail | None:
        """A run without its steps; None if there is none of this id."""
        wanted = sa.select(runs, run_details).join_from(runs, run_details)
        with self._database.transaction(reading=True) as connection:
            row = connection.execute(wanted.where(runs.c.id == run_id)).one_or_none()
            if row is None:
                return None
            marks = read_marks(connection, [run_id])
            streamed: list[StepRow] = []
            if row.output_ids is None:
                streamed = read_steps(connection, run_id, 0, None)
        return detail_of(row, marks[run_id], streamed)

    def read_whole(self, run_id: str) -> StoredRun | None:
        """A run with its steps; None if there is none of this id."""
        with self._database.transaction(reading=True) as connection:
            return read_whole(connection, run_id)

    def groups(self, query: RunQuery, by: str, limit: int = 100) -> tuple[RunGroup, ...]:
        """Runs with something in common, largest groups first; `by` as in `GroupKey`.

        Raises:
            StorageError: no such thing to group by, or limit out of range.
        """
        with self._database.transaction(reading=True) as connection:
            return read_groups(connection, query, by, limit)

    def rates(
        self, prompt_ids: Sequence[str], *, setup_id: str | None = None, decoding_type: str = ""
    ) -> Mapping[Circumstance, Spread]:
        """Mean tok/s of completed runs on these prompts: of one setup, or of one decoding type.

        It is what a speedup divides by; apart by target, prompt, dtype and device.
        """
        equal = {"setup_id": setup_id} if setup_id else {"decoding_type": decoding_type}
        with self._database.transaction(reading=True) as connection:
            return read_rates(connection, prompt_ids, **equal)

    def facets(self) -> Facets:
        """The different values of what can be filtered by."""
        with self._database.transaction(reading=True) as connection:
            return read_facets(connection)

    def steps(self, run_id: str, start: int = 0, stop: int | None = None) -> tuple[StepRow, ...]:
        """Steps `start` ≤ index < `stop`, in order."""
        with self._database.transaction(reading=True) as connection:
            return tuple(read_steps(connection, run_id, start, stop))

    def step(self, run_id: str, index: int) -> StepRow | None:
        """One step; None if the run has no such step."""
        found = self.steps(run_id, index, index + 1)
        return found[0] if found else None


def _refuse_stored(connection: sa.Connection, run_id: str, new: Sequence[StepRow]) -> None:
    indices = [step.index for step in new]
    wanted = sa.select(steps.c.index).where(steps.c.run_id == run_id, steps.c.index.in_(indices))
    stored = connection.execute(wanted.limit(1)).scalar_one_or_none()
    if stored is not None or len(set(indices)) < len(indices):
        at = stored if stored is not None else indices[0]
        raise StorageError(f"Step {at} of run {run_id} is stored already. Add each step once.")


def _rate(at_s: float, committed: int) -> Any:
    """tok/s so far: everything after the first token, over the time since it."""
    seconds = at_s - sa.func.coalesce(runs.c.ttft_s, 0.0)
    tokens = runs.c.num_new_tokens + committed - 1
    return sa.case((seconds > 0, sa.cast(tokens, sa.Float) / seconds), else_=None)
