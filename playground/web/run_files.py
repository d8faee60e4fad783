"""Export and import of runs on the Runs page."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, get_args

import gradio as gr

from engine.errors import ConfigError
from engine.formats import plural
from engine.safe_text import write_error_text
from playground.errors import Fault, attempt
from playground.runs.query import TableQuery
from playground.runs.transfer import (
    ImportCounts,
    Kind,
    export_runs,
    import_runs,
    open_text,
    read_lines,
)
from playground.web.access import MAX_UPLOAD_BYTES
from playground.web.forms import QUEUED, UNLABELLED, UNQUEUED
from playground.web.results import DOWNLOAD_JS, sentence_html
from storage import RunLog

KINDS = [
    ("JSON, whole runs", "json"),
    ("JSON, gzip", "json.gz"),
    ("CSV, one line per run", "csv"),
]
MAX_UNPACKED_CHARS = 25 * MAX_UPLOAD_BYTES


class RunFiles:
    """Buttons for export and import, and to stop either."""

    def __init__(self, log: RunLog, query: Callable[[Sequence[Any]], TableQuery]) -> None:
        self.log, self.query = log, query
        self.kind = gr.Dropdown(KINDS, label="Export as", elem_id="pg-runs-kind", **UNLABELLED)
        self.export = gr.Button("Export all", size="sm", elem_id="pg-runs-export")
        self.upload = gr.UploadButton(
            "Import …", size="sm", file_types=[".json", ".gz"], elem_id="pg-runs-import"
        )
        self.stop = gr.Button("Stop", size="sm", visible=False, elem_id="pg-runs-stop")
        self.file = gr.File(visible=False)

    def listen(self, inputs: list[Any], message: gr.HTML) -> Any:
        """Connect the buttons; `inputs` select the runs. Returns the event of an import."""
        status = [message, self.stop]
        saved = [*status, self.file]
        exporting = self.export.click(self.export_file, [self.kind, *inputs], saved, **QUEUED)
        exporting.then(None, self.file, None, js=DOWNLOAD_JS, **UNQUEUED)
        importing = self.upload.upload(self.import_file, self.upload, status, **QUEUED)
        self.stop.click(
            lambda: (sentence_html("Stopped."), gr.Button(visible=False)),
            None,
            status,
            cancels=[exporting, importing],
            **UNQUEUED,
        )
        return importing

    def matching(self, kind: Kind, inputs: Sequence[Any]) -> Sequence[str]:
        """Ids of the ticked runs, or of all that match the filters, oldest first.

        Raises ConfigError: there are none, or the kind of export is unknown.
        """
        ticked = inputs[0].get("ticked") if isinstance(inputs[0], Mapping) else None
        query = TableQuery.parse({"ids": ticked}) if ticked else self.query(inputs)
        deleted = None if ticked else query.deleted
        ids = self.log.ids(query.run_query(sort="created_at", descending=False, deleted=deleted))
        if not ids or kind not in get_args(Kind):
            raise ConfigError("There is nothing to export.")
        return ids

    def export_file(self, kind: Kind, *inputs: Any) -> Generator[list[Any], None, None]:
        """Write runs to a file, which the browser then saves; yields the progress."""
        ids = attempt(lambda: self.matching(kind, inputs), where="exporting runs")
        if isinstance(ids, Fault):
            yield [sentence_html(ids), gr.skip(), None]
            return
        name = f"runs-{datetime.now():%Y-%m-%d-%H-%M-%S}.{kind}"
        # In Gradio's own folder, deleted with the process: a generator that a client abandons
        # is closed by the garbage collector, on any thread, so it must have nothing to clean up.
        Path(self.file.GRADIO_CACHE).mkdir(parents=True, exist_ok=True)
        folder = mkdtemp(dir=self.file.GRADIO_CACHE)
        file = Path(folder) / name
        try:
            with open_text(file, packed=kind == "json.gz") as stream:
                for number in export_runs(self.log, ids, stream, kind):
                    if number % 100 == 0:
                        done = sentence_html(f"Exported {number} of {plural(len(ids), 'run')}.")
                        yield [done, gr.Button(visible=True), None]
        except OSError as error:
            fault = Fault(write_error_text(file, error), expected=True)
            yield [sentence_html(fault), gr.Button(visible=False), None]
            return
        done = f"Exported {plural(len(ids), 'run')}."
        if kind != "csv" and file.stat().st_size > MAX_UPLOAD_BYTES:
            done += f" The page imports files of up to {MAX_UPLOAD_BYTES / 1e6:g} MB: " + (
                "export it as gzip, or import it with the command `runs import`."
            )
        yield [sentence_html(done), gr.Button(visible=False), str(file)]

    def import_file(self, file: str) -> Iterator[list[Any]]:
        """Add the runs of an export; those before a fault are kept."""
        last = ImportCounts()
        batches = import_runs(self.log, read_lines(Path(file), MAX_UNPACKED_CHARS))
        while True:
            batch = attempt(lambda: next(batches, None), where="importing runs")
            if isinstance(batch, Fault):
                rest = f"{_imported(last)} The rest was not imported."
                texts = f"{sentence_html(rest)} {sentence_html(batch)}"
                yield [texts, gr.Button(visible=False)]
                return
            last = batch or last
            yield [sentence_html(_imported(last)), gr.Button(visible=batch is not None)]
            if batch is None:
                return


def _imported(imported: ImportCounts) -> str:
    present = f"; {imported.present} were already here" if imported.present else ""
    return f"Imported {plural(imported.added, 'run')}{present}."
