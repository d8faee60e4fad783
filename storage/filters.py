"""A `RunQuery` in SQL: its conditions, its order, and the ids of a page."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from storage.records import RunQuery, StorageError
from storage.schema import ORDERS, fold, labels, prompt_texts, remarks, runs, tags, titles

EQUAL = (
    *("target", "method_title", "status", "experiment_id", "trial", "setup_id", "prompt_id"),
    *("dtype", "device", "decoding_type"),
)
"""Filters of a `RunQuery` that compare a column for equality."""
LARGEST = 1.7e308
ROWS_PER_FETCH = 2000


def conditions(query: RunQuery) -> list[sa.ColumnElement[bool]]:
    """Conditions that a run must meet."""
    is_deleted = runs.c.deleted_at.is_not(None)
    where: list[sa.ColumnElement[bool]] = []
    if query.deleted is not None:
        where.append(is_deleted if query.deleted else ~is_deleted)
    equal = {name: getattr(query, name) for name in EQUAL}
    where += [runs.c[name] == value for name, value in equal.items() if value is not None]
    if query.ids is not None:
        where.append(runs.c.id.in_(query.ids))
    if query.tag is not None:
        where.append(runs.c.id.in_(sa.select(tags.c.run_id).where(tags.c.tag == query.tag)))
    for key, value in query.labels.items():
        labelled = sa.select(labels.c.run_id).where(labels.c.key == key, labels.c.value == value)
        where.append(runs.c.id.in_(labelled))
    if query.text:
        where.append(_contains(query.text))
    return where


def is_finite(column: sa.Column[Any]) -> sa.ColumnElement[bool]:
    """Whether a figure is a finite number, in the column's own type to use its index."""
    return column.between(sa.literal(-LARGEST, sa.Float), sa.literal(LARGEST, sa.Float))


def _contains(text: str) -> sa.ColumnElement[bool]:
    """Whether the run's prompt, name, note, method or target contains the text."""
    folded = fold(text)

    def matching(key: sa.Column[str]) -> sa.Select[Any]:
        return sa.select(key).where(key.table.c.folded.contains(folded, autoescape=True))

    return sa.or_(
        # Not by its index: to look up the runs of a thousand prompts takes longer than to read all.
        runs.c.prompt_id.concat("").in_(matching(prompt_texts.c.prompt_id)),
        runs.c.id.in_(matching(remarks.c.run_id)),
        runs.c.method_title.in_(matching(titles.c.title)),
        runs.c.target.in_(matching(titles.c.title)),
    )


def ordering(query: RunQuery) -> list[sa.ColumnElement[Any]]:
    """The sort key, with missing values last, and the columns that break ties.

    Raises StorageError: there is no such sort key.
    """
    if query.sort not in ORDERS:
        names = ", ".join(ORDERS)
        raise StorageError(f"Runs must be sorted by one of {names}, got {query.sort!r:.80}.")
    edge = sa.desc if query.descending else sa.asc
    keys = [runs.c[name] for name in ORDERS[query.sort]]
    return [edge(key).nulls_last() if key.nullable else edge(key) for key in keys]


def count_of(connection: sa.Connection, query: RunQuery) -> int:
    """Number of runs that match the filters."""
    counted = sa.select(sa.func.count()).select_from(runs).where(*conditions(query))
    return connection.scalar(counted) or 0


def ordered_ids(query: RunQuery) -> sa.Select[Any]:
    """The ids of all runs that match, in order; limit and offset are ignored."""
    return sa.select(runs.c.id).where(*conditions(query)).order_by(*ordering(query))


def folded_page_of(connection: sa.Connection, query: RunQuery) -> tuple[list[str], int]:
    """A page on which an experiment is one row, and the number of rows of all pages.

    An experiment is represented by the first of its runs in the order.
    """
    where, end = conditions(query), query.offset + query.limit
    ordered = sa.select(runs.c.id, runs.c.experiment_id).where(*where).order_by(*ordering(query))
    rows = connection.execution_options(yield_per=ROWS_PER_FETCH).execute(ordered)
    first: dict[str, str] = {}
    for run_id, experiment_id in rows:
        first.setdefault(experiment_id or run_id, run_id)
        if len(first) == end:
            break
    rows.close()
    num_experiments = sa.func.count(sa.distinct(runs.c.experiment_id))
    num_single = sa.func.count() - sa.func.count(runs.c.experiment_id)
    total = connection.scalar(sa.select(num_experiments + num_single).where(*where)) or 0
    return list(first.values())[query.offset :], total
