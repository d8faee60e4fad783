"""What `app.py runs` does with the log: prints, exports, imports, tags and deletes runs."""

from __future__ import annotations

import gzip
import io
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast, get_args

import typer

from engine.errors import ConfigError, PlaygroundError
from playground.host import paths
from playground.runs.transfer import (
    read_lines,
    run_values,
    runs_header,
    runs_row,
    steps_header,
    steps_row,
    take_in,
    write_json,
)
from storage import RunLog, RunQuery, RunSummary, StorageError
from storage.filters import SortKey
from storage.records import Status

EXIT_USER_ERROR = 2
GZIP_MAGIC = b"\x1f\x8b"
DELETED = "deleted"


@dataclass(frozen=True, slots=True)
class Choice:
    """Which runs, as given on the command line."""

    search: str = ""
    target: str | None = None
    method: str | None = None
    status: str | None = None
    tag: str | None = None
    labels: tuple[str, ...] = ()
    benchmark: str | None = None
    ids: tuple[str, ...] = ()

    def query(self, **more: Any) -> RunQuery:
        """The question to the log.

        Raises:
            ConfigError: a status that there is not, or a label without a value.
        """
        known = (*get_args(Status), DELETED)
        if self.status is not None and self.status not in known:
            raise ConfigError(f"--status must be one of {', '.join(known)}, got {self.status!r}.")
        deleted = self.status == DELETED
        return RunQuery(
            text=self.search,
            target=self.target,
            method_title=self.method,
            status=None if deleted else cast(Status | None, self.status),
            tag=self.tag,
            labels=dict(_label(item) for item in self.labels),
            benchmark_id=self.benchmark,
            ids=self.ids or None,
            only_deleted=deleted,
            **more,
        )


def _label(item: str) -> tuple[str, str]:
    key, equals, value = item.partition("=")
    if not (key and equals):
        raise ConfigError(f"--label takes KEY=VALUE, got {item!r:.80}.")
    return key, value


@contextmanager
def _log(db: str | None) -> Iterator[RunLog]:
    """The log; our own errors end the command with one line on stderr."""
    try:
        log = RunLog.open(db or str(paths.run_log()))
        try:
            yield log
        finally:
            log.close()
    except (PlaygroundError, StorageError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(EXIT_USER_ERROR) from error


def run_list(
    db: str | None, choice: Choice, *, sort: str, descending: bool, limit: int, as_json: bool
) -> None:
    """Print runs as a table or as JSON."""
    with _log(db) as log:
        query = choice.query(sort=cast(SortKey, sort), descending=descending, limit=limit)
        page = log.find(query)
    if as_json:
        typer.echo(json.dumps([run_values(run) for run in page.rows], indent=2))
        return
    for run in page.rows:
        typer.echo(_line(run))
    shown = f"{len(page.rows)} of {page.total} runs"
    typer.echo(shown if page.total else "No run matches.", err=True)


def _line(run: RunSummary) -> str:
    def show(value: float | None, digits: int) -> str:
        return "–" if value is None else f"{value:.{digits}f}"

    words = " ".join((run.name or run.prompt_text).split())[:50]
    tags = "".join(f" #{tag}" for tag in run.tags)
    return (
        f"{run.id:16}  {run.created_at.astimezone():%Y-%m-%d %H:%M}  {run.status:11}  "
        f"{show(run.tok_s, 1):>7} tok/s  MAT {show(run.mat, 2):>5}  "
        f"{run.method_title[:24]:24}  {run.target[:24]:24}  {words}{tags}"
    )


def run_export(db: str | None, choice: Choice, file: Path, *, steps: bool) -> None:
    """Write runs to a file; one that is not finished is not left behind.

    Raises:
        typer.Exit: the file cannot be written, or no run matches.
    """
    is_csv = file.suffix == ".csv"
    with _log(db) as log:
        if steps and not is_csv:
            raise ConfigError("--steps is for FILE.csv; JSON has the steps anyway.")
        ids = log.ids(choice.query(sort="created_at", descending=False))
        if missing := sorted(set(choice.ids) - set(ids)):
            raise ConfigError(f"No run {missing[0]!r:.60} is in the log, or it is deleted.")
        if not ids:
            raise ConfigError("No run matches; nothing was written.")
        with _writing(file) as stream:
            done = _csv(log, ids, stream, steps=steps) if is_csv else write_json(log, ids, stream)
            for number in done:
                _progress("exported", number, len(ids))
    typer.echo(f"{len(ids)} runs written to {file}", err=True)


@contextmanager
def _writing(file: Path) -> Iterator[IO[str]]:
    """A text stream into a file that appears only when all is written."""
    if str(file) == "-":
        yield sys.stdout
        return
    part = file.with_name(f".{file.name}.part")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        opener = gzip.open if file.suffix == ".gz" else open
        with cast(Any, opener)(part, "wt", encoding="utf-8", newline="\n") as stream:
            yield stream
        os.replace(part, file)
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror or error}.") from error
    finally:
        with suppress(OSError):
            part.unlink()


def _csv(log: RunLog, ids: Sequence[str], stream: IO[str], *, steps: bool) -> Iterator[int]:
    stream.write(steps_header() if steps else runs_header())
    for number, run_id in enumerate(ids, start=1):
        stored = log.read_whole(run_id)
        if stored is not None and steps:
            stream.writelines(steps_row(run_id, step) for step in stored.steps)
        elif stored is not None:
            stream.write(runs_row(stored.run))
        yield number


def run_import(db: str | None, files: Sequence[Path]) -> None:
    """Add the runs of exported files."""
    with _log(db) as log:
        for file in files:
            counts = {"added": 0, "known": 0, "renamed": 0}
            with _reading(file) as stream:
                for batch in take_in(log, read_lines(stream)):
                    for arrival in batch:
                        counts[arrival.kind] += 1
                        if arrival.kind == "renamed":
                            typer.echo(
                                f"{arrival.given_id}: another run has this id; "
                                f"imported as {arrival.id}"
                            )
            typer.echo(
                f"{file}: {counts['added'] + counts['renamed']} runs imported, "
                f"{counts['known']} were here already"
            )


@contextmanager
def _reading(file: Path) -> Iterator[IO[str]]:
    """A text stream out of a file, gzip or not."""
    try:
        with file.open("rb") as raw:
            packed = raw.read(2) == GZIP_MAGIC
            raw.seek(0)
            with gzip.open(raw) if packed else raw as plain:
                yield io.TextIOWrapper(cast(Any, plain), encoding="utf-8")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}.") from error


def _progress(word: str, number: int, total: int) -> None:
    if sys.stderr.isatty():
        end = "\n" if number == total else ""
        typer.echo(f"\r{word} {number} of {total}{end}", nl=False, err=True)


def run_tag(
    db: str | None, ids: Sequence[str], *, add: Sequence[str], remove: Sequence[str]
) -> None:
    """Add and remove tags."""
    with _log(db) as log:
        if not add and not remove:
            raise ConfigError("Name a tag with --add or --remove.")
        log.retag(ids, add=add, remove=remove)
    typer.echo(f"{len(set(ids))} runs tagged", err=True)


def run_delete(db: str | None, ids: Sequence[str], *, restore: bool) -> None:
    """Hide runs, or show them again."""
    with _log(db) as log:
        (log.restore if restore else log.delete)(*ids)
    typer.echo(f"{len(set(ids))} runs {'restored' if restore else 'deleted'}", err=True)
