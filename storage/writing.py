"""Writes runs: their rows, their search texts, and whole runs of another log."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import Any

import sqlalchemy as sa

from storage.query import read_whole
from storage.records import (
    ImportResult,
    NewRun,
    RunDetail,
    StepRow,
    StorageError,
    StoredRun,
    UnknownRunError,
    experiment_of,
)
from storage.schema import (
    FIGURES,
    dump,
    fold,
    labels,
    new_id,
    prompt_id,
    prompt_texts,
    remarks,
    run_details,
    runs,
    setup_id,
    steps,
    tags,
    titles,
)

MAX_LABEL_CHARS = 64
MAX_VALUE_CHARS = 500
MAX_TAG_CHARS = 128
MAX_TAGS = 50
IMPORTED = "imported"
BATCH = 500
"""Most ids in one statement."""
_NOT_CONTENT = ("id", "setup_id", "prompt_id", "name", "note", "tags", "deleted")
"""Ids, which follow from the rest, and what people change of a run."""


def rows_of(run: NewRun | RunDetail, **more: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """A run's rows in `runs` and in `run_details`; `more` are values that it does not have."""
    values = {
        **{field.name: getattr(run, field.name) for field in fields(run)},
        "setup_id": getattr(run, "setup_id", "")
        or setup_id(run.target, run.method, run.sampling, run.limits, run.dtype, run.device),
        # Kept where it is known: a text is not read back with the lone surrogates that it had.
        "prompt_id": getattr(run, "prompt_id", "")
        or prompt_id(run.prompt_text, run.messages, run.prompt_ids),
        "lossless": bool(run.lossless),
        "experiment": experiment_of(run.benchmark_id, run.labels),
        **more,
    }
    row = {name: values[name] for name in runs.c.keys() if name in values}
    details = {name: values[name] for name in run_details.c.keys() if name in values}
    return row, {**details, "run_id": values["id"]}


def insert(
    connection: sa.Connection,
    new: Sequence[NewRun | RunDetail],
    rows: Sequence[tuple[dict[str, Any], dict[str, Any]]],
) -> None:
    """Write runs' rows, tags, labels and search texts.

    Raises:
        StorageError: a tag or label is no text, or too long.
    """
    for run in new:
        check_tags(run.tags)
        _check_labels(run.labels)
    connection.execute(runs.insert(), [row for row, _ in rows])
    connection.execute(run_details.insert(), [details for _, details in rows])
    texts = {row["prompt_id"]: run.prompt_text for run, (row, _) in zip(new, rows, strict=True)}
    names = {name for run in new for name in (run.target, run.method_title)}
    _write_folded(connection, prompt_texts.c.prompt_id, texts)
    _write_folded(connection, titles.c.title, {name: name for name in names})
    for run, (row, _) in zip(new, rows, strict=True):
        write_tags(connection, row["id"], run.tags)
        pairs = [{"run_id": row["id"], "key": k, "value": v} for k, v in run.labels.items()]
        if pairs:
            connection.execute(labels.insert(), pairs)


def _write_folded(connection: sa.Connection, key: sa.Column[str], texts: Mapping[str, str]) -> None:
    """Write search texts by their keys, each once."""
    here = set(connection.execute(sa.select(key).where(key.in_(list(texts)))).scalars())
    for name, text in sorted(texts.items()):  # all in one order: no two wait for each other
        if name in here:
            continue
        new = key.table.insert().values({key.name: name, "folded": fold(text)})
        try:
            with connection.begin_nested():
                connection.execute(new)
        except sa.exc.IntegrityError:
            continue  # another process wrote it in between


def write_remark(connection: sa.Connection, run_id: str) -> None:
    """Update the search text of a run's name and note."""
    connection.execute(remarks.delete().where(remarks.c.run_id == run_id))
    query = sa.select(runs.c.name, run_details.c.note).join_from(runs, run_details)
    name, note = connection.execute(query.where(runs.c.id == run_id)).one()
    if name or note:
        folded = fold(f"{name}\n{note}")
        connection.execute(remarks.insert().values(run_id=run_id, folded=folded))


def write_tags(connection: sa.Connection, run_id: str, new: Iterable[str]) -> None:
    """Replace a run's tags."""
    connection.execute(tags.delete().where(tags.c.run_id == run_id))
    rows = [{"run_id": run_id, "tag": tag} for tag in dict.fromkeys(new)]
    if rows:
        connection.execute(tags.insert(), rows)


def write_steps(connection: sa.Connection, run_id: str, new: Sequence[StepRow]) -> None:
    """Add steps that are not stored yet."""
    rows = [{"run_id": run_id, "index": step.index, "payload": step} for step in new]
    if rows:
        connection.execute(steps.insert(), rows)


