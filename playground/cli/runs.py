"""`specdec runs`: `list`, `export`, `import`, `erase`, `copy`."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from typing import Any

from engine.errors import ConfigError
from engine.figures import FIGURES
from playground.cli.commands import (
    CopyOptions,
    EraseOptions,
    ExportRunsOptions,
    ImportRunsOptions,
    ListOptions,
)
from playground.cli.inputs import open_log
from playground.cli.options import FilterOptions, LogOptions
from playground.cli.streams import echo, note
from playground.cli.terminal import Terminal, progress_bar
from playground.runs.query import TableQuery, read_filters
from playground.runs.transfer import (
    ImportCounts,
    Kind,
    export_runs,
    export_stream,
    import_runs,
    read_lines,
    run_values,
)
from storage import RunQuery, RunSummary, copy_log

DELETED = "deleted"


def list_(options: ListOptions) -> None:
    """Print runs, the newest first."""
    query = _query(
        options, sort=options.sort, descending=not options.ascending, limit=options.limit
    )
    with open_log(options) as log:
        page = log.find(query)
    if options.as_json:
        echo(json.dumps([run_values(run) for run in page.rows], indent=2))
        return
    for run in page.rows:
        echo(_line(run))
    count = f"{len(page.rows)} of {page.total:,} runs"
    note(count if page.total else "No run matches.")


def _query(options: FilterOptions, **more: Any) -> RunQuery:
    """Raises ConfigError: an unknown status, or a malformed filter."""
    is_deleted = options.status == DELETED
    values: dict[str, Any] = {
        "text": options.search,
        "status": None if is_deleted else options.status,
        "deleted": is_deleted,
        **read_filters(options.filters),
    }
    return TableQuery.parse(values).run_query(**more)


def _line(run: RunSummary) -> str:
    title = " ".join((run.name or run.prompt_text).split())[:50]
    tags = "".join(f" #{tag}" for tag in run.tags)
    tok_s, mat = FIGURES["tok_s"].text(run.tok_s), FIGURES["mat"].text(run.mat)
    return (
        f"{run.id:16}  {run.created_at.astimezone():%Y-%m-%d %H:%M}  {run.status:11}  "
        f"{tok_s:>7} tok/s  MAT {mat:>5}  "
        f"{run.method_title[:24]:24}  {run.target[:24]:24}  {title}{tags}"
    )


def export(options: ExportRunsOptions) -> None:
    """Write runs to a file, oldest first: JSON has all of them, with every step."""
    file, chosen_ids = options.file, tuple(options.ids or ())
    kind: Kind = "csv" if file.suffix == ".csv" else "json"
    with open_log(options) as log:
        query = _query(options, sort="created_at", descending=False, ids=chosen_ids or None)
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


def import_(options: ImportRunsOptions) -> None:
    """Add exported runs to the log; a run that is here already is left as it is."""
    with open_log(options) as log:
        for file in options.files:
            *_, total = ImportCounts(), *import_runs(log, read_lines(file))
            echo(f"{file}: {total.added} runs imported, {total.present} were already here")


def erase(options: EraseOptions) -> None:
    """Erase the deleted runs, which are only hidden until then, and free their space."""
    with open_log(options) as log:
        ids = log.ids(RunQuery(ids=tuple(options.ids) if options.ids else None, deleted=True))
        if missing := sorted({*(options.ids or ())} - {*ids}):
            raise ConfigError(f"{missing[0]!r:.60} must be a deleted run. Delete it on the page.")
        echo(f"{log.erase(ids)} runs erased")


def copy(options: CopyOptions) -> None:
    """Copy a log into another: runs, benchmarks, measurements, sweeps. Again adds what is new."""
    with (
        open_log(LogOptions(db=options.source)) as source,
        open_log(LogOptions(db=options.into)) as into,
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
