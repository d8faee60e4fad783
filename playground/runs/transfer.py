"""Runs as files: export and import as JSON with all steps, export as a CSV table of runs.

The JSON is one object with a run per line, so that files of any size are written and read one run
at a time. A float that JSON cannot represent is {"$float": "nan"}.
"""

from __future__ import annotations

import gzip
import io
import json
import math
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from datetime import UTC
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, Literal, cast, get_args

from pydantic import TypeAdapter, ValidationError

from engine.errors import ConfigError
from engine.model.chat_template import is_message
from engine.model.sources import atomic_write, writing
from engine.safe_text import MAX_CHARS, csv_line, read_json, short
from storage import (
    MAX_NAME_CHARS,
    MAX_NOTE_CHARS,
    MAX_TAG_CHARS,
    MAX_TAGS,
    Figure,
    RunDetail,
    RunLog,
    RunSummary,
    StepRow,
    StoredRun,
    key_values,
    labelled_key,
)

Kind = Literal["json", "json.gz", "csv"]
"""Whole runs, or a line per run; also how the file's name ends."""
FORMAT = "speculative-decoding-playground/runs"
VERSION = 1
HEAD = json.dumps({"format": FORMAT, "version": VERSION})[:-1] + ', "runs": [\n'
TAIL = "\n]}\n"
GZIP_MAGIC = b"\x1f\x8b"
NON_FINITE = ("nan", "inf", "-inf")
DERIVED = ("setup_id", "prompt_id")
"""Derived from the other fields; a log computes them again."""
BATCH = 20
"""Runs that are added at a time."""
RUN_COLUMNS = (
    "id created_at status target decoding_type method_title lossless dtype device finish_reason "
    "name note experiment_id"
).split()
JSON_COLUMNS = ("labels", "method", "sampling", "limits")


# ---- out


def export_runs(log: RunLog, run_ids: Sequence[str], stream: IO[str], kind: Kind) -> Iterator[int]:
    """Write runs; yields the number written so far, after each."""
    columns = [*RUN_COLUMNS, *get_args(Figure), "tags", *JSON_COLUMNS, "prompt", "text"]
    titles = ["benchmark_id" if name == "experiment_id" else name for name in columns]
    stream.write(csv_line(titles) if kind == "csv" else HEAD)
    for number, run_id in enumerate(run_ids):
        stored = log.read_whole(run_id)
        if stored is not None:
            if kind == "csv":
                stream.write(_run_row(stored.run))
            else:
                stream.write((",\n" if number else "") + run_line(stored))
        yield number + 1
    stream.write("" if kind == "csv" else TAIL)


@contextmanager
def export_stream(file: Path) -> Iterator[IO[str]]:
    """A text stream into a file that is created only once complete; gzip if it ends in .gz.

    A special file (`/dev/stdout`, a pipe) is written to directly, never replaced.

    Raises ConfigError: the file cannot be written.
    """
    is_special = file.exists() and not file.is_file()
    with (
        writing(file),
        nullcontext(file) if is_special else atomic_write(file) as place,
        open_text(place, packed=file.suffix == ".gz") as stream,
    ):
        yield stream


def open_text(place: Path, *, packed: bool) -> IO[str]:
    """A new text file, with gzip if `packed`."""
    opener: Any = gzip.open if packed else open
    return cast(IO[str], opener(place, "wt", encoding="utf-8", newline="\n"))


def run_line(stored: StoredRun) -> str:
    values = run_values(stored.run) | {"steps": [asdict(step) for step in stored.steps]}
    try:
        return json.dumps(values, allow_nan=False)
    except ValueError:
        return json.dumps(_encode_non_finite(values), allow_nan=False)


def run_values(run: RunSummary) -> dict[str, Any]:
    """A run as plain values, without its steps."""
    values = {key: value for key, value in asdict(run).items() if key not in DERIVED}
    plain: dict[str, Any] = _encode_non_finite(values | {"created_at": run.created_at.isoformat()})
    return plain


def _encode_non_finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": str(value)}
    if isinstance(value, Mapping):
        return {key: _encode_non_finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_encode_non_finite(inner) for inner in value]
    return value


def _run_row(run: RunDetail) -> str:
    values: list[Any] = [getattr(run, name) for name in RUN_COLUMNS]
    values[1] = run.created_at.astimezone(UTC).isoformat()
    values += [getattr(run, name) for name in get_args(Figure)]
    values.append(";".join(run.tags))
    values += [json.dumps(getattr(run, name)) for name in JSON_COLUMNS]
    return csv_line([*values, run.prompt_text, run.text])


# ---- in


@dataclass(slots=True)
class ImportCounts:
    """Numbers of imported runs that were added, and that were already present."""

    added: int = 0
    present: int = 0


def import_runs(log: RunLog, lines: Iterable[str]) -> Iterator[ImportCounts]:
    """Add the runs of an export in batches, each in one transaction.

    Raises:
        ConfigError: it is not an export, or one of its runs is malformed; names the run.
        StorageError: the log refuses a value.
    """
    counts, runs = ImportCounts(), read_runs(lines)
    while batch := list(islice(runs, BATCH)):
        num_added = log.write_whole(batch)
        counts.added += num_added
        counts.present += len(batch) - num_added
        yield counts


