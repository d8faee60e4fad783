"""Which runs a question is about, in which order, and how a database gets there.

Few runs that match are all read. Of many, the index of their order is read from its beginning, and
each run is tested, until the page is full.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import sqlalchemy as sa

from storage.dialects import Unindexed
from storage.records import LABEL_PREFIX, RunQuery, SortKey, StorageError, names_of
from storage.schema import (
    FIGURES,
    FILTERED,
    ORDERS,
    fold,
    labels,
    prompt_texts,
    remarks,
    runs,
    tags,
    titles,
)

MAX_PAGE = 1000
SORT_KEYS = names_of(SortKey)
EQUAL = (
    "target",
    "decoding_type",
    "method_title",
    "status",
    "dtype",
    "device",
    "setup_id",
    "prompt_id",
    "benchmark_id",
    "experiment",
)
LARGEST = 1.7e308
LARGEST_INT = 2**31 - 1
COUNTED = 10_000
"""Of up to so many runs all are read and counted, of more only as many as are shown."""
FIRST = 100
BATCH = 2000
"""Runs that are read at a time, at first and at most: a page that is full soon asks for no more."""
MAX_SKIPPED = 1000


# ---- filters


class _Filter(NamedTuple):
    """A filter in two forms: one finds runs by an index, the other tests runs that come anyway.

    Attributes:
        ids: of the runs that are found, deleted ones among them.
    """

    finds: sa.ColumnElement[bool]
    tests: sa.ColumnElement[bool]
    ids: sa.FromClause


def _filters(query: RunQuery) -> dict[str, _Filter]:
    """What is asked of a run, by what it is asked of.

    Raises:
        StorageError: a range is of no figure.
    """
    found: dict[str, _Filter] = {}

    def column(name: str, asks: Callable[[Any], sa.ColumnElement[bool]]) -> None:
        finds, tests = asks(runs.c[name]), asks(Unindexed(runs.c[name]))
        found[name] = _Filter(finds, tests, sa.select(runs.c.id).where(finds).subquery())

    def elsewhere(name: str, key: sa.Column[str], *where: sa.ColumnElement[bool]) -> None:
        its = sa.select(key).where(*where)
        tests = its.where(key == runs.c.id).exists()
        found[name] = _Filter(runs.c.id.in_(its), tests, its.subquery())

    for key in EQUAL:
        if (value := getattr(query, key)) is not None:
            column(key, lambda of, value=value: of == value)  # type: ignore[misc]
    if query.only_deleted:
        column("deleted_at", lambda of: of.is_not(None))
    if query.ids is not None:
        column("id", lambda of: of.in_(query.ids))
    if query.tag is not None:
        elsewhere("tag", tags.c.run_id, tags.c.tag == query.tag)
    for key, value in query.labels.items():
        same = labels.c.key == key, labels.c.value == value
        elsewhere(LABEL_PREFIX + key, labels.c.run_id, *same)
    for figure, (least, most) in query.ranges.items():
        check("A range must be of", figure, FIGURES)
        low, high = _bounds(runs.c[figure], least, most)
        column(figure, lambda of, low=low, high=high: sa.and_(of >= low, of <= high))  # type: ignore[misc]
    if query.text:
        found["text"] = _text_filter(query.text)
    return found


def _bounds(column: sa.Column[Any], least: float | None, most: float | None) -> tuple[Any, Any]:
    """Numbers of the column's own kind, so that its index is used; no bound lets NaN through."""
    low = -LARGEST if least is None else max(least, -LARGEST)
    high = LARGEST if most is None else min(most, LARGEST)
    if isinstance(column.type, sa.Integer):
        low, high = max(low, -LARGEST_INT), min(high, LARGEST_INT)
        return math.ceil(low), math.floor(high)
    return sa.literal(low, sa.Float), sa.literal(high, sa.Float)


def _text_filter(text: str) -> _Filter:
    """Runs whose prompt, name, note, method or target has this text somewhere."""
    folded = fold(text)

    def having(key: sa.Column[str]) -> sa.Select[Any]:
        return sa.select(key).where(key.table.c.folded.contains(folded, autoescape=True))

    ways = {
        runs.c.prompt_id: having(prompt_texts.c.prompt_id),
        runs.c.id: having(remarks.c.run_id),
        runs.c.method_title: having(titles.c.title),
        runs.c.target: having(titles.c.title),
    }
    ids = sa.union_all(*(sa.select(runs.c.id).where(of.in_(its)) for of, its in ways.items()))
    tests = sa.or_(*(Unindexed(of).in_(its) for of, its in ways.items()))
    return _Filter(runs.c.id.in_(ids), tests, ids.subquery())


def finite(column: sa.ColumnElement[Any]) -> sa.ColumnElement[Any]:
    """The column where it is a finite number, else NULL: databases order NaN above all numbers."""
    largest = sa.literal(LARGEST, sa.Float)
    return sa.case((sa.and_(column <= largest, column >= -largest), column), else_=None)


