"""Everything about the run that is open on the Runs page, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.errors import ConfigError
from playground.host.request import read_run_id
from playground.runs.query import read_mapping
from playground.runs.settings import Types, changed, flat, words
from storage import RunDetail, RunLog

Rows = list[tuple[str, str]]


def details(log: RunLog, asked: Any, types: Types) -> dict[str, Any]:
    """Name, tags, note and error, and `facts`: tables of settings and surroundings.

    Raises:
        ConfigError: there is no such run.
    """
    run_id = read_run_id(read_mapping("The question", asked).get("id"))
    run = log.get(run_id)
    if run is None:
        raise ConfigError(f"No run {run_id} is in the log. It may be in another one.")
    return {
        "id": run.id,
        "name": run.name,
        "note": run.note,
        "tags": list(run.tags),
        "deleted": run.deleted,
        "error": run.error,
        "setup_id": run.setup_id,
        "method_title": run.method_title,
        "settings": changed(run, types),
        "facts": [[title, rows] for title, rows in _facts(run) if rows],
    }


def _facts(run: RunDetail) -> list[tuple[str, Rows]]:
    known = ("target", "dtype", "device")
    machine = {k: v for k, v in run.environment.items() if k not in known}
    return [
        ("run", _run(run)),
        ("method", _rows(run.method)),
        ("sampling and limits", _rows({**run.sampling, **run.limits})),
        ("labels", _rows(run.labels)),
        ("machine and versions", _rows(machine)),
    ]


def _run(run: RunDetail) -> Rows:
    shown = {
        "id": run.id,
        "began": run.created_at.isoformat(timespec="seconds"),
        "status": run.status,
        "ended by": run.finish_reason,
        "target": run.target,
        "dtype": run.dtype,
        "device": run.device,
        "prompt tokens": run.num_prompt_tokens,
        "new tokens": run.num_new_tokens,
        "steps": run.num_steps,
        "benchmark": run.benchmark_id,
    }
    return [(name, words(value)) for name, value in shown.items() if value is not None]


def _rows(values: Mapping[str, Any]) -> Rows:
    return [(name, words(value)) for name, value in flat(values).items()]