def read_lines(file: Path, most: float = math.inf) -> Iterator[str]:
    """The lines of a file, gzip or not, of at most `most` characters together.

    Raises ConfigError: it cannot be read, is too long, or has a line longer than any run.
    """
    total = 0
    try:
        with file.open("rb") as raw:
            packed = raw.peek(2)[:2] == GZIP_MAGIC
            with gzip.open(raw) if packed else raw as plain:
                stream = io.TextIOWrapper(cast(Any, plain), encoding="utf-8")
                while line := stream.readline(MAX_CHARS + 1):
                    if len(line) > MAX_CHARS:
                        raise ConfigError(
                            f"{file.name} has more than {MAX_CHARS} characters in one line. Keep "
                            "the file as the playground writes it: one run per line."
                        )
                    if (total := total + len(line)) > most:
                        raise ConfigError(
                            f"{file.name} has more than {most:,} characters when unpacked. Import "
                            "it with the command `runs import`."
                        )
                    yield line
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ConfigError(f"{file.name} cannot be read: {error}.") from error


def read_runs(lines: Iterable[str]) -> Iterator[StoredRun]:
    """The runs of an export, one at a time.

    Raises ConfigError: it is not an export, or one of its runs is malformed; names the run.
    """
    source = iter(lines)
    first = next(source, "").rstrip()
    if not first.endswith('"runs": ['):
        raise ConfigError(
            f"The file is not an export of runs (format {FORMAT}). Keep it as the playground "
            "writes it: one run per line."
        )
    _check_head(_json(first + "]}", "The file"))
    for number, line in enumerate(source, start=1):
        text = line.strip().removesuffix(",")
        if text == "]}":
            return
        if text or number > 1:  # an export without runs has an empty line
            yield _checked(_json(text, f"Run {number} of the file"), number)
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
    return read_json(text, what=what, object_hook=_parse_non_finite)


def _parse_non_finite(value: dict[str, Any]) -> Any:
    if value.keys() != {"$float"}:
        return value
    if value["$float"] not in NON_FINITE:
        raise ConfigError(f"$float must be one of {', '.join(NON_FINITE)}.")
    return float(value["$float"])


# ---- validation of imported runs: types, sizes, tree shapes

ID = re.compile(r"[0-9A-Za-z_-]{1,32}")
YEARS = (1970, 9000)
MAX_COUNT = 2**31 - 1
MAX_LABEL_CHARS, MAX_VALUE_CHARS = 64, 500


STORED_RUN = TypeAdapter(StoredRun)
OLD_ID: TypeAdapter[str | None] = TypeAdapter(str | None)


def _checked(raw: Any, number: int) -> StoredRun:
    """A run and its steps from plain data.

    Raises ConfigError: naming the run, the field and what is wrong.
    """
    if not isinstance(raw, dict):
        raise ConfigError(f"Run {number} of the file must be an object.")
    where = f"Run {raw.get('id', number)!s:.40} of the file"
    values = {**raw, **dict.fromkeys(DERIVED, "")}
    steps = values.pop("steps", [])
    try:
        stored = STORED_RUN.validate_python({"run": values, "steps": steps})
        if "experiment_id" not in raw:
            key = labelled_key(OLD_ID.validate_python(raw.get("benchmark_id")), stored.run.labels)
            stored = replace(stored, run=replace(stored.run, **key_values(key)))
    except RecursionError as error:
        raise ConfigError(f"{where}: its values are nested too deeply.") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"]).removeprefix("run.")
        raise ConfigError(
            f"{where}: {field} is refused: {first['msg']}, got {short(first['input'], 60)}."
        ) from error
    run = stored.run
    step_faults = (_step_faults(index, step) for index, step in enumerate(stored.steps))
    for fault in chain(_run_faults(run), *step_faults):
        raise ConfigError(f"{where}: {fault}")
    zone = run.created_at.tzinfo or UTC
    created_at = run.created_at.replace(tzinfo=zone).astimezone(UTC)
    return replace(stored, run=replace(run, created_at=created_at))


def _run_faults(run: RunDetail) -> Iterator[str]:
    if not ID.fullmatch(run.id):
        yield f"id must be letters and digits, at most 32, got {run.id!r:.60}."
    if not YEARS[0] <= run.created_at.year <= YEARS[1]:
        yield f"created_at must be in the years {YEARS[0]} to {YEARS[1]}."
    for name in RUN_COLUMNS:
        text, most = getattr(run, name), MAX_NOTE_CHARS if name == "note" else MAX_NAME_CHARS
        if isinstance(text, str) and len(text) > most:
            yield f"{name} must have at most {most} characters, got {len(text)}."
    if len(run.tags) > MAX_TAGS or not all(
        0 < len(tag.strip()) <= MAX_TAG_CHARS for tag in run.tags
    ):
        yield f"tags must be at most {MAX_TAGS}, each of 1 to {MAX_TAG_CHARS} characters."
    key_texts = {name: str(value) for name, value in key_values(run).items()}
    if not all(
        0 < len(key) <= MAX_LABEL_CHARS and len(value) <= MAX_VALUE_CHARS
        for key, value in {**key_texts, **run.labels}.items()
    ):
        yield (
            f"labels must have names of 1 to {MAX_LABEL_CHARS} characters and texts of at most "
            f"{MAX_VALUE_CHARS}."
        )
    if run.method.get("decoding_type") != run.decoding_type:
        yield f"method must be of decoding_type {run.decoding_type!r:.60}."
    if not all(isinstance(m, dict) and is_message(m) for m in run.messages):
        yield "every message must have a role and content."
    yield from _number_faults(run.turn, run.repeat)
    yield from _number_faults(run.num_prompt_tokens, run.num_new_tokens, run.num_steps)
    yield from _number_faults(run.first_token_id or 0, *run.prompt_ids, *run.output_ids)


def _number_faults(*numbers: int) -> Iterator[str]:
    for number in numbers:
        if not 0 <= number <= MAX_COUNT:
            yield f"counts and token ids must be in [0, {MAX_COUNT}], got {number}."


def _step_faults(index: int, step: StepRow) -> Iterator[str]:
    """What is wrong with a step; the viewer walks its tree and relies on its shape."""
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
