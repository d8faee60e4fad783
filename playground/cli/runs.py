"""`specdec runs`: `list`, `export`, `import`, `erase`, `copy`."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from playground.cli.options import REQUIRED, LogOptions, argument, command, option
from playground.cli.streams import echo, note

if TYPE_CHECKING:
    from storage import RunQuery, RunSummary

DELETED = "deleted"
runs = typer.Typer(
    name="runs",
    help="List, export, import, erase and copy the runs of the log.",
    no_args_is_help=True,
)


@dataclass(kw_only=True)
class FilterOptions(LogOptions):
    """Which runs of the log."""

    search: str = option("", "Text in the prompt, name, note, method or target, ignoring case.")
    status: str | None = option(
        None, "completed, cancelled, failed, interrupted, running, or deleted: hidden until erased."
    )
    filters: list[str] = option(
        [],
        "Only these, such as target=NAME, method_title=TITLE, tag=TAG or label:KEY=VALUE; "
        "repeatable.",
        "--filter",
        metavar="FIELD=VALUE",
    )

    def query(self, **more: Any) -> RunQuery:
        """Raises ConfigError: an unknown status, or a malformed filter."""
        from playground.runs.query import TableQuery, read_filters

        is_deleted = self.status == DELETED
        values: dict[str, Any] = {
            "text": self.search,
            "status": None if is_deleted else self.status,
            "deleted": is_deleted,
            **read_filters(self.filters),
        }
        return TableQuery.parse(values).run_query(**more)


@dataclass(kw_only=True)
class ListOptions(FilterOptions):
    sort: str = option(
        "created_at", "Figure or field: created_at, tok_s, mat, ttft_s, num_steps, …"
    )
    ascending: bool = option(False, "Smallest first.", "--ascending")
    limit: int = option(20, "Maximum number of runs to print.", min=1, max=1000)
    as_json: bool = option(False, "Print JSON.", "--json")


@runs.command("list")
@command(ListOptions)
def list_(options: ListOptions) -> None:
    """Print runs, the newest first."""
    from playground.runs.transfer import run_values

    query = options.query(sort=options.sort, descending=not options.ascending, limit=options.limit)
    with options.open_log() as log:
        page = log.find(query)
    if options.as_json:
        echo(json.dumps([run_values(run) for run in page.rows], indent=2))
        return
    for run in page.rows:
        echo(_line(run))
    count = f"{len(page.rows)} of {page.total:,} runs"
    note(count if page.total else "No run matches.")


def _line(run: RunSummary) -> str:
    from engine.figures import FIGURES

    title = " ".join((run.name or run.prompt_text).split())[:50]
    tags = "".join(f" #{tag}" for tag in run.tags)
    tok_s, mat = FIGURES["tok_s"].text(run.tok_s), FIGURES["mat"].text(run.mat)
    return (
        f"{run.id:16}  {run.created_at.astimezone():%Y-%m-%d %H:%M}  {run.status:11}  "
        f"{tok_s:>7} tok/s  MAT {mat:>5}  "
        f"{run.method_title[:24]:24}  {run.target[:24]:24}  {title}{tags}"
    )


@dataclass(kw_only=True)
class ExportOptions(FilterOptions):
    file: Path = argument(
        REQUIRED, "FILE.json, FILE.json.gz or FILE.csv; - prints JSON.", metavar="FILE"
    )
    ids: list[str] | None = argument(None, "Only these runs.", metavar="ID…")


@runs.command()
@command(ExportOptions)
def export(options: ExportOptions) -> None:
    """Write runs to a file, oldest first: JSON has all of them, with every step."""
    from engine.errors import ConfigError
    from playground.cli.terminal import Terminal, progress_bar
    from playground.runs.transfer import Kind, export_runs, export_stream

    file, chosen_ids = options.file, tuple(options.ids or ())
    kind: Kind = "csv" if file.suffix == ".csv" else "json"
    with options.open_log() as log:
        query = options.query(sort="created_at", descending=False, ids=chosen_ids or None)
        ids = log.ids(query)
        if missing := sorted(set(chosen_ids) - set(ids)):
            raise ConfigError(f"No run {missing[0]!r:.60} is in the log, or it is deleted.")
        if not ids:
            raise ConfigError("No run matches; nothing was written.")
        with (
            nullcontext(sys.stdout) if str(file) == "-" else export_stream(file) as stream,
            progress_bar(Terminal(stderr=True), "exporting runs", len(ids)) as bar,
        ):
            for number in export_runs(log, ids, stream, kind):
                bar(number)
    note(f"{len(ids)} runs written to {file}")


@dataclass(kw_only=True)
class ImportOptions(LogOptions):
    files: list[Path] = argument(REQUIRED, "Exported JSON files.", metavar="FILE…", exists=True)


@runs.command("import")
@command(ImportOptions)
def import_(options: ImportOptions) -> None:
    """Add exported runs to the log; a run that is here already is left as it is."""
    from playground.runs.transfer import ImportCounts, import_runs, read_lines

    with options.open_log() as log:
        for file in options.files:
            *_, total = ImportCounts(), *import_runs(log, read_lines(file))
            echo(f"{file}: {total.added} runs imported, {total.present} were already here")


@dataclass(kw_only=True)
class EraseOptions(LogOptions):
    ids: list[str] | None = argument(None, "Only these deleted runs.", metavar="ID…")


@runs.command()
@command(EraseOptions)
def erase(options: EraseOptions) -> None:
    """Erase the deleted runs, which are only hidden until then, and free their space."""
    from engine.errors import ConfigError
    from storage import RunQuery

    with options.open_log() as log:
        ids = log.ids(RunQuery(ids=tuple(options.ids) if options.ids else None, deleted=True))
        if missing := sorted({*(options.ids or ())} - {*ids}):
            raise ConfigError(f"{missing[0]!r:.60} must be a deleted run. Delete it on the page.")
        echo(f"{log.erase(ids)} runs erased")


@dataclass(kw_only=True)
class CopyOptions:
    source: str | None = option(
        None, "Log to copy; default: the usual one.", "--from", metavar="URL"
    )
    into: str = option(REQUIRED, "Log to copy into; created if missing.", "--to", metavar="URL")


@runs.command()
@command(CopyOptions)
def copy(options: CopyOptions) -> None:
    """Copy a log into another: runs, benchmarks, measurements, sweeps. Again adds what is new."""
    from playground.cli.terminal import Terminal, progress_bar
    from storage import copy_log

    with (
        LogOptions(db=options.source).open_log() as source,
        LogOptions(db=options.into).open_log() as into,
        progress_bar(Terminal(stderr=True), "copying runs") as bar,
    ):
        for progress in copy_log(source, into):
            bar(progress.done, total=progress.total)
    echo(
        f"{progress.runs} runs copied, {progress.present} were already there; "
        f"{progress.benchmarks} experiments, {progress.artifacts} measurements and trials"
    )
    if progress.running:
        note(f"{progress.running} runs are still running. Copy again when they have ended.")
