"""Finding runs by their words, whatever the case, in any script."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import sqlalchemy as sa

from storage.columns import Unindexed
from storage.identity import fold
from storage.schema import prompt_texts, remarks, run_details, runs, titles


def matches(text: str) -> sa.ColumnElement[bool]:
    """Runs whose prompt, name, note, method or target has this text somewhere."""
    folded = fold(text)

    def having(key: sa.Column[str], searched: sa.Column[str]) -> sa.Select[Any]:
        return sa.select(key).where(searched.contains(folded, autoescape=True))

    named = having(titles.c.title, titles.c.folded)
    return sa.or_(
        Unindexed(runs.c.prompt_id).in_(having(prompt_texts.c.prompt_id, prompt_texts.c.folded)),
        Unindexed(runs.c.id).in_(having(remarks.c.run_id, remarks.c.folded)),
        Unindexed(runs.c.method_title).in_(named),
        Unindexed(runs.c.target).in_(named),
    )


def write_prompts(connection: sa.Connection, texts: Mapping[str, str]) -> None:
    """Make prompts findable by their ids; each is kept once."""
    _write_missing(connection, prompt_texts.c.prompt_id, texts)


def write_titles(connection: sa.Connection, names: Iterable[str]) -> None:
    """Make the names of targets and methods findable."""
    _write_missing(connection, titles.c.title, {name: name for name in names})


def _write_missing(
    connection: sa.Connection, key: sa.Column[str], texts: Mapping[str, str]
) -> None:
    here = set(connection.execute(sa.select(key).where(key.in_(list(texts)))).scalars())
    for name, text in texts.items():
        if name in here:
            continue
        new = key.table.insert().values({key.name: name, "folded": fold(text)})
        try:
            with connection.begin_nested():
                connection.execute(new)
        except sa.exc.IntegrityError:
            continue  # another process wrote it in between


def write_remark(connection: sa.Connection, run_id: str) -> None:
    """Make a run's name and note findable as they are now."""
    connection.execute(remarks.delete().where(remarks.c.run_id == run_id))
    wanted = sa.select(runs.c.name, run_details.c.note).join_from(runs, run_details)
    name, note = connection.execute(wanted.where(runs.c.id == run_id)).one()
    if name or note:
        folded = fold(f"{name}\n{note}")
        connection.execute(remarks.insert().values(run_id=run_id, folded=folded))
