"""Runs read back for a panel: from memory while they are live, later from the log."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, fields
from operator import attrgetter
from typing import Any, get_args

from engine import formats
from engine.errors import ConfigError
from engine.metrics import TimeSplit, measure
from engine.model.random_weights import notes_of
from engine.steps import BYPASSES, Prefill, Step
from engine.tree import TreeShape, tree_buffers
from playground.host.live import PARENT, REASON_WORDS, Finish, FirstToken, LiveRun, LiveRuns
from playground.host.methods import stored_badge
from playground.host.plain import stored_plain_step
from playground.host.result import figure_texts, steps_text
from playground.host.stream import (
    Batch,
    StreamMessage,
    batch_of,
    initial_message,
    is_recovered,
    run_meta,
)
from playground.host.trace import chrome_trace
from storage import Figure, RunDetail, RunLog, StepRow

MAX_TURNS = 50
_STEP_VALUES = attrgetter(*(field.name for field in fields(Step)))


def step_detail(row: StepRow) -> dict[str, Any]:
    """One step's draft tree for display: its row, its tables, and `bypass` as a sentence."""
    bypass = None if row.bypass is None else BYPASSES.get(row.bypass, row.bypass)
    buffers = tree_buffers(TreeShape(row.parents))
    more = {"recovered": is_recovered(row), "buffers": buffers, "bypass": bypass}
    return {**asdict(row), **more, "split": formats.time_split(TimeSplit.of(row).ms)}


def stored_run(log: RunLog, run_id: str) -> RunDetail:
    """Raises ConfigError: there is no such run."""
    run = log.get(run_id)
    if run is None:
        raise ConfigError(
            f"No run {run_id!s:.80} is in the log. It may have been deleted, or be in another log."
        )
    return run


class History:
    """Runs for the panel, from memory while they are live, later from the log."""

    def __init__(self, runs: LiveRuns, log: RunLog) -> None:
        self._runs = runs
        self._log = log

    def unfinished(self, run_id: str) -> LiveRun | None:
        """The run under either of its ids while it is unfinished."""
        run = self._runs.get(run_id)
        return None if run is None or run.over.is_set() else run

    def since(self, run_id: str, have: int) -> Batch:
        """A batch with the events from number `have` on; `more`: whether there are further ones.

        Raises ConfigError: there is no such run.
        """
        live, stored = self._runs.get(run_id), None
        if live is None:
            stored = stored_run(self._log, run_id)
            live = _restored(stored)
        batch = batch_of(live, have, log=self._log, metrics=stored.metrics if stored else None)
        if stored and not stored.metrics:  # of an interrupted run, the log has some from its steps
            figures = {name: getattr(stored, name) for name in get_args(Figure)}
            batch["figures"] = {**figures, "texts": figure_texts(figures)}
        return {**batch, "more": have + len(batch["events"]) < live.num_events}

    def step(self, run_id: str, index: int) -> dict[str, Any]:
        """One step with its draft tree. Raises ConfigError: there is no such run or step."""
        rows = self._rows(self._run(run_id), index, index + 1)
        if not rows:
            raise ConfigError(f"Run {run_id} has no step {index + 1}.")
        return step_detail(rows[0])

    def steps(self, run_id: str, first: int, last: int) -> dict[str, str]:
        """Sums over the steps `first` ≤ index ≤ `last` as text; empty if there are none.

        Raises ConfigError: there is no such run.
        """
        run, before = self._run(run_id), max(0, first - 1)
        rows = self._rows(run, before, last + 1)
        if run.first is None or not rows[first - before :]:
            return {"text": ""}
        began_s = rows[0].at_s if first else run.first.ttft_s
        steps = (Step(*_STEP_VALUES(row)) for row in rows[first - before :])
        return {"text": steps_text(asdict(measure([Prefill(0, 0, began_s), *steps])))}

    def _run(self, run_id: str) -> LiveRun:
        """The run; one that is only in the log has no steps in memory.

        Raises ConfigError: there is no such run.
        """
        live = self._runs.get(run_id)
        return live if live and live.meta else _restored(stored_run(self._log, run_id))

    def _rows(self, run: LiveRun, start: int, stop: int) -> Sequence[StepRow]:
        """Steps `start` ≤ index < `stop` of a run, from memory if possible, else from the log."""
        rows = run.rows.read(start, stop)
        return self._log.steps(run.log_id or "", start, stop) if rows is None else rows

    def trace(self, run_id: str) -> dict[str, str]:
        """A file with the run's Chrome trace. Raises ConfigError: it is not in the log (yet)."""
        live = self._runs.get(run_id)
        stored = self._log.read_whole(run_id if live is None else live.log_id or "")
        if stored is None:
            raise ConfigError("This run is not in the log. Wait until it has begun.")
        return {"name": f"run-{stored.run.id}.trace.json", "text": chrome_trace(stored)}

    def show(self, run_id: str) -> StreamMessage:
        """A message that makes a panel show a stored run; the panel requests its text by `since`.

        Raises ConfigError: there is no such run.
        """
        meta = self._run(run_id).meta
        more = {"id": run_id, "parent": None, "answered_by": self.earlier_runs(run_id)}
        return initial_message(runs=[{**meta, **more}], resync=True)

    def earlier_runs(self, run_id: str) -> list[str]:
        """The runs that wrote the earlier answers of a run's chat, oldest first."""
        earlier: list[str] = []
        with suppress(ConfigError):  # an earlier one was deleted
            while len(earlier) < MAX_TURNS:
                parent = self._runs.logged_id(self._run(run_id).meta["parent"])
                if parent is None or parent in earlier:
                    break
                earlier.insert(0, run_id := parent)
        return earlier


def _restored(stored: RunDetail) -> LiveRun:
    """A stored run as it was in memory, without its steps and metrics."""
    words = REASON_WORDS.get(stored.finish_reason or "", stored.status)
    run = LiveRun(
        owner="",
        id=stored.id,
        meta=_stored_meta(stored),
        messages=[dict(message) for message in stored.messages],
        state=stored.status,
        activity=words if stored.status == "completed" else stored.status,
        error=stored.error,
        log_id=stored.id,
        finish=Finish(stored.finish_reason, stored.text),
        notes=notes_of(stored.environment),
        # The speedup of an experiment's runs is in its report.
        plain=None if stored.experiment_id else stored_plain_step(stored.metrics),
    )
    if stored.first_token_id is not None:
        run.first = FirstToken(stored.first_text, stored.ttft_s or 0.0)
    run.rows.first = stored.num_steps
    if stored.status != "running":
        run.over.set()
    return run


def _stored_meta(detail: RunDetail) -> dict[str, Any]:
    return run_meta(
        detail.id,
        title=detail.method_title,
        target=detail.target,
        badge=stored_badge(detail.method, detail.environment, lossless=detail.lossless),
        method=detail.method,
        prompt=detail.prompt_text,
        messages=detail.messages,
        parent=detail.labels.get(PARENT),
        temperature=detail.sampling.get("temperature") or 0.0,
    )