def check(rule: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise StorageError(f"{rule} one of {', '.join(allowed)}, got {value!r:.80}.")


def conditions(query: RunQuery) -> list[sa.ColumnElement[bool]]:
    """What the filters ask of runs that come by another way."""
    return [*_shown(query), *(one.tests for one in _filters(query).values())]


def _shown(query: RunQuery) -> list[sa.ColumnElement[bool]]:
    hidden = not (query.only_deleted or query.include_deleted)
    return [runs.c.deleted_at.is_(None)] if hidden else []


class _Way(NamedTuple):
    """How the runs of a query are found.

    Attributes:
        few: whether they are so few that all are read.
        least: so many runs there are at least.
    """

    where: list[sa.ColumnElement[bool]]
    few: bool
    least: int


def way_of(connection: sa.Connection, query: RunQuery) -> _Way:
    """By the filter that lets the fewest runs through; where all let many through, by the order.

    Databases guess which is better, and guess wrong where a limit and a filter meet.
    """
    filters, shown = _filters(query), _shown(query)

    def where(by: str) -> list[sa.ColumnElement[bool]]:
        return [*shown, *(f.finds if name == by else f.tests for name, f in filters.items())]

    def together(by: str) -> int:
        return _count(connection, sa.select(runs.c.id).where(*where(by)).subquery())

    nums = {name: _count(connection, one.ids) for name, one in filters.items()}
    by = min(nums, key=lambda name: nums[name], default="")
    num, least = nums.get(by, 0), 0
    if not filters:
        num = least = together("")
    elif num > COUNTED and len(filters) > 1 and {"target"} <= set(filters) <= set(FILTERED):
        # Each lets many through, all together perhaps none: that an index tells.
        by = "target"
        num = least = together(by)
    if num > COUNTED:
        orders = (query.sort, *(("method_title",) if query.sort == "created_at" else ()))
        by = next((name for name in orders if name in filters), "")
    return _Way(where(by), num <= COUNTED, least)


def _count(connection: sa.Connection, ids: sa.FromClause) -> int:
    """How many there are; counted to a little more than `COUNTED`."""
    some = sa.select(sa.literal(1)).select_from(ids).limit(COUNTED + 1).subquery()
    return connection.scalar(sa.select(sa.func.count()).select_from(some)) or 0


# ---- pages and runs


def _keys(query: RunQuery) -> list[sa.Column[Any]]:
    check("Runs must be sorted by", query.sort, SORT_KEYS)
    return [runs.c[name] for name in ORDERS[query.sort]]


def order_of(query: RunQuery) -> list[sa.ColumnElement[Any]]:
    edge = sa.desc if query.descending else sa.asc
    return [edge(key).nulls_last() if key.nullable else edge(key) for key in _keys(query)]


def in_order(
    connection: sa.Connection, query: RunQuery, where: Sequence[Any], skipped: Mapping[str, Any]
) -> Iterator[sa.Row[Any]]:
    """Ids and experiments of runs in their order, those with no value last.

    Args:
        skipped: experiments that are left out from the next batch on.
    """
    edge, keys = (sa.desc if query.descending else sa.asc), _keys(query)
    first = keys[0]
    parts = [(where, keys)]
    if first.nullable:
        parts = [([*where, first.is_not(None)], keys), ([*where, first.is_(None)], keys[1:])]
    for its, by in parts:
        wanted = sa.select(runs.c.id, runs.c.experiment, *by[:-1]).where(*its)
        ordered, size = wanted.order_by(*map(edge, by)), min(FIRST, BATCH)
        after: list[Any] = []
        while True:
            left_out = sa.or_(runs.c.experiment.is_(None), runs.c.experiment.not_in(skipped))
            more = ordered.where(*after, *([left_out] if skipped else ())).limit(size)
            rows = connection.execute(more).all()
            yield from rows
            if len(rows) < size:
                break
            size = min(4 * size, BATCH)
            last = [sa.literal(rows[-1]._mapping[key.name], key.type) for key in by]
            here, there = sa.tuple_(*by), sa.tuple_(*last)
            after = [here < there if query.descending else here > there]


def page_of(
    connection: sa.Connection, query: RunQuery, *, fold: bool = False
) -> tuple[list[str], int, bool]:
    """The ids of a page, how many rows there are at least, and whether these are all.

    Args:
        fold: of every experiment take only the run that comes first.

    Raises:
        StorageError: limit or offset out of range, or no such sort key.
    """
    if not 1 <= query.limit <= MAX_PAGE or query.offset < 0:
        raise StorageError(
            f"A page must have limit in [1, {MAX_PAGE}] and offset ≥ 0, "
            f"got {query.limit} and {query.offset}."
        )
    way = way_of(connection, query)
    found: dict[str, str] = {}
    skipped: dict[str, None] = {}
    if way.few:
        wanted = sa.select(runs.c.id, runs.c.experiment).where(*way.where)
        rows: Iterable[sa.Row[Any]] = connection.execute(wanted.order_by(*order_of(query)))
    else:
        rows = in_order(connection, query, way.where, skipped)
    end = query.offset + query.limit
    whole = True
    for row in rows:
        if fold and row.experiment is not None:
            found.setdefault(row.experiment, row.id)
            if len(skipped) < MAX_SKIPPED:
                skipped[row.experiment] = None
        else:
            found[row.id] = row.id
        if len(found) > end and not way.few:
            whole = False
            break
    least = len(found) if whole else max(end, 0 if fold else way.least - 1)
    return list(found.values())[query.offset : end], least, whole
