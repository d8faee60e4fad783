"""Export and import of runs for the browser, in parts: it shows progress and may stop between."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from engine.errors import ConfigError
from playground.runs.query import read_ids, read_mapping, read_query
from playground.runs.transfer import (
    HEAD,
    TAIL,
    parse_run,
    read_lines,
    run_line,
    runs_header,
    runs_row,
    steps_header,
    steps_row,
)
from storage import Arrival, RunLog, StoredRun

MAX_PART_CHARS = 4_000_000
"""A part ends with the run that reaches this."""
MAX_IMPORT_CHARS = 32_000_000
MAX_LINES = 1000
KINDS = ("json", "csv", "steps")


def export_start(log: RunLog, asked: Any) -> dict[str, Any]:
    """Which runs an export takes, oldest first, and what stands around its parts.

    `query` as for the table; `kind` is json (whole runs), csv (a line per run) or steps (a line per
    step).

    Raises:
        ConfigError: the question is malformed.
    """
    raw = read_mapping("The question", asked)
    kind = _kind(raw.get("kind"))
    query = {**read_mapping("query", raw.get("query")), "sort": "created_at", "descending": False}
    head = {"json": HEAD, "csv": runs_header(), "steps": steps_header()}[kind]
    return {
        "ids": list(log.ids(read_query(query))),
        "head": head,
        "between": ",\n" if kind == "json" else "",
        "tail": TAIL if kind == "json" else "",
    }


def export_part(log: RunLog, asked: Any) -> dict[str, Any]:
    """The next runs of an export as texts; `num_runs` says how many of `ids` they are.

    Raises:
        ConfigError: the question is malformed.
    """
    raw = read_mapping("The question", asked)
    kind, ids = _kind(raw.get("kind")), read_ids(raw.get("ids"))
    texts: list[str] = []
    size = 0
    for number, run_id in enumerate(ids, start=1):
        stored = log.read_whole(run_id)
        if stored is not None:
            texts.append(_texts[kind](stored))
            size += len(texts[-1])
        if size >= MAX_PART_CHARS:
            return {"texts": texts, "num_runs": number}
    return {"texts": texts, "num_runs": len(ids)}


def import_part(log: RunLog, asked: Any) -> dict[str, Any]:
    """Add runs: `lines` of an export, or the `text` of a whole one.

    All runs of a part are added, or none of them.

    Raises:
        ConfigError: malformed; names the run.
        StorageError: the log refuses a value.
    """
    raw = read_mapping("The import", asked)
    runs = list(_runs(raw))
    return summary_of(log.write_whole(runs))


def summary_of(arrivals: Sequence[Arrival]) -> dict[str, Any]:
    """How many runs were added, were known, and got a new id."""
    return {
        "added": sum(arrival.kind == "added" for arrival in arrivals),
        "known": sum(arrival.kind == "known" for arrival in arrivals),
        "renamed": [[a.given_id, a.id] for a in arrivals if a.kind == "renamed"],
    }


def _runs(raw: Any) -> Iterator[StoredRun]:
    lines, text = raw.get("lines"), raw.get("text")
    if isinstance(lines, list) and all(isinstance(line, str) for line in lines):
        start = raw.get("start", 1)
        if len(lines) > MAX_LINES or sum(map(len, lines)) > MAX_IMPORT_CHARS:
            raise ConfigError("The part is too large. Import the file with `app.py runs import`.")
        if not isinstance(start, int):
            raise ConfigError(f"start must be a number, got {start!r:.40}.")
        for number, line in enumerate(lines, start=start):
            yield parse_run(line, number)
    elif isinstance(text, str):
        if len(text) > MAX_IMPORT_CHARS:
            raise ConfigError("The file is too large. Import it with `app.py runs import`.")
        yield from read_lines(text.splitlines(keepends=True))
    else:
        raise ConfigError("An import must have lines or text.")


def _kind(raw: object) -> str:
    if raw not in KINDS:
        raise ConfigError(f"kind must be one of {', '.join(KINDS)}, got {raw!r:.40}.")
    return str(raw)


def _steps(stored: StoredRun) -> str:
    return "".join(steps_row(stored.run.id, step) for step in stored.steps)


_texts: dict[str, Callable[[StoredRun], str]] = {
    "json": run_line,
    "csv": lambda stored: runs_row(stored.run),
    "steps": _steps,
}
