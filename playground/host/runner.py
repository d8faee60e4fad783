"""The engine host: one worker, one target, the turns of all tasks in order of arrival.

    page ── submit ──► queue ──► worker thread: load, build the drafter, decode
                                     │ records
                                     ▼
                                 recorder thread: text, figures, run log ──► LiveRun ◄── pages read

The loop never blocks: records go into a queue, and pages poll the live run.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

from engine.drafters.base import BuildContext, Drafter
from engine.errors import PlaygroundError, PromptError
from engine.model.chat_template import message_text
from engine.model.sources import TargetSpec
from engine.model.target import Target
from engine.steps import Prefill, Record, Step
from playground.errors import attempt, fault_of
from playground.host.catalog import Catalog
from playground.host.live import (
    PARENT,
    REASON_WORDS,
    LiveRun,
    LiveRuns,
    Message,
    pieces,
)
from playground.host.menu import MethodMenu
from playground.host.methods import run_badge
from playground.host.models import Models
from playground.host.plain import BaselineTimer, Timing
from playground.host.recording import Prompt, decode_and_record, log_failed_start
from playground.host.request import GenerateRequest
from playground.host.stream import run_meta
from playground.host.task import ClosingError, State, Task
from storage import PLAIN, BusyError, RunLog, StorageError

Result = TypeVar("Result")
MAX_WAITING = 32
RETRY_S = 0.1
"""Between two attempts to enter a full queue."""
RELEASE_S = 60.0
"""Idle seconds after which models are freed that no built drafter needs."""
STUCK_S = 30.0
"""Seconds without progress, or after a cancellation, from which the engine counts as stuck."""
Work = Callable[[LiveRun], dict[str, Any] | None]
"""What the worker does for a run; a result, whose `text` says what was done, completes the run."""


class QueueFullError(PlaygroundError):
    """The engine's queue is full."""


class StuckError(PlaygroundError):
    """The engine's thread makes no progress."""

    def __init__(self) -> None:
        super().__init__(
            f"The engine has made no progress for {STUCK_S:.0f} s. Wait, or restart the server."
        )


class MeasurementFailedError(PlaygroundError):
    """A measurement failed by a bug, whose traceback is logged; others may still work."""


class _Turn(NamedTuple):
    """Work of a task on the engine's thread, and its result."""

    task: Task
    work: Callable[[], Any]
    future: Future[Any]


