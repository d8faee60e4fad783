"""Runs as files: JSON with every step, in and out; CSV tables of runs and of steps, out.

The JSON is one object with a run per line, so that a file of any size is written and read one run
at a time. A float that JSON has no word for is {"$float": "nan"}.
"""

from __future__ import annotations

import functools
import gzip
import io
import json
import math
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC
from pathlib import Path
from typing import IO, Any, Literal, cast

from pydantic import TypeAdapter, ValidationError

from engine.errors import ConfigError
from engine.safe_text import MAX_CHARS, csv_line, read_json, short, unwritable
from storage import Figure, RunDetail, RunLog, RunSummary, StepRow, StoredRun, names_of

Kind = Literal["json", "csv", "steps"]
"""Whole runs, a line per run, a line per step."""
FORMAT = "speculative-decoding-playground/runs"
VERSION = 1
HEAD = json.dumps({"format": FORMAT, "version": VERSION})[:-1] + ', "runs": [\n'
TAIL = "\n]}\n"
GZIP_MAGIC = b"\x1f\x8b"
ODD_FLOATS = ("nan", "inf", "-inf")
DERIVED = ("setup_id", "prompt_id")
"""Follow from the rest; a log computes them anew."""
BATCH = 200
LINE_CHARS = 32
"""What a line counts for at least: it takes time, too."""
RUN_COLUMNS = (
    "id created_at status target decoding_type method_title lossless dtype device finish_reason "
    "name note benchmark_id"
).split()
JSON_COLUMNS = ("labels", "method", "sampling", "limits")
STEP_COLUMNS = (
    "index context_len num_committed num_extra_rows draft_s verify_s accept_s other_s at_s "
    "decision bypass num_cut num_forced rollback_s"
).split()


# ---- out


def export_runs(log: RunLog, run_ids: Sequence[str], stream: IO[str], kind: Kind) -> Iterator[int]:
    """Write runs; yields how many are written, after each."""
    runs = [*RUN_COLUMNS, *names_of(Figure), "tags", *JSON_COLUMNS, "prompt", "text"]
    steps = ["run_id", *STEP_COLUMNS, "num_drafted", "num_accepted", "committed_text"]
    stream.write({"json": HEAD, "csv": csv_line(runs), "steps": csv_line(steps)}[kind])
    for number, run_id in enumerate(run_ids):
        stored = log.read_whole(run_id)
        if stored is not None:
            if kind == "json":
                stream.write((",\n" if number else "") + run_line(stored))
            elif kind == "csv":
                stream.write(_run_row(stored.run))
            else:
                stream.writelines(_step_row(run_id, step) for step in stored.steps)
        yield number + 1
    stream.write(TAIL if kind == "json" else "")


@contextmanager
def writing(file: Path) -> Iterator[IO[str]]:
    """A text stream into a file that appears only when all is written; gzip if it ends in .gz.

    What is no ordinary file (`/dev/stdout`, a pipe) is written to as it is, never replaced.

    Raises ConfigError: the file cannot be written.
    """
    special = file.exists() and not file.is_file()
    part = file if special else file.parent / f".{file.name}.part"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        opener = cast(Any, gzip.open if file.suffix == ".gz" else open)
        with opener(part, "wt", encoding="utf-8", newline="\n") as stream:
            yield stream
        if not special:
            os.replace(part, file)
    except OSError as error:
        raise ConfigError(unwritable(file, error)) from error
    finally:
        if not special:
            with suppress(OSError):
                part.unlink()


def run_line(stored: StoredRun) -> str:
    values = run_values(stored.run) | {"steps": [asdict(step) for step in stored.steps]}
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


def _run_row(run: RunDetail) -> str:
    values: list[Any] = [getattr(run, name) for name in RUN_COLUMNS]
    values[1] = run.created_at.astimezone(UTC).isoformat()
    values += [getattr(run, name) for name in names_of(Figure)]
    values.append(";".join(run.tags))
    values += [json.dumps(getattr(run, name)) for name in JSON_COLUMNS]
    return csv_line([*values, run.prompt_text, run.text])


def _step_row(run_id: str, step: StepRow) -> str:
    values: list[Any] = [run_id, *(getattr(step, name) for name in STEP_COLUMNS)]
    text = "".join(step.committed_texts)
    return csv_line([*values, len(step.tokens) - 1, len(step.accepted), text])


