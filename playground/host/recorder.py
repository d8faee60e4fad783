"""Follows a decode loop from another thread: text, figures and the run log, in batches.

The loop only puts its records into a queue. Twenty times a second the recorder takes what is there,
turns tokens into text and publishes it to the live run; once a second it writes to the log. A
transaction takes milliseconds of a core, which on a processor the loop would miss.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, fields
from queue import Empty, SimpleQueue
from typing import Any, Literal

from engine.metrics import Tally
from engine.model.target import Target
from engine.model.text import Detokenizer, token_label, whole_text
from engine.steps import End, Prefill, Record, Step
from playground.host.live import Finish, First, LiveRun
from storage import RunLog, StepRow

BATCH_S = 0.05
LOG_S = 1.0
"""A killed process loses at most so much of a run's steps."""
MAX_LABELS = 20_000
"""Token labels remembered within one run."""
Inbox = SimpleQueue[Record | None]
"""Records of one loop; None says that no more will come."""


class Recorder:
    """Turns one run's records into rows of the live run and of the log."""

    def __init__(self, run: LiveRun, target: Target, log: RunLog, stop: Sequence[str]) -> None:
        self._run = run
        self._log = log
        self._stop = tuple(stop)
        self._tokenizer = target.tokenizer
        self._pieces = Detokenizer(self._tokenizer)
        self._labels: dict[int, str] = {}
        self._tally = Tally()
        self._output_ids: list[int] = []
        self._end: End | None = None
        self._unlogged: list[StepRow] = []
        self._logged_s = time.monotonic()

    def follow(self, inbox: Inbox) -> None:
        """Take records until the loop is over."""
        while True:
            batch = [inbox.get()]
            time.sleep(0.0 if isinstance(batch[0], Prefill) else BATCH_S)
            batch += _drain(inbox)
            self._take([record for record in batch if record is not None])
            if None in batch:
                return

    def _take(self, records: Sequence[Record]) -> None:
        rows: list[StepRow] = []
        for record in records:
            self._tally.add(record)
            if isinstance(record, Prefill):
                self._begin(record)
            elif isinstance(record, Step):
                rows.append(self._row(record))
            else:
                self._end = record
        if rows:
            self._run.rows.extend(rows)
            self._run.words = f"generating · {rows[-1].decision}".removesuffix(" · ")
            self._unlogged += rows
        if time.monotonic() - self._logged_s >= LOG_S:
            self._write()
        self._run.metrics = self._tally.metrics

    def _write(self) -> None:
        assert self._run.log_id is not None
        self._log.add_steps(self._run.log_id, self._unlogged)
        self._unlogged.clear()
        self._logged_s = time.monotonic()

    def _begin(self, prefill: Prefill) -> None:
        self._output_ids.append(prefill.token_id)
        first = First(
            prefill.token_id,
            self._pieces.push(prefill.token_id),
            prefill.num_prompt_tokens,
            prefill.ttft_s,
        )
        self._run.first = first
        self._run.state, self._run.words = "running", "generating"
        assert self._run.log_id is not None
        self._log.add_prefill(self._run.log_id, **asdict(first))

    def _row(self, step: Step) -> StepRow:
        kept = step.committed[: step.num_committed]
        self._output_ids.extend(kept)
        values: dict[str, Any] = {f.name: getattr(step, f.name) for f in fields(step)}
        return StepRow(
            **values,
            token_texts=tuple(self._label(token) for token in step.tokens),
            bonus_text=self._label(step.bonus),
            committed_texts=tuple(self._pieces.push(token) for token in kept),
        )

    def _label(self, token_id: int) -> str:
        if token_id not in self._labels:
            if len(self._labels) >= MAX_LABELS:
                self._labels.clear()
            self._labels[token_id] = token_label(self._tokenizer, token_id)
        return self._labels[token_id]

    def close(self, error: str | None) -> None:
        """Write how it ended; `error` is the sentence of a run that failed."""
        reason = None if self._end is None else self._end.finish_reason
        text = whole_text(self._tokenizer, self._output_ids, self._stop)
        metrics = self._tally.metrics
        self._run.metrics = metrics
        self._run.finish = Finish(reason, text)
        status: Literal["completed", "cancelled", "failed"]
        status = "failed" if error else "cancelled" if reason == "cancelled" else "completed"
        self._write()
        assert self._run.log_id is not None
        self._log.finish(
            self._run.log_id,
            status=status,
            output_ids=self._output_ids,
            text=text,
            finish_reason=reason,
            metrics=asdict(metrics),
            error=error,
        )


def _drain(inbox: Inbox) -> list[Record | None]:
    batch: list[Record | None] = []
    while True:
        try:
            batch.append(inbox.get_nowait())
        except Empty:
            return batch
