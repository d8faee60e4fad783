"""A `RunQuery` as SQL: filtering, sorting and paging happen in the database."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from storage.errors import StorageError
from storage.filters import Figure, RunQuery, SortKey, names_of
from storage.schema import labels, run_details, runs, tags
from storage.search import matches

MAX_PAGE = 1000
SORT_KEYS = names_of(SortKey)
FIGURES = names_of(Figure)
SHORT_PROMPT = 200
ESCAPED = 6
"""Characters that one character of the prompt may take in the database."""
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
)


def ids_statement(query: RunQuery) -> sa.Select[Any]:
    """The page's ids; the id breaks ties, so that paging never shows a run twice.

    Raises:
        StorageError: limit or offset out of range, or no such sort key.
    """
    if not 1 <= query.limit <= MAX_PAGE or query.offset < 0:
        raise StorageError(
            f"A page must have limit in [1, {MAX_PAGE}] and offset ≥ 0, "
            f"got {query.limit} and {query.offset}."
        )
    return all_ids_statement(query).limit(query.limit).offset(query.offset)


def all_ids_statement(query: RunQuery) -> sa.Select[Any]:
    """The ids of all that the filters let through, in order."""
    return sa.select(runs.c.id).where(*conditions(query)).order_by(*_order(query))


def page_statement(query: RunQuery) -> sa.Select[Any]:
    """The page's rows; only they are read in full."""
    page = ids_statement(query).subquery()
    return summaries_statement().join(page, page.c.id == runs.c.id).order_by(*_order(query))


def summaries_statement() -> sa.Select[Any]:
    """Everything that the table of runs shows of them."""
    start = sa.func.substr(run_details.c.prompt_text, 1, SHORT_PROMPT * ESCAPED)
    shown = [run_details.c[name] for name in ("method", "sampling", "limits", "note")]
    short = sa.type_coerce(start, run_details.c.prompt_text.type).label("prompt_text")
    return sa.select(runs, *shown, short).join_from(runs, run_details)


def count_statement(query: RunQuery) -> sa.Select[Any]:
    """How many runs the filters let through."""
    return sa.select(sa.func.count()).select_from(runs).where(*conditions(query))


def _order(query: RunQuery) -> tuple[sa.ColumnElement[Any], ...]:
    if query.sort not in SORT_KEYS:
        allowed = ", ".join(SORT_KEYS)
        raise StorageError(f"Runs must be sorted by one of {allowed}, got {query.sort!r:.80}.")
    column = runs.c[query.sort]
    order = column.desc() if query.descending else column.asc()
    if column.nullable:
        order = order.nulls_last()
    return order, runs.c.id.desc() if query.descending else runs.c.id.asc()


def conditions(query: RunQuery) -> list[sa.ColumnElement[bool]]:
    """What the filters ask of a run.

    Raises:
        StorageError: a range is of no figure.
    """
    found: list[sa.ColumnElement[bool]] = []
    if query.only_deleted:
        found.append(runs.c.deleted_at.is_not(None))
    elif not query.include_deleted:
        found.append(runs.c.deleted_at.is_(None))
    for key in EQUAL:
        value = getattr(query, key)
        if value is not None:
            found.append(runs.c[key] == value)
    if query.ids is not None:
        found.append(runs.c.id.in_(query.ids))
    if query.tag is not None:
        found.append(runs.c.id.in_(sa.select(tags.c.run_id).where(tags.c.tag == query.tag)))
    for key, value in query.labels.items():
        same = (labels.c.key == key) & (labels.c.value == value)
        found.append(runs.c.id.in_(sa.select(labels.c.run_id).where(same)))
    for figure, (least, most) in query.ranges.items():
        found += _range(figure, least, most)
    if query.text:
        found.append(matches(query.text))
    return found


def _range(figure: str, least: float | None, most: float | None) -> list[sa.ColumnElement[bool]]:
    if figure not in FIGURES:
        allowed = ", ".join(FIGURES)
        raise StorageError(f"A range must be of one of {allowed}, got {figure!r:.80}.")
    number = finite(runs.c[figure])
    found: list[sa.ColumnElement[bool]] = [number.is_not(None)]
    if least is not None:
        found.append(number >= least)
    if most is not None:
        found.append(number <= most)
    return found


def finite(column: sa.ColumnElement[Any]) -> sa.ColumnElement[Any]:
    """The column where it is a finite number, else NULL.

    Both databases order NaN above every number (in SQLite it is a text, see `storage.columns`).
    """
    largest = sa.literal(1.7e308, sa.Float)
    return sa.case((sa.and_(column <= largest, column >= -largest), column), else_=None)
