"""Runs that have something in common, counted and averaged by the database."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import UTC
from typing import Any

import sqlalchemy as sa

from storage.columns import Unindexed
from storage.errors import StorageError
from storage.filters import (
    LABEL_PREFIX,
    Circumstance,
    Facets,
    GroupKey,
    RunGroup,
    RunQuery,
    Spread,
    names_of,
)
from storage.marks import read_marks
from storage.query import conditions, finite, summaries_statement
from storage.rows import summary_of
from storage.schema import benchmarks, labels, runs, tags

AVERAGED = ("tok_s", "mat", "ttft_s", "draft_acceptance")
GROUP_KEYS = names_of(GroupKey)
MAX_GROUPS = 500
MAX_VALUES = 50
MAX_FACETS = 200


def read_groups(
    connection: sa.Connection, query: RunQuery, by: str, limit: int
) -> tuple[RunGroup, ...]:
    """The largest groups, largest first.

    Raises:
        StorageError: no such thing to group by, or limit out of range.
    """
    if not 1 <= limit <= MAX_GROUPS:
        raise StorageError(f"limit must be in [1, {MAX_GROUPS}], got {limit}.")
    source, value = _grouped(by)
    sums = [
        total.label(f"{prefix}_{name}")
        for name in AVERAGED
        for prefix, total in _sums(runs.c[name]).items()
    ]
    count = sa.func.count().label("num_runs")
    newest, example = sa.func.max(runs.c.created_at), sa.func.max(runs.c.id)
    wanted = (
        sa.select(
            value.label("value"), count, newest.label("newest"), example.label("example"), *sums
        )
        .select_from(source)
        .where(*conditions(query))
        .group_by(value)
        .order_by(count.desc(), value)
        .limit(limit)
    )
    rows = connection.execute(wanted).all()
    examples = _examples(connection, [row.example for row in rows])
    return tuple(_group(row, examples[row.example]) for row in rows)


def _grouped(by: str) -> tuple[sa.FromClause, sa.ColumnElement[Any]]:
    """Where the groups are read from, and what tells them apart."""
    if by == "tag":
        return runs.outerjoin(tags, tags.c.run_id == runs.c.id), tags.c.tag
    if by.startswith(LABEL_PREFIX):
        key = by.removeprefix(LABEL_PREFIX)
        same = (labels.c.run_id == runs.c.id) & (labels.c.key == key)
        return runs.outerjoin(labels, same), labels.c.value
    if by not in GROUP_KEYS:
        allowed = ", ".join([*GROUP_KEYS, "tag", LABEL_PREFIX + "KEY"])
        raise StorageError(f"Runs must be grouped by one of {allowed}, got {by!r:.80}.")
    return runs, Unindexed(runs.c[by])


def _sums(column: sa.ColumnElement[Any]) -> dict[str, sa.ColumnElement[Any]]:
    number = finite(column)
    return {
        "n": sa.func.count(number),
        "sum": sa.func.sum(sa.type_coerce(number, sa.Float)),
        "squares": sa.func.sum(sa.type_coerce(number, sa.Float) * sa.type_coerce(number, sa.Float)),
    }


def _examples(connection: sa.Connection, ids: list[str]) -> Mapping[str, Any]:
    marks = read_marks(connection, ids)
    rows = connection.execute(summaries_statement().where(runs.c.id.in_(ids)))
    return {row.id: summary_of(row, marks[row.id]) for row in rows}


def _group(row: sa.Row[Any], example: Any) -> RunGroup:
    spreads = {name: _spread(row, name) for name in AVERAGED}
    return RunGroup(
        value=row.value,
        num_runs=row.num_runs,
        newest_at=row.newest.replace(tzinfo=UTC),
        example=example,
        figures={name: spread for name, spread in spreads.items() if spread is not None},
    )


def _spread(row: sa.Row[Any], name: str) -> Spread | None:
    num, total, squares = (getattr(row, f"{part}_{name}") for part in ("n", "sum", "squares"))
    if not num:
        return None
    variance = max(0.0, squares - total * total / num) / (num - 1) if num > 1 else None
    return Spread(total / num, None if variance is None else math.sqrt(variance), num)


def read_rates(
    connection: sa.Connection, prompt_ids: Sequence[str], **equal: str
) -> dict[Circumstance, Spread]:
    """tok/s of completed runs on these prompts, apart by target, prompt, dtype and device.

    Args:
        equal: what else must be so, by column.
    """
    circumstance = [runs.c[name] for name in Circumstance._fields]
    sums = [total.label(f"{prefix}_tok_s") for prefix, total in _sums(runs.c.tok_s).items()]
    counted: list[sa.ColumnElement[bool]] = [
        runs.c.prompt_id.in_(set(prompt_ids)),
        runs.c.deleted_at.is_(None),
    ]
    counted.append(runs.c.status == "completed")
    counted += [runs.c[name] == value for name, value in equal.items()]
    wanted = sa.select(*circumstance, *sums).where(*counted).group_by(*circumstance)
    found = {
        Circumstance(*row[:4]): _spread(row, "tok_s") for row in connection.execute(wanted).all()
    }
    return {where: spread for where, spread in found.items() if spread is not None}


def read_facets(connection: sa.Connection) -> Facets:
    """The different values of what can be filtered by."""

    def different(column: sa.Column[Any]) -> tuple[str, ...]:
        wanted = sa.select(column).distinct().order_by(column).limit(MAX_FACETS)
        return tuple(connection.execute(wanted).scalars())

    newest = sa.select(benchmarks.c.id, benchmarks.c.name).order_by(benchmarks.c.created_at.desc())
    return Facets(
        targets=different(runs.c.target),
        methods=different(runs.c.method_title),
        tags=different(tags.c.tag),
        labels={key: _values_of(connection, key) for key in different(labels.c.key)},
        benchmarks={row.id: row.name for row in connection.execute(newest.limit(MAX_FACETS))},
    )


def _values_of(connection: sa.Connection, key: str) -> tuple[str, ...]:
    values = sa.select(labels.c.value).where(labels.c.key == key).distinct()
    return tuple(connection.execute(values.order_by(labels.c.value).limit(MAX_VALUES)).scalars())
