"""Runs as files: JSON with every step, in and out; CSV tables of runs and of steps, out.

The JSON is one object with a run per line, so that a file of any size is written and read one run
at a time. A float that JSON has no word for is {"$float": "nan"}.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC
from typing import IO, Any

from engine.errors import ConfigError
from playground.runs.transfer_check import check_run
from storage import Arrival, RunDetail, RunLog, RunSummary, StepRow, StoredRun
from storage.filters import Figure, names_of

FORMAT = "speculative-decoding-playground/runs"
VERSION = 1
HEAD = json.dumps({"format": FORMAT, "version": VERSION})[:-1] + ', "runs": [\n'
TAIL = "\n]}\n"
DERIVED = ("setup_id", "prompt_id")
"""Follow from the rest; a log computes them anew."""
BATCH = 200
RUN_COLUMNS = (
    "id created_at status target decoding_type method_title lossless dtype device finish_reason "
    "name note benchmark_id"
).split()
JSON_COLUMNS = ("labels", "method", "sampling", "limits")
STEP_COLUMNS = (
    "index context_len num_committed num_extra_rows draft_s verify_s accept_s other_s at_s decision"
).split()
FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")


# ---- JSON


def write_json(log: RunLog, run_ids: Sequence[str], stream: IO[str]) -> Iterator[int]:
    """Write whole runs; yields how many are written, after each."""
    stream.write(HEAD)
    for number, run_id in enumerate(run_ids):
        stored = log.read_whole(run_id)
        if stored is not None:
            stream.write((",\n" if number else "") + run_line(stored))
        yield number + 1
    stream.write(TAIL)


def run_line(stored: StoredRun) -> str:
    """A whole run as one line of JSON."""
    values = run_values(stored.run)
    values["steps"] = [asdict(step) for step in stored.steps]
    try:
        return json.dumps(values, allow_nan=False)
    except ValueError:
        return json.dumps(_without_odd_floats(values), allow_nan=False)


def run_values(run: RunSummary) -> dict[str, Any]:
    """A run as plain values, without its steps."""
    values = {key: value for key, value in asdict(run).items() if key not in DERIVED}
    plain: dict[str, Any] = _without_odd_floats(values | {"created_at": run.created_at.isoformat()})
    return plain


def _without_odd_floats(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": str(value)}
    if isinstance(value, Mapping):
        return {key: _without_odd_floats(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_without_odd_floats(inner) for inner in value]
    return value


def read_lines(lines: Iterable[str]) -> Iterator[StoredRun]:
    """The runs of an export, one at a time.

    Raises:
        ConfigError: it is no such file, or a run in it is malformed; names the run.
    """
    source = iter(lines)
    first = next(source, "")
    if _is_head(first):
        for number, line in enumerate(source, start=1):
            text = line.strip().removesuffix(",")
            if text == "]}":
                return
            if text:
                yield parse_run(text, number)
        raise ConfigError("The file ends in the middle. Copy or export it again.")
    document = _json(first + "".join(source), "The file")
    _check_head(document)
    for number, raw in enumerate(document["runs"], start=1):
        yield _stored(raw, number)


def _is_head(line: str) -> bool:
    """Whether the runs follow one by one, as `write_json` writes them."""
    text = line.strip()
    if not text.endswith('"runs": ['):
        return False
    _check_head(_json(text + "]}", "The file"))
    return True


def _check_head(document: Any) -> None:
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ConfigError(f"The file must be an export of runs (format {FORMAT}); this is not.")
    version = document.get("version")
    if version != VERSION or not isinstance(document.get("runs"), list):
        raise ConfigError(
            f"The file's version must be {VERSION}, got {version!r:.20}. Update the program, or "
            "export the runs with this version."
        )


def parse_run(text: str, number: int) -> StoredRun:
    """A run of an export.

    Args:
        number: its place in the file, for the error.

    Raises:
        ConfigError: it is malformed.
    """
    return _stored(_json(text, f"Run {number} of the file"), number)


def _json(text: str, what: str) -> Any:
    try:
        return json.loads(text, object_hook=_odd_float)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{what} is not valid JSON: {error}.") from error


def _odd_float(value: dict[str, Any]) -> Any:
    if value.keys() == {"$float"}:
        return float(value["$float"])
    return value


def _stored(raw: Any, number: int) -> StoredRun:
    if not isinstance(raw, dict):
        raise ConfigError(f"Run {number} of the file must be an object.")
    where = f"Run {raw.get('id', number)!s:.40} of the file"
    rows = raw.get("steps", [])
    values = {key: value for key, value in raw.items() if key != "steps"}
    run, steps = check_run({**values, **dict.fromkeys(DERIVED, "")}, rows, where)
    return StoredRun(run, steps)


def take_in(log: RunLog, runs: Iterable[StoredRun]) -> Iterator[tuple[Arrival, ...]]:
    """Add runs to a log, a batch at a time; each batch arrives whole or not at all."""
    batch: list[StoredRun] = []
    for stored in runs:
        batch.append(stored)
        if len(batch) == BATCH:
            yield log.write_whole(batch)
            batch = []
    if batch:
        yield log.write_whole(batch)


# ---- CSV


def runs_header() -> str:
    """The first line of the table of runs."""
    return _csv_line([*RUN_COLUMNS, *names_of(Figure), "tags", *JSON_COLUMNS, "prompt", "text"])


def runs_row(run: RunDetail) -> str:
    """A run as a line: figures, settings as JSON, prompt and text."""
    values: list[Any] = [getattr(run, name) for name in RUN_COLUMNS]
    values[1] = run.created_at.astimezone(UTC).isoformat()
    values += [getattr(run, name) for name in names_of(Figure)]
    values.append(";".join(run.tags))
    values += [json.dumps(getattr(run, name)) for name in JSON_COLUMNS]
    return _csv_line([*values, run.prompt_text, run.text])


def steps_header() -> str:
    """The first line of the table of steps."""
    return _csv_line(["run_id", *STEP_COLUMNS, "num_drafted", "num_accepted", "committed_text"])


def steps_row(run_id: str, step: StepRow) -> str:
    """A step as a line: its counts and times, and the text that it committed."""
    values: list[Any] = [run_id, *(getattr(step, name) for name in STEP_COLUMNS)]
    text = "".join(step.committed_texts)
    return _csv_line([*values, len(step.tokens) - 1, len(step.accepted), text])


def _csv_line(values: Sequence[Any]) -> str:
    stream = io.StringIO()
    csv.writer(stream, lineterminator="\n").writerow([_cell(value) for value in values])
    return stream.getvalue()


def _cell(value: Any) -> Any:
    """Text that a spreadsheet would run as a formula begins with an apostrophe."""
    if isinstance(value, str):
        whole = value.encode("utf-8", "backslashreplace").decode().replace("\x00", "\\x00")
        return f"'{whole}" if whole.startswith(FORMULA_STARTS) else whole
    return value
