"""Facts about one run, changes of one or several runs, and requests that repeat a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from engine.config import Limits, Sampling, Settings
from engine.model.chat_template import system_text
from playground.host.catalog import Catalog, stored_config
from playground.host.live import RunId
from playground.host.request import DTYPES, GenerateRequest
from playground.runs.query import RunIds, Text
from playground.runs.settings import flatten, machine, short
from storage import (
    MAX_NAME_CHARS,
    MAX_NOTE_CHARS,
    MAX_TAG_CHARS,
    MAX_TAGS,
    RunDetail,
    RunLog,
)


def _clean(tags: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(tag.strip() for tag in tags if tag.strip()))


Tags = Annotated[
    tuple[Annotated[Text, Field(max_length=MAX_TAG_CHARS)], ...],
    Field(strict=False, max_length=MAX_TAGS),
    AfterValidator(_clean),
]


class Annotation(Settings, str_strip_whitespace=True):
    """New name, note or tags of a run; None leaves a field unchanged."""

    id: RunId
    name: Annotated[Text, Field(max_length=MAX_NAME_CHARS)] | None = None
    note: Annotated[str, Field(max_length=MAX_NOTE_CHARS, pattern=r"^[^\x00]*$")] | None = None
    tags: Tags | None = None

    def apply(self, log: RunLog) -> None:
        """Raises StorageError: no such run."""
        log.annotate(self.id, name=self.name, note=self.note, tags=self.tags)


class Selection(Settings):
    """Selected runs, and a change that applies to all of them."""

    ids: Annotated[RunIds, Field(min_length=1)]
    add: Tags = ()
    remove: Tags = ()
    deleted: bool | None = None

    def apply(self, log: RunLog) -> None:
        """Raises StorageError: a run gets too many tags, or one to hide is not in the log."""
        if self.add or self.remove:
            log.retag(self.ids, add=self.add, remove=self.remove)
        if self.deleted is not None:
            log.set_deleted(self.ids, self.deleted)


def split_tags(text: str | None) -> tuple[str, ...]:
    """Sorted tags from a comma-separated text; an empty box may be None."""
    return tuple(sorted(_clean(tuple((text or "").split(",")))))


def facts(run: RunDetail) -> dict[str, Sequence[tuple[str, str]]]:
    """All settings and the environment of a run: tables of names and short texts, by title."""
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
        "steps": run.num_steps or None,
        "benchmark": run.experiment_id,
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


# ---- run again


def request_again(catalog: Catalog, run: RunDetail) -> GenerateRequest:
    """A request that repeats a run: the same prompt, conversation and settings.

    Raises ConfigError: the target or a setting no longer exists.
    """
    return replace(request_of(catalog, run), repeats=run.id, compares_with_plain=True)


def request_of(catalog: Catalog, run: RunDetail) -> GenerateRequest:
    """A request with a run's settings and prompt; of a chat, its last user message.

    Raises ConfigError: the target, the method or a setting no longer exists.
    """
    return GenerateRequest(
        target=catalog.target(run.target),
        dtype=run.dtype if run.dtype in DTYPES else "auto",
        title=run.method_title,
        config=stored_config(run.method, catalog.types),
        sampling=Sampling.parse(run.sampling),
        limits=Limits.parse(run.limits),
        mode="chat" if run.messages or not run.prompt_text else "raw",
        system=system_text(run.messages),
        prompt=run.prompt_text,
    )