class EngineHost:
    """Runs one job at a time, and owns all models."""

    def __init__(
        self, log: RunLog, catalog: Catalog, *, cache_dir: Path, device: str = "auto"
    ) -> None:
        self.log = log
        self.catalog = catalog
        self.cache_dir, self.device = cache_dir, device
        self.menu = MethodMenu(catalog, log)
        self.runs = LiveRuns()
        self._models = models = Models(
            cache_dir=cache_dir, device=device, resolve=catalog.resolve, locate=catalog.locate
        )
        self.experience = models.experience
        # For submitted work only: on the worker thread, after `prepare` has loaded a target.
        self.drafter, self.build_context = models.drafter, models.build_context
        self._waiting: dict[Task, _Turn] = {}
        self._wake = threading.Condition()
        self._worker: threading.Thread | None = None
        self._closing = False
        self._current: _Turn | None = None
        self._last_timings: WeakKeyDictionary[Target, Timing] = WeakKeyDictionary()
        self._before_close: list[Callable[[], None]] = []

    # ---- for pages, on any thread

    @property
    def loaded(self) -> Target | None:
        """The target in memory, if any."""
        return self._models.loaded

    def generate(self, request: GenerateRequest, *, owner: str) -> LiveRun:
        """Queue a run; an unfinished run of the same owner is cancelled.

        Raises QueueFullError, ClosingError: too many are waiting, or the host is closing; nothing
        is cancelled then.
        """
        run = self._new_run(request, owner)
        return self._start(run, lambda run: self._generate(run, request))

    def submit(self, work: Work, *, owner: str) -> LiveRun:
        """Queue work that no other run may interrupt, such as a comparison of several runs.

        `work` is called on the engine's thread with the returned run, which represents all of it.
        Only there may it use `prepare`, `drafter` and `build_context`.

        Raises QueueFullError, ClosingError: too many are waiting, or the host is closing.
        """
        return self._start(LiveRun(owner), work)

    def turn(
        self,
        task: Task,
        spec: TargetSpec,
        dtype: str,
        work: Callable[[BuildContext], Result],
        *,
        wait_for_room: bool = False,
    ) -> Future[Result]:
        """Queue a turn of a task that ends elsewhere; no other task interrupts it.

        Args:
            work: called with the loaded target, on the engine's thread, once the task is
                registered.
            wait_for_room: wait while the engine's queue is full.

        Returns:
            The result; raises CancelledError where the task was cancelled before the turn began,
            MeasurementFailedError for a bug.

        Raises:
            QueueFullError: the engine's queue is full.
            CancelledError: the task was cancelled while it waited for room.
            ClosingError: the engine accepts no more tasks.
        """

        def turn() -> Result:
            task.registered.wait()
            if task.cancelled():
                raise CancelledError
            self.prepare(task, spec, dtype)
            task.state = "running"
            return work(self.build_context())

        while True:
            try:
                return self._enqueue(task, turn)
            except QueueFullError:
                if not wait_for_room:
                    raise
                if task.cancelled():
                    raise CancelledError from None
                time.sleep(RETRY_S)

    def cancel_owner(self, owner: str) -> None:
        """Stop every unfinished run of a browser tab."""
        for run in self.runs.owned_by(owner):
            run.cancel()

    def ahead_of(self, task: Task) -> int:
        """Number of turns before that of this task."""
        with self._wake:
            return [*self._waiting].index(task) + 1 if task in self._waiting else 0

    @property
    def occupancy(self) -> tuple[int, int]:
        """Numbers of running and of waiting jobs."""
        with self._wake:
            return int(self._current is not None), len(self._waiting)

    def check_progress(self) -> None:
        """Raises StuckError: a text has made no progress for long, or a cancelled job goes on."""
        turn = self._current
        if turn is not None and time.monotonic() - turn.task.progressed_s > STUCK_S:
            raise StuckError

    def before_close(self, end: Callable[[], None]) -> None:
        """Register a callback that stops other users of the engine before it closes."""
        with self._wake:
            self._before_close.append(end)

    def close(self, wait_s: float | None = None) -> None:
        """Accept no more jobs, stop everything, wait for the worker, free the models.

        Args:
            wait_s: how long to wait for the worker, which may be loading; None = until it ends.
        """
        with self._wake:
            self._closing = True
            current = [self._current.task] if self._current else []
            for task in [*self.runs.all(), *self._waiting, *current]:
                task.cancel()
            self._wake.notify_all()
            ending, self._before_close = self._before_close, []
        if self._worker is not None:
            self._worker.join(wait_s)
        with self._wake:
            if self._current and self._current.task.state == "loading":  # nobody waits for it
                self._current.future.cancel()
        for end in ending:
            end()
        if self._worker is None or not self._worker.is_alive():
            self._models.close()
        for run in self.runs.all():
            run.end("cancelled")  # its thread may continue, but no page waits for it

    # ---- the queue

    def _start(self, run: LiveRun, work: Work) -> LiveRun:
        """Queue a run whose only turn is this work; an unfinished one of its owner is cancelled."""

        def end_withdrawn(future: Future[None]) -> None:
            if future.cancelled():
                run.end("cancelled", "stopped before it started")

        with self._wake:
            turn = self._enqueue(run, lambda: run.do(partial(work, run)))
            self.runs.add(run)
        turn.add_done_callback(end_withdrawn)
        return run

    def _enqueue(self, task: Task, work: Callable[[], Result]) -> Future[Result]:
        future: Future[Result] = Future()
        with self._wake:
            if self._closing:
                raise ClosingError
            if sum(other.owner != task.owner for other in self._waiting) >= MAX_WAITING:
                raise QueueFullError(
                    f"{MAX_WAITING} runs are waiting for the engine. Try again later."
                )
            self.cancel_owner(task.owner)
            task.ahead, task.withdraw = partial(self.ahead_of, task), partial(self._withdraw, task)
            self._waiting[task] = _Turn(task, work, future)
            if task.cancelled():
                self._withdraw(task)
            if self._worker is None:
                self._worker = threading.Thread(target=self._work_loop, name="engine", daemon=True)
                self._worker.start()
            self._wake.notify_all()
        return future

    def _withdraw(self, task: Task) -> None:
        """Remove the turn of a task from the queue."""
        with self._wake:
            if (turn := self._waiting.pop(task, None)) is not None:
                turn.future.cancel()

    def _work_loop(self) -> None:
        while (turn := self._next_turn()) is not None:
            with suppress(InvalidStateError):  # nobody waits for it any more
                self._do(turn)
            attempt(self._models.release, where="freeing models")

    def _do(self, turn: _Turn) -> None:
        """Do a turn, and publish its result or error."""
        try:
            result = turn.work()
        except BaseException as error:  # a library may panic, a user's drafter may call exit
            known: BaseException = error
            if not isinstance(error, PlaygroundError | StorageError | CancelledError):
                fault = fault_of(error, where=f"task {turn.task.id}")
                known = MeasurementFailedError(fault.sentence)
            turn.future.set_exception(known)
        else:
            turn.future.set_result(result)

    def _next_turn(self) -> _Turn | None:
        with self._wake:
            self._current = None
            has_work = self._wake.wait_for(lambda: self._waiting or self._closing, RELEASE_S)
        if not has_work:
            attempt(partial(self._models.release, idle=True), where="work between tasks")
        with self._wake:
            self._wake.wait_for(lambda: self._waiting or self._closing)
            task = next(iter(self._waiting), None)
            self._current = None if task is None else self._waiting.pop(task)
            return self._current

    # ---- for submitted work, on the worker thread

    def prepare(self, task: Task, spec: TargetSpec, dtype: str) -> Target:
        """The target, loaded if necessary; `task` shows the progress."""

        def report(words: str, share: float | None) -> None:
            task.activity, task.share = words, share
            if task.progressed_s < math.inf:
                task.progressed_s = time.monotonic()

        task.state = "loading"
        report(f"loading {spec.title or spec.name}", None)
        return self._models.target(spec, dtype, report)

    # ---- the work of one job, on the worker thread

    def _new_run(self, request: GenerateRequest, owner: str) -> LiveRun:
        run = LiveRun(owner)
        conversation = self._conversation(request)
        run.messages = conversation.messages
        run.meta = run_meta(
            run.id,
            title=request.title,
            target=request.target.title or request.target.name,
            badge=request.config.badge,
            method=request.config.model_dump(mode="json"),
            prompt=conversation.prompt,
            messages=conversation.messages,
            parent=conversation.parent,
            temperature=request.sampling.temperature,
        )
        return run

    def _generate(self, run: LiveRun, request: GenerateRequest) -> None:
        """Load, build the drafter, decode; a run that cannot begin is logged with the reason."""
        where, run.progressed_s = f"run {run.id}", time.monotonic()
        fault = attempt(lambda: self._decode(run, request), where=where)
        if fault and run.state == "loading":
            write = partial(log_failed_start, self.log, run, request, fault.sentence)
            attempt(write, where=f"the log entry of {where}")
        reason = run.finish.reason if run.finish else None
        if fault:
            run.refused = issubclass(fault.kind, PlaygroundError) and run.first is None
            run.unavailable = issubclass(fault.kind, BusyError)
        words = "failed" if fault else REASON_WORDS.get(reason or "", "done")
        state: State = "failed" if fault else "cancelled" if reason == "cancelled" else "completed"
        run.end(state, words, error=fault.sentence if fault else None)

    def _set_up(self, run: LiveRun, request: GenerateRequest) -> tuple[Target, Drafter, Prompt]:
        """Load the target, build the drafter and encode the prompt."""
        target = self.prepare(run, request.target, request.dtype)
        run.meta["badge"] = run_badge(request.config.badge, run.meta, target.environment())
        run.experts = target.experts
        run.activity, run.share = "preparing the drafter", None
        drafter = self.drafter(request.config)
        run.notes = (*target.notes, *drafter.notes)
        if not request.prompt_ids:
            template = request.sampling.chat_template_kwargs
            prompt = Prompt.encode(target, run.meta["prompt"], run.messages, template)
            return target, drafter, prompt
        if target.tokenizer is not None:
            run.meta["prompt"] = target.tokenizer.decode(list(request.prompt_ids))
        return target, drafter, Prompt("", (), request.prompt_ids)

    def _decode(self, run: LiveRun, request: GenerateRequest) -> None:
        """Run the decode loop here and the recording on its thread, until both have ended."""
        target, drafter, prompt = self._set_up(run, request)
        prompt_ids = prompt.token_ids
        run.state, run.activity = "prefill", "reading the prompt"
        plain: BaselineTimer | None = None
        ttft_s = step_s = 0.0

        def is_over() -> bool:
            run.progressed_s = time.monotonic()
            return run.cancel_requested.is_set() or self._closing

        def time_plain_before() -> None:
            nonlocal plain
            if request.compares_with_plain and request.config.decoding_type != PLAIN:
                plain = BaselineTimer(
                    self.build_context(), prompt_ids, request.sampling, is_over, self._last_timings
                )
                run.plain = plain.before

        def time_plain_after(record: Record) -> None:
            nonlocal ttft_s, step_s
            if isinstance(record, Prefill):
                ttft_s = record.ttft_s
            elif isinstance(record, Step):
                step_s = (record.at_s - ttft_s) / (record.index + 1)
            elif plain and not is_over():
                run.activity = "timing plain decoding"
                middle = record.output_ids[: len(record.output_ids) // 2]
                run.plain = plain.after([*prompt_ids, *middle], step_s)

        def prefilled(num_tokens: int) -> None:
            whole = len(prompt_ids)
            run.share = num_tokens / whole
            run.activity = f"reading the prompt: {num_tokens:,} of {whole:,} tokens"

        parent = self.runs.logged_id(run.meta["parent"])
        decode_and_record(
            self.log,
            target,
            drafter,
            request.config,
            prompt,
            sampling=request.sampling,
            limits=request.limits,
            cancelled=is_over,
            before=time_plain_before,
            prefilled=prefilled,
            each=time_plain_after,
            prefix_caching=True,
            title=request.title,
            labels={PARENT: parent} if parent else {},
            run=run,
        )

    def _conversation(self, request: GenerateRequest) -> _Conversation:
        """The conversation that the run continues."""
        if request.repeats:
            past = self._past(request.repeats)
            if past is None:
                raise PromptError("That run is no longer in the log. Write the prompt again.")
            stored = self.log.get(self.runs.logged_id(request.repeats) or "")
            if stored is not None and not (stored.messages or stored.prompt_text):
                raise PromptError(
                    "This run's prompt was given as token ids. Repeat it with "
                    "`specdec generate --prompt-ids …`; the ids are in its export."
                )
            return past
        if request.messages:
            return _Conversation(list(request.messages), message_text(request.messages[-1]))
        if request.mode == "raw":
            return _Conversation([], request.prompt)
        past = self._past(request.parent) if request.parent else None
        turns: list[Message] = []
        if past is not None and past.messages:
            turns = [*past.messages, {"role": "assistant", "content": past.answer}]
        elif request.system.strip():
            turns = [{"role": "system", "content": request.system}]
        messages = [*turns, {"role": "user", "content": request.prompt}]
        return _Conversation(messages, request.prompt, request.parent)

    def _past(self, run_id: str) -> _Conversation | None:
        """The conversation of a run in memory or in the log; None if there is no such run."""
        live = self.runs.get(run_id)
        if live is not None and live.meta:
            written = (
                live.finish.text if live.finish else "".join(pieces(self.log, live.log_id or ""))
            )
            return _Conversation(live.messages, live.meta["prompt"], live.meta["parent"], written)
        stored = self.log.get(run_id)
        if stored is None:
            return None
        messages = [dict(message) for message in stored.messages]
        parent = stored.labels.get(PARENT)
        return _Conversation(messages, stored.prompt_text, parent, stored.text)


class _Conversation(NamedTuple):
    """Messages up to the prompt (none for a raw completion), the prompt, the previous run, and the
    answer so far."""

    messages: list[Message]
    prompt: str
    parent: str | None = None
    answer: str = ""
