"""Facts about one run, its annotation, changes of several at once, and a run as a request again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from engine.config import Limits, Sampling, Settings
from engine.drafters.method import MethodConfig
from engine.errors import ConfigError, PromptError
from playground.host.catalog import TYPE_PREFIX, Catalog
from playground.host.live import RunId
from playground.host.request import DTYPES, GenerateRequest
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


# ---- run again


def request_again(catalog: Catalog, run: RunDetail) -> GenerateRequest:
    """The same prompt, conversation and settings once more.

    Raises:
        ConfigError: the target or a setting is not known here any more.
        PromptError: the run has no text to ask again.
    """
    if not run.messages and not run.prompt_text:
        raise PromptError(
            "This run's prompt was given as token ids. Repeat it with "
            "`app.py generate --prompt-ids …`; the ids are in its export."
        )
    return replace(
        request_of(catalog, run), system="", prompt="", repeats=run.id, compares_with_plain=True
    )


def request_of(catalog: Catalog, run: RunDetail) -> GenerateRequest:
    """A run's settings and prompt; of a chat, its last question.

    Raises ConfigError: the target, the method or a setting is not known here any more.
    """
    cls = catalog.types.get(run.decoding_type)
    if cls is None:
        raise ConfigError(
            f"The method {run.decoding_type!r:.60} of this run is not known here. "
            "Update the program to run it again."
        )
    config = cls.parse(run.method)
    system = next((m["content"] for m in run.messages if m.get("role") == "system"), "")
    return GenerateRequest(
        target=catalog.target(run.target),
        dtype=run.dtype if run.dtype in DTYPES else "auto",
        title=run.method_title,
        config=config,
        sampling=Sampling.parse(run.sampling),
        limits=Limits.parse(run.limits),
        mode="chat" if run.messages or not run.prompt_text else "raw",
        system=system,
        prompt=run.prompt_text,
    )


def nearest_method(catalog: Catalog, target: str, title: str, config: MethodConfig) -> str:
    """The entry of the method picker that is nearest to these settings.

    Raises ConfigError: the picker has none of this method.
    """
    keys = [key for _, key in catalog.method_choices(target)]
    same = [key for key in keys if type(catalog.method(key).config) is type(config)]
    if not same:
        raise ConfigError(
            f"The method {config.decoding_type} is not offered for {target}. "
            "Its weights may have to be named on the command line."
        )

    def rank(key: str) -> tuple[bool, bool, bool]:
        method = catalog.method(key)
        other_title = method.title != title
        other, is_type = method.config != config, key.startswith(TYPE_PREFIX)
        return other, other_title, is_type != other  # the picker hides a type that equals a preset

    return min(same, key=rank)
