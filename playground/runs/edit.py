"""What the Runs page changes of runs: name, note, tags, deleted or not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from engine.errors import ConfigError
from playground.host.request import read_run_id
from playground.runs.query import read_ids, read_mapping, read_text
from storage import RunLog
from storage.edits import MAX_NAME_CHARS, MAX_NOTE_CHARS
from storage.marks import MAX_TAG_CHARS, MAX_TAGS

Change = Callable[[RunLog, Mapping[str, Any]], None]


def edit(log: RunLog, asked: Any) -> dict[str, Any]:
    """Make one change; `do` says which.

    Raises:
        ConfigError: the request is malformed.
        StorageError: no such run.
    """
    raw = read_mapping("The change", asked)
    name = raw.get("do")
    change = CHANGES.get(name) if isinstance(name, str) else None
    if change is None:
        raise ConfigError(f"do must be one of {', '.join(CHANGES)}, got {name!r:.40}.")
    change(log, raw)
    return {"done": name}


def read_tags(raw: object) -> tuple[str, ...]:
    """Tags without repeats and spaces around them.

    Raises:
        ConfigError: no list of tags, or too many.
    """
    if not isinstance(raw, list | tuple) or len(raw) > MAX_TAGS:
        raise ConfigError(f"tags must be a list of at most {MAX_TAGS} tags.")
    tags = [read_text("tag", tag, most=MAX_TAG_CHARS).strip() for tag in raw]
    return tuple(dict.fromkeys(tag for tag in tags if tag))


def _some(raw: Mapping[str, Any]) -> Sequence[str]:
    ids = read_ids(raw.get("ids"))
    if not ids:
        raise ConfigError("No run is ticked.")
    return ids


def _rename(log: RunLog, raw: Mapping[str, Any]) -> None:
    name = read_text("name", raw.get("name"), most=MAX_NAME_CHARS)
    log.rename(read_run_id(raw.get("id")), name.strip())


def _note(log: RunLog, raw: Mapping[str, Any]) -> None:
    note = read_text("note", raw.get("note"), most=MAX_NOTE_CHARS)
    log.set_note(read_run_id(raw.get("id")), note.strip())


def _tags(log: RunLog, raw: Mapping[str, Any]) -> None:
    log.set_tags(read_run_id(raw.get("id")), read_tags(raw.get("tags")))


def _retag(log: RunLog, raw: Mapping[str, Any]) -> None:
    add, remove = read_tags(raw.get("add", [])), read_tags(raw.get("remove", []))
    log.retag(_some(raw), add=add, remove=remove)


CHANGES: Mapping[str, Change] = {
    "rename": _rename,
    "note": _note,
    "tags": _tags,
    "retag": _retag,
    "delete": lambda log, raw: log.delete(*_some(raw)),
    "restore": lambda log, raw: log.restore(*_some(raw)),
}