# ---- in


@dataclass(slots=True)
class ImportCounts:
    """What became of the runs of a file: added, known already, added under a new id."""

    added: int = 0
    present: int = 0
    renamed: dict[str, str] = field(default_factory=dict)
    """New ids by the given ones, which other runs have."""


def import_runs(log: RunLog, lines: Iterable[str]) -> Iterator[ImportCounts]:
    """Add the runs of an export, a batch at a time; each batch arrives whole or not at all.

    Raises:
        ConfigError: it is no export, or a run in it is malformed; names the run.
        StorageError: the log refuses a value.
    """
    counts = ImportCounts()
    for batch in _batches(lines):
        for result in log.write_whole(batch):
            counts.added += result.kind != "present"
            counts.present += result.kind == "present"
            if result.kind == "renamed":
                counts.renamed[result.source_id] = result.id
        yield counts


def _batches(lines: Iterable[str]) -> Iterator[list[StoredRun]]:
    """Runs in batches that fit into memory."""
    num_chars, batch = 0, list[StoredRun]()

    def counted() -> Iterator[str]:
        nonlocal num_chars
        for line in lines:
            num_chars += len(line)
            yield line

    for run in read_runs(counted()):
        batch.append(run)
        if len(batch) == BATCH or num_chars > MAX_CHARS:
            yield batch
            num_chars, batch = 0, []
    if batch:
        yield batch


def read_lines(file: Path) -> Iterator[str]:
    """The lines of a file, gzip or not.

    Raises ConfigError: it cannot be read, is no text, or has a line longer than any run.
    """
    try:
        with file.open("rb") as raw:
            packed = raw.peek(2)[:2] == GZIP_MAGIC
            with gzip.open(raw) if packed else raw as plain:
                stream = io.TextIOWrapper(cast(Any, plain), encoding="utf-8")
                while line := stream.readline(MAX_CHARS + 1):
                    _check_length(len(line), file.name)
                    yield line
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ConfigError(f"{file.name} cannot be read: {error}.") from error


def _check_length(num_chars: int, where: str) -> None:
    if num_chars > MAX_CHARS:
        raise ConfigError(
            f"{where} has more than {MAX_CHARS} characters in one line. Export fewer runs, and "
            "keep the file as the playground writes it: one run per line."
        )


def read_runs(lines: Iterable[str]) -> Iterator[StoredRun]:
    """The runs of an export, one at a time; a reformatted one is read as a whole.

    Raises ConfigError: it is no export, or a run in it is malformed; names the run.
    """
    source = iter(lines)
    first = next(source, "")
    if not first.strip().endswith('"runs": ['):
        parts, num_chars = [first], len(first)
        for line in source:
            parts.append(line)
            num_chars += max(len(line), LINE_CHARS)
            _check_length(num_chars, "The file")
        document = _json("".join(parts), "The file")
        _check_head(document)
        for number, raw in enumerate(document["runs"], start=1):
            yield _stored(raw, number)
        return
    _check_head(_json(first + "]}", "The file"))
    for number, line in enumerate(source, start=1):
        text = line.strip().removesuffix(",")
        if text == "]}":
            return
        if text or number > 1:  # an export of nothing has an empty line
            yield _stored(_json(text, f"Run {number} of the file"), number)
    raise ConfigError("The file is incomplete. Copy or export it again.")


def _check_head(document: Any) -> None:
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ConfigError(f"The file is not an export of runs (format {FORMAT}).")
    version = document.get("version")
    if version != VERSION or not isinstance(document.get("runs"), list):
        raise ConfigError(
            f"The file's version must be {VERSION}, got {short(version, 20)}. Update the program, "
            "or export the runs with this version."
        )


def _json(text: str, what: str) -> Any:
    return read_json(text, what=what, object_hook=_odd_float)


def _odd_float(value: dict[str, Any]) -> Any:
    if value.keys() != {"$float"}:
        return value
    if value["$float"] not in ODD_FLOATS:
        raise ConfigError(f"$float must be one of {', '.join(ODD_FLOATS)}.")
    return float(value["$float"])


def _stored(raw: Any, number: int) -> StoredRun:
    if not isinstance(raw, dict):
        raise ConfigError(f"Run {number} of the file must be an object.")
    values = {key: value for key, value in raw.items() if key != "steps"}
    where = f"Run {raw.get('id', number)!s:.40} of the file"
    return checked_run({**values, **dict.fromkeys(DERIVED, "")}, raw.get("steps", []), where)


