"""Reads the run log: pages, whole runs, groups; the database filters, sorts and sums."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

import sqlalchemy as sa

from storage.database import Database
from storage.filters import conditions, count_of, is_finite, ordered_ids
from storage.records import (
    EXTERNAL,
    LABEL_PREFIX,
    FacetKey,
    RunDetail,
    RunGroup,
    RunPage,
    RunQuery,
    RunSummary,
    Spread,
    StepRow,
    StoredRun,
)
from storage.schema import labels, run_details, runs, steps, tags

MAX_FACETS = 200
DETAILS_PAGE = 500
AVERAGED = ("tok_s", "mat", "ttft_s", "draft_acceptance")
SHORT_PROMPT = 200
ESCAPED = 6
"""Characters that one character of the prompt may take in the database."""


# ---- runs


_DELETED = runs.c.deleted_at.is_not(None).label("deleted")


def read_summaries(connection: sa.Connection, ids: Sequence[str]) -> tuple[RunSummary, ...]:
    start = sa.func.substr(run_details.c.prompt_text, 1, SHORT_PROMPT * ESCAPED)
    more = [run_details.c[name] for name in ("method", "sampling", "limits", "note")]
    short = sa.type_coerce(start, run_details.c.prompt_text.type).label("prompt_text")
    summaries = sa.select(runs, _DELETED, *more, short).join_from(runs, run_details)
    rows = _read(connection, summaries.where(runs.c.id.in_(ids)), RunSummary)
    return tuple(RunSummary(**{**v, "prompt_text": v["prompt_text"][:SHORT_PROMPT]}) for v in rows)


def read_page(connection: sa.Connection, query: RunQuery) -> tuple[RunSummary, ...]:
    """One page of runs, in order."""
    ids = connection.scalars(ordered_ids(query).limit(query.limit).offset(query.offset)).all()
    summaries = {run.id: run for run in read_summaries(connection, ids)}
    return tuple(summaries[run_id] for run_id in ids)


def _read(
    connection: sa.Connection, query: sa.Select[Any], kind: type[RunSummary]
) -> list[dict[str, Any]]:
    """The fields of runs: their columns, tags and labels."""
    rows = connection.execute(query).mappings().all()
    ids = [row["id"] for row in rows]
    names: dict[str, list[str]] = defaultdict(list)
    pairs: dict[str, dict[str, str]] = defaultdict(dict)
    query = sa.select(tags).where(tags.c.run_id.in_(ids)).order_by(tags.c.tag)
    for row in connection.execute(query):
        names[row.run_id].append(row.tag)
    query = sa.select(labels).where(labels.c.run_id.in_(ids)).order_by(labels.c.key)
    for row in connection.execute(query):
        pairs[row.run_id][row.key] = row.value
    columns = [field.name for field in fields(kind) if field.name not in ("tags", "labels")]
    return [
        {
            **{name: row[name] for name in columns},
            "lossless": None if row["decoding_type"] == EXTERNAL else row["lossless"],
            "tags": tuple(names[row["id"]]),
            "labels": pairs[row["id"]],
        }
        for row in rows
    ]


def read_wholes(
    connection: sa.Connection, run_ids: Sequence[str], *, without_steps: bool = False
) -> list[StoredRun]:
    """These runs with all their steps, oldest first; unknown ids are skipped.

    Args:
        without_steps: read only the steps of unfinished runs, whose output they contain.
    """
    details = sa.select(runs, _DELETED, run_details).join_from(runs, run_details)
    details = details.where(runs.c.id.in_(run_ids)).order_by(runs.c.created_at, runs.c.id)
    rows = _read(connection, details, RunDetail)
    if without_steps:
        run_ids = [values["id"] for values in rows if values["output_ids"] is None]
    steps_by_run: dict[str, list[StepRow]] = defaultdict(list)
    of_runs = sa.select(steps.c.run_id, steps.c.payload).where(steps.c.run_id.in_(run_ids))
    for run_id, step in connection.execute(of_runs.order_by(steps.c.run_id, steps.c.index)):
        steps_by_run[run_id].append(step)
    pairs = ((values, tuple(steps_by_run[values["id"]])) for values in rows)
    return [StoredRun(_detail(values, own), own) for values, own in pairs]


def _detail(values: Mapping[str, Any], own: Sequence[StepRow]) -> RunDetail:
    """A run from its columns; the output of an unfinished run is taken from its steps."""
    output: dict[str, Any] = {"metrics": values["metrics"] or {}}
    if values["output_ids"] is None:
        ids = [] if values["first_token_id"] is None else [values["first_token_id"]]
        for step in own:
            committed = [*(step.tokens[node] for node in step.accepted), step.bonus]
            ids += committed[: step.num_committed]
        pieces = (piece for step in own for piece in step.committed_texts)
        output |= {"output_ids": tuple(ids), "text": values["first_text"] + "".join(pieces)}
    return RunDetail(**{**values, **output})


# ---- groups


def _grouped(by: str) -> tuple[sa.FromClause, sa.ColumnElement[Any]]:
    """The table to read groups from, and the column to group by."""
    if by == "tag":
        return runs.outerjoin(tags, tags.c.run_id == runs.c.id), tags.c.tag
    if by.startswith(LABEL_PREFIX):
        key = by.removeprefix(LABEL_PREFIX)
        its = sa.select(labels.c.value).where(labels.c.run_id == runs.c.id, labels.c.key == key)
        return runs, its.scalar_subquery()  # looked up by run: a join may read all labels
    # Not by its index: to look up every run takes longer than to read and sort them all.
    return runs, runs.c[by].concat("")


def _sums(name: str) -> list[sa.ColumnElement[Any]]:
    """The sums that `Spread.of_sums` takes, over the runs whose figure is finite."""
    number = sa.type_coerce(runs.c[name], sa.Float)
    weight = sa.type_coerce(runs.c.decode_s, sa.Float) if name == "tok_s" else sa.literal(1.0)
    terms = weight, weight * weight, weight * number, weight * number * number
    return [
        sa.func.sum(term).filter(is_finite(runs.c[name])).label(f"{name}_{power}")
        for power, term in enumerate(terms)
    ]


def _spread(row: sa.Row[Any], name: str) -> Spread | None:
    """Mean and standard deviation; the mean of tok/s is all tokens over all seconds."""
    return Spread.of_sums(*(getattr(row, f"{name}_{power}") or 0.0 for power in range(4)))


def exists(connection: sa.Connection, condition: sa.ColumnElement[bool]) -> bool:
    """Whether a row meets the condition."""
    return bool(connection.scalar(sa.select(sa.exists().where(condition))))


class RunReader:
    """Queries over the runs of a database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def find(self, query: RunQuery | None = None) -> RunPage[RunSummary]:
        """One page of runs, and the number of runs that match."""
        query = query or RunQuery()
        with self._database.transaction(reading=True) as connection:
            return RunPage(read_page(connection, query), count_of(connection, query))

    def rows(self, query: RunQuery) -> tuple[RunSummary, ...]:
        """The runs of a page, without counting all that match."""
        with self._database.transaction(reading=True) as connection:
            return read_page(connection, query)

    def ids(self, query: RunQuery) -> tuple[str, ...]:
        """The ids of all runs that match, in order; limit and offset are ignored."""
        with self._database.transaction(reading=True) as connection:
            return tuple(connection.scalars(ordered_ids(query)))

    def get(self, run_id: str) -> RunDetail | None:
        """A run without its steps; None if there is no such run."""
        return next(self.details([run_id]), None)

    def details(self, run_ids: Sequence[str]) -> Iterator[RunDetail]:
        """These runs in this order, without their steps; unknown ids are skipped.

        They are read in batches.
        """
        for start in range(0, len(run_ids), DETAILS_PAGE):
            ids = run_ids[start : start + DETAILS_PAGE]
            with self._database.transaction(reading=True, limited=False) as connection:
                stored = read_wholes(connection, ids, without_steps=True)
            page = {one.run.id: one.run for one in stored}
            yield from (page[run_id] for run_id in ids if run_id in page)

    def metrics(self, run_ids: Collection[str]) -> Mapping[str, Mapping[str, Any]]:
        """All figures of these runs as stored; runs without any are skipped."""
        query = sa.select(run_details.c.run_id, run_details.c.metrics)
        query = query.where(run_details.c.run_id.in_(run_ids), run_details.c.metrics.is_not(None))
        with self._database.transaction(reading=True) as connection:
            return {run_id: metrics for run_id, metrics in connection.execute(query)}

    def read_whole(self, run_id: str) -> StoredRun | None:
        """A run with its steps; None if there is no such run."""
        with self._database.transaction(reading=True, limited=False) as connection:
            return next(iter(read_wholes(connection, [run_id])), None)

    def steps(self, run_id: str, start: int = 0, stop: int | None = None) -> tuple[StepRow, ...]:
        """Steps `start` ≤ index < `stop`, in order."""
        query = sa.select(steps.c.payload).where(steps.c.run_id == run_id, steps.c.index >= start)
        if stop is not None:
            query = query.where(steps.c.index < stop)
        with self._database.transaction(reading=True) as connection:
            return tuple(connection.scalars(query.order_by(steps.c.index)))

    def groups(self, query: RunQuery, by: str, limit: int = 100) -> tuple[RunGroup, ...]:
        """Groups of runs by a `GroupKey`, `tag` or `label:KEY`, largest first."""
        source, value = _grouped(by)
        count = sa.func.count().label("num_runs")
        sums = (
            sa.select(
                value.label("value"),
                count,
                sa.func.max(runs.c.created_at).label("newest_at"),
                sa.func.max(runs.c.id).label("example"),
                *(total for name in AVERAGED for total in _sums(name)),
            )
            .select_from(source)
            .group_by("value")
            .order_by(count.desc(), "value")
            .limit(limit)
        )
        with self._database.transaction(reading=True) as connection:
            rows = connection.execute(sums.where(*conditions(query))).all()
            examples = {
                run.id: run for run in read_summaries(connection, [row.example for row in rows])
            }
        groups = []
        for row in rows:
            spreads = {name: _spread(row, name) for name in AVERAGED}
            figures = {name: spread for name, spread in spreads.items() if spread is not None}
            example = examples[row.example]
            groups.append(RunGroup(row.value, row.num_runs, row.newest_at, example, figures))
        return tuple(groups)

    def distinct_values(self, name: FacetKey) -> tuple[str, ...]:
        """The first `MAX_FACETS` values of a column, tags, or keys of labels, in ascending order.

        Each value takes one index lookup, so that not all of a million rows are read.
        """
        column = {"tag": tags.c.tag, "label": labels.c.key}.get(name, runs.c.get(name))
        values = sa.select(sa.func.min(column).label("value")).cte(recursive=True)
        after = sa.select(sa.func.min(column)).where(column > values.c.value).scalar_subquery()
        values = values.union_all(sa.select(after).where(values.c.value.is_not(None)))
        first = sa.select(values.c.value).limit(MAX_FACETS + 1)
        with self._database.transaction(reading=True) as connection:
            rows = connection.scalars(first).all()
        return tuple(value for value in rows if value is not None)[:MAX_FACETS]