def figures_of(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of a finished run's figures; what it has no figure for stays as it is."""
    figures = {**metrics, **(metrics.get("time_split") or {})}
    columns = (*FIGURES, "num_accepted", "decode_s")
    return {key: figures[key] for key in columns if figures.get(key) is not None}


def check_tags(new: Sequence[str]) -> None:
    """Raises StorageError: a tag is empty or too long, or there are too many."""
    if len(new) > MAX_TAGS:
        raise StorageError(f"A run must have at most {MAX_TAGS} tags, got {len(new)}.")
    for tag in new:
        if not (isinstance(tag, str) and tag.strip() and len(tag) <= MAX_TAG_CHARS):
            raise StorageError(f"A tag must be 1 to {MAX_TAG_CHARS} characters, got {tag!r:.80}.")


def _check_labels(new: Mapping[str, str]) -> None:
    for key, value in new.items():
        if not (isinstance(key, str) and 1 <= len(key) <= MAX_LABEL_CHARS):
            raise StorageError(
                f"A label's name must be text of 1 to {MAX_LABEL_CHARS} characters, got {key!r}."
            )
        if not (isinstance(value, str) and len(value) <= MAX_VALUE_CHARS):
            raise StorageError(
                f"Label {key} must be text of at most {MAX_VALUE_CHARS} characters, "
                f"got {value!r:.80}."
            )


def known_ids(connection: sa.Connection, run_ids: Sequence[str]) -> list[list[str]]:
    """The ids without repeats, a bounded number at a time.

    Raises:
        UnknownRunError: one of these is not in the log.
    """
    ids = list(dict.fromkeys(run_ids))
    batches = [ids[start : start + BATCH] for start in range(0, len(ids), BATCH)]
    for some in batches:
        stored = set(connection.execute(sa.select(runs.c.id).where(runs.c.id.in_(some))).scalars())
        for run_id in some:
            if run_id not in stored:
                raise UnknownRunError(f"No run {run_id!r:.80} is in the log.")
    return batches


# ---- runs of another log


def write_whole(connection: sa.Connection, new: Sequence[StoredRun]) -> tuple[ImportResult, ...]:
    """Add runs; one that is here already is left as it is, one whose id is taken gets a new id."""
    results: list[ImportResult] = []
    for batch in _without_repeats(new):
        ids = [stored.run.id for stored in batch]
        here = set(connection.execute(sa.select(runs.c.id).where(runs.c.id.in_(ids))).scalars())
        added: list[StoredRun] = []
        for stored in batch:
            given, result = stored.run.id, ImportResult(stored.run.id, stored.run.id, "added")
            if given in here:
                result = _result_for_existing_id(connection, stored)
            if result.kind != "present":
                added.append(replace(stored, run=replace(stored.run, id=result.id)))
            results.append(result)
        if added:
            _insert_whole(connection, added)
    return tuple(results)


def _without_repeats(new: Sequence[StoredRun]) -> list[list[StoredRun]]:
    """Batches of bounded size in which every id occurs once."""
    batches: list[list[StoredRun]] = [[]]
    seen: set[str] = set()
    for stored in new:
        if stored.run.id in seen or len(batches[-1]) == BATCH:
            batches.append([])
            seen = set()
        seen.add(stored.run.id)
        batches[-1].append(stored)
    return batches


def _result_for_existing_id(connection: sa.Connection, stored: StoredRun) -> ImportResult:
    """The outcome for a run whose id is in the log: the same run, or another one."""
    run, content = stored.run, content_of(stored)
    # Beside the run that has its id may stand a copy that was renamed when it came before.
    (row, _) = rows_of(run)
    same = runs.c.setup_id == row["setup_id"], runs.c.created_at == run.created_at
    copies = connection.execute(sa.select(runs.c.id).where(*same)).scalars().all()
    for run_id in (run.id, *copies):
        here = read_whole(connection, run_id)
        if here is not None and content_of(here) == content:
            return ImportResult(run_id, run.id, "present")
    return ImportResult(new_id(), run.id, "renamed")


def content_of(stored: StoredRun) -> str:
    """What a run is, as text: equal for equal runs, NaN included; its id and marks left out."""
    values = {k: v for k, v in asdict(stored.run).items() if k not in _NOT_CONTENT}
    values["status"] = _status(stored.run)
    values["lossless"] = bool(stored.run.lossless)
    values["created_at"] = stored.run.created_at.isoformat()
    return dump([values, [asdict(step) for step in stored.steps]], sort_keys=True)


def _status(run: RunDetail) -> str:
    """A run that was still running when it was copied is interrupted here."""
    return "interrupted" if run.status == "running" else run.status


def _decode_s(run: RunDetail) -> float | None:
    """Seconds from first to last commit; earlier versions exported the rate only."""
    seconds = run.metrics.get("decode_s")
    if isinstance(seconds, float):
        return seconds
    return (run.num_new_tokens - 1) / run.tok_s if run.tok_s else None


def _insert_whole(connection: sa.Connection, new: Sequence[StoredRun]) -> None:
    rows = [
        rows_of(
            stored.run,
            status=_status(stored.run),
            heartbeat_at=stored.run.created_at.replace(tzinfo=None),
            owner=IMPORTED,
            num_accepted=sum(len(step.accepted) for step in stored.steps),
            decode_s=_decode_s(stored.run),
            deleted_at=stored.run.created_at.replace(tzinfo=None) if stored.run.deleted else None,
            metrics=stored.run.metrics or None,
        )
        for stored in new
    ]
    insert(connection, [stored.run for stored in new], rows)
    for stored in new:
        write_steps(connection, stored.run.id, stored.steps)
        if stored.run.name or stored.run.note:
            write_remark(connection, stored.run.id)