# ---- checks of what comes in: types, sizes, tree shapes

ID = re.compile(r"[0-9A-Za-z_-]{1,32}")
FIELD_CHARS = {
    "target": 255,
    "decoding_type": 64,
    "method_title": 255,
    "dtype": 32,
    "device": 64,
    "finish_reason": 32,
    "benchmark_id": 32,
    "name": 255,
    "note": 20_000,
}
YEARS = (1970, 9000)
MAX_COUNT = 2**31 - 1
COUNTS = ("num_prompt_tokens", "num_new_tokens", "num_steps")


@functools.cache
def _adapters() -> tuple[TypeAdapter[RunDetail], TypeAdapter[tuple[StepRow, ...]]]:
    return TypeAdapter(RunDetail), TypeAdapter(tuple[StepRow, ...])


def checked_run(values: Mapping[str, Any], rows: Any, where: str) -> StoredRun:
    """A run and its steps from plain data.

    Raises ConfigError: naming the run, the field and what is wrong.
    """
    run_type, steps_type = _adapters()
    try:
        run, steps = run_type.validate_python(values), steps_type.validate_python(rows)
    except RecursionError as error:
        raise ConfigError(f"{where}: its values are nested too deeply.") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "it"
        raise ConfigError(
            f"{where}: {field} is refused: {first['msg']}, got {short(first['input'], 60)}."
        ) from error
    for fault in (*_run_faults(run), *(f for n, s in enumerate(steps) for f in _step_faults(n, s))):
        raise ConfigError(f"{where}: {fault}")
    zone = run.created_at.tzinfo or UTC
    created_at = run.created_at.replace(tzinfo=zone).astimezone(UTC)
    return StoredRun(replace(run, created_at=created_at), steps)


def _run_faults(run: RunDetail) -> Iterator[str]:
    if not ID.fullmatch(run.id):
        yield f"id must be letters and digits, at most 32, got {run.id!r:.60}."
    if not YEARS[0] <= run.created_at.year <= YEARS[1]:
        yield f"created_at must be in the years {YEARS[0]} to {YEARS[1]}."
    for name, most in FIELD_CHARS.items():
        if len(getattr(run, name) or "") > most:
            yield f"{name} must have at most {most} characters, got {len(getattr(run, name))}."
    if run.method.get("decoding_type") != run.decoding_type:
        yield f"method must be of decoding_type {run.decoding_type!r:.60}."
    if not all(isinstance(turn.get("role"), str) for turn in run.messages):
        yield "every message must have a role and content."
    counts = [getattr(run, name) for name in COUNTS]
    yield from _number_faults(*counts, run.first_token_id or 0, *run.prompt_ids, *run.output_ids)


def _number_faults(*numbers: int) -> Iterator[str]:
    for number in numbers:
        if not 0 <= number <= MAX_COUNT:
            yield f"counts and token ids must be in [0, {MAX_COUNT}], got {number}."


def _step_faults(index: int, step: StepRow) -> Iterator[str]:
    """What is wrong with a step: the viewer walks its tree and relies on the shape."""
    num_nodes = len(step.tokens)
    columns = (step.parents, step.ranks, step.draft_probs, step.target_probs)
    if step.index != index:
        yield f"steps must be numbered from 0 without gaps, got {step.index} at {index}."
    if not num_nodes or any(len(column) != num_nodes for column in columns):
        yield f"step {index} must have parents, ranks and probabilities for all its tokens."
        return
    if len(step.token_texts) not in (0, num_nodes):
        yield f"step {index} must have a text for every token, or none."
    if step.parents[0] != -1 or any(not 0 <= p < i for i, p in enumerate(step.parents) if i):
        yield f"step {index} has a node whose parent does not come before it."
    for before, node in zip((0, *step.accepted), step.accepted, strict=False):
        if not 0 < node < num_nodes or step.parents[node] != before:
            yield f"step {index} has an accepted path that is not in its tree."
    if not 0 <= step.num_committed <= len(step.accepted) + 1:
        yield f"step {index} must commit at most its accepted tokens and one more."
    yield from _number_faults(*step.tokens, step.bonus)
