"""Facts about one run, its annotation, and changes of several runs at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from engine.config import Settings
from playground.host.live import RunId
from playground.host.stream import stored_run as stored_run
from playground.runs.query import RunIds, Text
from playground.runs.settings import flatten, machine, short
from storage import MAX_NAME_CHARS, MAX_NOTE_CHARS, MAX_TAG_CHARS, MAX_TAGS, RunDetail, RunLog


def _clean(tags: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(tag.strip() for tag in tags if tag.strip()))


Tags = Annotated[
    tuple[Annotated[Text, Field(max_length=MAX_TAG_CHARS)], ...],
    Field(strict=False, max_length=MAX_TAGS),
    AfterValidator(_clean),
]


class Annotation(Settings):
    """New name, note or tags of a run; None leaves a field as it is."""

    id: RunId
    name: Annotated[Text, Field(max_length=MAX_NAME_CHARS)] | None = None
    note: Annotated[str, Field(max_length=MAX_NOTE_CHARS, pattern=r"^[^\x00]*$")] | None = None
    tags: Tags | None = None

    def apply(self, log: RunLog) -> None:
        """Raises StorageError: no such run."""
        if self.name is not None:
            log.rename(self.id, self.name.strip())
        if self.note is not None:
            log.set_note(self.id, self.note.strip())
        if self.tags is not None:
            log.set_tags(self.id, self.tags)


class Selection(Settings):
    """Ticked runs and a change that applies to all of them."""

    ids: Annotated[RunIds, Field(min_length=1)]
    add: Tags = ()
    remove: Tags = ()
    deleted: bool | None = None

    def apply(self, log: RunLog) -> None:
        """Raises StorageError: one of them is not in the log."""
        if self.add or self.remove:
            log.retag(self.ids, add=self.add, remove=self.remove)
        if self.deleted is not None:
            (log.delete if self.deleted else log.restore)(*self.ids)


def split_tags(text: str | None) -> tuple[str, ...]:
    """Tags as people type them, with commas between; in order. None is what an empty box may be."""
    return tuple(sorted(_clean(tuple((text or "").split(",")))))


def facts(run: RunDetail) -> dict[str, Sequence[tuple[str, str]]]:
    """All settings of a run and where it ran: tables of names and short texts, by title."""
    general = {
        "id": run.id,
        "began": run.created_at.isoformat(timespec="seconds"),
        "status": run.status,
        "ended by": run.finish_reason,
        "target": run.target,
        "dtype": run.dtype,
        "device": run.device,
        "prompt tokens": run.num_prompt_tokens,
        "new tokens": run.num_new_tokens,
        "steps": run.num_steps,
        "benchmark": run.benchmark_id,
    }
    tables: dict[str, dict[str, Any]] = {
        "run": {name: value for name, value in general.items() if value is not None},
        "method": flatten(run.method),
        "sampling and limits": {**run.sampling, **run.limits},
        "labels": dict(run.labels),
        "machine and versions": machine(run),
    }
    return {
        title: [(name, short(value)) for name, value in table.items()]
        for title, table in tables.items()
        if table
    }
