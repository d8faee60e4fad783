"""Follows a decode loop from another thread: text, figures and the run log, in batches.

The loop only puts its records into a queue. Twenty times a second the recording takes what is
there, turns tokens into text, writes it to the log, and only then publishes it to the live run:
whatever was shown is in the log, even if the process is killed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from operator import attrgetter
from queue import Empty, SimpleQueue
from typing import Any, Literal

from engine.config import Limits, Sampling
from engine.decode import decode
from engine.drafters.base import Drafter
from engine.drafters.method import MethodConfig
from engine.errors import PlaygroundError
from engine.metrics import Tally
from engine.model.labels import StepLabels
from engine.model.target import Target
from engine.model.text import Detokenizer, whole_text
from engine.steps import End, Prefill, Record, Step
from playground.errors import Fault, attempt
from playground.host.environment import environment, machine
from playground.host.live import Finish, First, LiveRun
from playground.host.request import GenerateRequest
from storage import NewRun, RunLog, StepRow, StorageError

BATCH_S = 0.05
MAX_WAITING = 5000
"""Steps held in memory while the log is out of reach; with trees of 64 nodes some 50 MB."""


_STEP_FIELDS = [field.name for field in fields(Step)]
_STEP_VALUES = attrgetter(*_STEP_FIELDS)


class RecordingError(StorageError):
    """What a run produced could not be recorded, so the run is over."""


class Recording:
    """One run being recorded, from its prefill to `stop`; `run.log_id` is in the log already."""

    def __init__(self, log: RunLog, run: LiveRun, target: Target, limits: Limits) -> None:
        self.fault: Fault | None = None
        """What went wrong here, beside the loop: the log cannot be written, say."""
        self._log = log
        self._run = run
        self._limits = limits
        self._tokenizer = target.tokenizer
        self._pieces = Detokenizer(self._tokenizer, hidden=limits.stop_token_ids)
        self._labels = StepLabels(self._tokenizer)
        self._tally = Tally()
        self._output_ids: list[int] = []
        self._end: End | None = None
        self._inbox: SimpleQueue[Record | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._attempt, args=(self._follow,), daemon=True)
        self._thread.start()

    @property
    def run_id(self) -> str:
        assert self._run.log_id is not None
        return self._run.log_id

    def put(self, record: Record) -> None:
        """Hand over a record; never waits. Too many that wait for a lost log end the run."""
        self._inbox.put(record)
        if not self._log.out_of_reach:
            return
        self._run.activity = "waiting for the run log, which cannot be reached"
        if self._inbox.qsize() > MAX_WAITING and self.fault is None:
            sentence = f"The run log was unreachable for {MAX_WAITING} steps, so the run ended."
            self.fault = Fault(sentence, expected=True)

    def stop(self, fault: Fault | None) -> None:
        """Wait for what was put, and write how the run ended.

        Args:
            fault: what stopped the loop; one of this thread's own comes first.
        """
        self._inbox.put(None)
        self._thread.join()
        self._attempt(lambda: self._finish(self.fault or fault))

    def _attempt(self, work: Callable[[], None]) -> None:
        fault = attempt(work, where=f"the recording of run {self._run.id}")
        self.fault = self.fault or fault

    def _finish(self, fault: Fault | None) -> None:
        reason = "cancelled" if self._end is None else self._end.finish_reason
        text = whole_text(self._tokenizer, self._output_ids, self._limits)
        plain = self._run.plain
        status: Literal["completed", "cancelled", "failed"]
        status = "failed" if fault else "cancelled" if reason == "cancelled" else "completed"
        self._log.finish(
            self.run_id,
            status=status,
            output_ids=self._output_ids,
            text=text,
            finish_reason=None if fault else reason,
            metrics=asdict(self._tally.metrics) | ({"plain": asdict(plain)} if plain else {}),
            error=fault.sentence if fault else None,
        )
        self._run.metrics = self._tally.metrics
        self._run.finish = Finish(None if fault else reason, text)

    # ---- on the recording's own thread

    def _follow(self) -> None:
        """Take records until the loop is over; None says that no more will come."""
        while True:
            batch = [self._inbox.get()]
            time.sleep(0.0 if isinstance(batch[0], Prefill) else BATCH_S)
            try:
                while True:
                    batch.append(self._inbox.get_nowait())
            except Empty:
                pass
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
        metrics = self._tally.metrics
        if rows:
            self._log.add_steps(self.run_id, rows, asdict(metrics))
            self._run.add_steps(rows)
            self._run.activity = f"generating · {rows[-1].decision}".removesuffix(" · ")
        self._run.metrics = metrics

    def _begin(self, prefill: Prefill) -> None:
        token = prefill.token_id
        self._output_ids.append(token)
        first = First(
            token,
            self._pieces.push(token),
            prefill.num_prompt_tokens,
            prefill.ttft_s,
            prefill.num_cached,
        )
        stored = asdict(first)
        del stored["num_cached"]  # among the run's figures, in the end
        self._log.add_prefill(self.run_id, **stored)
        self._run.first = first
        self._run.state, self._run.activity = "running", "generating"

    def _row(self, step: Step) -> StepRow:
        token_ids = step.committed[: step.num_committed]
        token_texts, bonus_text = self._labels.of(step, self._output_ids)
        self._output_ids.extend(token_ids)
        return StepRow(
            **dict(zip(_STEP_FIELDS, _STEP_VALUES(step), strict=True)),
            token_texts=tuple(token_texts),
            bonus_text=bonus_text,
            committed_texts=tuple(self._pieces.push(token) for token in token_ids),
        )


@contextmanager
def record_run(
    log: RunLog,
    target: Target,
    config: MethodConfig,
    *,
    sampling: Sampling,
    limits: Limits,
    prompt_ids: Sequence[int],
    prompt_text: str = "",
    messages: Sequence[dict[str, str]] = (),
    stored: Mapping[str, Any] | None = None,
    run: LiveRun | None = None,
) -> Iterator[Recording]:
    """Record what is `put` until the block ends; an exception ends the run as failed.

    Ctrl+C, or leaving before the loop's end was put, ends it as cancelled.

    Args:
        stored: further fields of the log's `NewRun`, e.g. its labels.
        run: told what is recorded, for a page that follows it.

    Raises RecordingError: the log cannot be written, say.
    """
    new = NewRun(
        target=target.name,
        method_title=type(config).title,
        **_settings(config, sampling, limits),
        prompt_ids=tuple(prompt_ids),
        prompt_text=prompt_text,
        messages=tuple(messages),
        dtype=target.dtype_name,
        device=str(target.device),
        environment=environment(target),
    )
    run = run or LiveRun(owner="")
    run.log_id = log.begin(replace(new, **(stored or {})))
    recording = Recording(log, run, target, limits)
    fault: Fault | None = Fault("The run ended early.", expected=False)
    try:
        yield recording
        fault = None
    except KeyboardInterrupt:
        fault = None
        raise
    except Exception as error:
        fault = Fault(str(error), expected=True) if isinstance(error, PlaygroundError) else fault
        raise
    finally:
        recording.stop(fault)
    if recording.fault is not None:
        raise RecordingError(recording.fault.sentence)


def decode_and_record(
    log: RunLog,
    target: Target,
    drafter: Drafter,
    config: MethodConfig,
    prompt_ids: Sequence[int],
    *,
    sampling: Sampling,
    limits: Limits,
    cancelled: Callable[[], bool],
    before: Callable[[], None] = lambda: None,
    prefilled: Callable[[int], None] = lambda num_tokens: None,
    each: Callable[[Record], None] = lambda record: None,
    prefix_caching: bool = False,
    undisturbed: bool = False,
    **about: Any,
) -> None:
    """Decode one prompt, every record of it going to the log.

    Args:
        before: called once the run is in the log, before its prefill.
        prefilled: told how many tokens of the prompt are in the cache so far.
        each: called with a record that was handed to the log.
        undisturbed: hand the records over after the last step, so that nothing but the loop runs.
        about: further arguments of `record_run`.

    Raises RecordingError: the log cannot be written, say.
    """
    with record_run(
        log, target, config, sampling=sampling, limits=limits, prompt_ids=prompt_ids, **about
    ) as recording:
        before()
        records: Iterable[Record] = decode(
            target,
            drafter,
            prompt_ids,
            sampling=sampling,
            limits=limits,
            cancelled=lambda: cancelled() or recording.fault is not None,
            prefilled=prefilled,
            prefix_caching=prefix_caching,
        )
        for record in list(records) if undisturbed else records:
            recording.put(record)
            each(record)


def log_unbegun(log: RunLog, run: LiveRun, request: GenerateRequest, sentence: str) -> str:
    """Log a run whose target or drafter could not be had, and why; returns its id."""
    new = NewRun(
        target=request.target.name,
        method_title=request.title,
        **_settings(request.config, request.sampling, request.limits),
        prompt_ids=(),
        prompt_text=run.meta["prompt"],
        messages=tuple(run.messages),
        dtype=request.dtype,
        environment=machine(),
    )
    run_id = log.begin(new)
    nothing: dict[str, Any] = {"output_ids": (), "text": "", "finish_reason": None, "metrics": {}}
    log.finish(run_id, status="failed", error=sentence, **nothing)
    return run_id


def _settings(config: MethodConfig, sampling: Sampling, limits: Limits) -> dict[str, Any]:
    return {
        "method": config.model_dump(mode="json"),
        "lossless": config.lossless,
        "sampling": sampling.model_dump(mode="json"),
        "limits": limits.model_dump(mode="json"),
    }
