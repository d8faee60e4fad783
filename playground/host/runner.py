"""The engine host: one worker, one target, all runs of all browser tabs in order of arrival.

    page ── submit ──► queue ──► worker thread: load, build the drafter, decode
                                     │ records
                                     ▼
                                 recorder thread: text, figures, run log ──► LiveRun ◄── pages read

The loop never blocks: records go into a queue, and pages poll the live run.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from engine.drafters.base import BuildContext, Drafter
from engine.drafters.method import MethodConfig
from engine.errors import PlaygroundError, PromptError
from engine.model.sources import TargetSpec
from engine.model.target import Target
from engine.steps import Prefill, Record, Step
from engine.tuning.experience import ExperienceStore
from playground.errors import Fault, attempt
from playground.host.catalog import Catalog
from playground.host.live import LiveRun, LiveRuns, Message, State
from playground.host.menu import MethodMenu
from playground.host.methods import run_badge
from playground.host.models import Loaded, Models
from playground.host.plain import PLAIN, BaselineTimer, Recent
from playground.host.recording import decode_and_record, log_unbegun
from playground.host.request import GenerateRequest
from playground.host.stream import PARENT, REASON_WORDS, run_meta
from storage import RunLog

MAX_WAITING = 32
IDLE_S = 0.5
"""Seconds without a job until the latency curve is checked."""
RELEASE_S = 60.0
"""Seconds after that until models and features are freed that no built drafter needs."""


class QueueFullError(PlaygroundError):
    """Too many runs wait for the engine."""


class ClosingError(PlaygroundError):
    """The engine accepts no more jobs."""

    def __init__(self) -> None:
        super().__init__("The playground is closing. Start it again to continue.")


class Job(NamedTuple):
    """A run, and what the worker does for it."""

    run: LiveRun
    work: Callable[[LiveRun], None]


class EngineHost:
    """Runs one job at a time; the only owner of models."""

    def __init__(
        self, log: RunLog, catalog: Catalog, *, cache_dir: Path, device: str = "auto"
    ) -> None:
        self.log = log
        self.catalog = catalog
        self.cache_dir, self.device = cache_dir, device
        self.menu = MethodMenu(catalog, log)
        self.runs = LiveRuns()
        self._models = Models(
            cache_dir=cache_dir, device=device, resolve=catalog.resolve, locate=catalog.locate
        )
        self._waiting: deque[Job] = deque()
        self._wake = threading.Condition()
        self._worker: threading.Thread | None = None
        self._closing = False
        self._busy = False
        self._recent = Recent()
        self._before_close: list[Callable[[], None]] = []

    # ---- for pages, on any thread

    @property
    def loaded(self) -> Loaded | None:
        """The target in memory, if any."""
        return self._models.loaded

    def load(self, spec: TargetSpec, dtype: str, *, owner: str) -> LiveRun:
        run = LiveRun(owner)
        return self._enqueue(Job(run, lambda run: self._load_only(run, spec, dtype)))

    def generate(self, request: GenerateRequest, *, owner: str) -> LiveRun:
        """Queue a run; an unfinished run of the same owner is cancelled.

        Raises QueueFullError, ClosingError: too many are waiting, or the host is closing; nothing
        is cancelled then.
        """
        run = self._new_run(request, owner)
        return self._enqueue(Job(run, lambda run: self._generate(run, request)))

    def submit(self, work: Callable[[LiveRun], None], *, owner: str) -> LiveRun:
        """Queue work of several runs that no other run may interrupt, e.g. a comparison.

        `work` is called on the engine's thread with the returned run, which stands for all of it;
        only there may it use `prepare`, `drafter` and `build_context`.

        Raises QueueFullError, ClosingError: too many are waiting, or the host is closing.
        """
        return self._enqueue(Job(LiveRun(owner), work))

    def cancel_owner(self, owner: str) -> int:
        """Stop every unfinished run of a browser tab; returns how many."""
        running = self.runs.owned_by(owner)
        for run in running:
            run.cancel()
        return len(running)

    def ahead_of(self, run: LiveRun) -> int:
        """Jobs to be done before this one starts."""
        with self._wake:
            waiting = [job.run for job in self._waiting]
            return waiting.index(run) + 1 if run in waiting else 0

    @property
    def occupancy(self) -> tuple[int, int]:
        """Jobs that run, and that wait."""
        with self._wake:
            return int(self._busy), len(self._waiting)

    def before_close(self, end: Callable[[], None]) -> None:
        """Register a callback that ends what uses the engine from outside."""
        with self._wake:
            self._before_close.append(end)

    def close(self, wait_s: float | None = None) -> None:
        """Accept no more jobs, stop everything, wait for the worker, free the models.

        Args:
            wait_s: most seconds to wait for the worker, which may be loading; None = until it ends.
        """
        with self._wake:
            self._closing = True
            for run in self.runs.all():
                run.cancel()
            self._wake.notify_all()
            ending, self._before_close = self._before_close, []
        for end in ending:
            end()
        if self._worker is not None:
            self._worker.join(wait_s)
        if self._worker is None or not self._worker.is_alive():
            self._models.close()
        for run in self.runs.all():
            run.end("cancelled")  # its thread may go on, but no page waits for it

    # ---- the queue

    def _enqueue(self, job: Job) -> LiveRun:
        run = job.run
        with self._wake:
            if self._closing:
                raise ClosingError
            if sum(other.run.owner != run.owner for other in self._waiting) >= MAX_WAITING:
                raise QueueFullError(
                    f"{MAX_WAITING} runs are waiting for the engine. Try again later."
                )
            self.cancel_owner(run.owner)
            run.withdraw = partial(self._withdraw, run)
            self.runs.add(run)
            self._waiting.append(job)
            if self._worker is None:
                self._worker = threading.Thread(target=self._work, name="engine", daemon=True)
                self._worker.start()
            self._wake.notify_all()
        return run

    def _withdraw(self, run: LiveRun) -> None:
        """End a run that waits, and take it out of the queue."""
        with self._wake:
            waiting = [job for job in self._waiting if job.run is not run]
            if len(waiting) < len(self._waiting):
                self._waiting = deque(waiting)
                run.activity = "stopped before it started"
                run.end("cancelled")

    def _work(self) -> None:
        while (job := self._next()) is not None:
            run = job.run
            fault = attempt(partial(job.work, run), where=f"run {run.id}")
            if isinstance(fault, Fault):
                run.activity = "failed"
                run.end("failed", error=fault.sentence)
            attempt(self._models.release, where="freeing models")

    def _next(self) -> Job | None:
        with self._wake:
            self._busy = False
            begun = self._wake.wait_for(lambda: self._waiting or self._closing, RELEASE_S)
        if not begun:
            attempt(partial(self._models.release, idle=True), where="work between jobs")
        with self._wake:
            self._wake.wait_for(lambda: self._waiting or self._closing)
            self._busy = bool(self._waiting)
            return self._waiting.popleft() if self._waiting else None

    # ---- for submitted work, on the worker thread

    def prepare(self, run: LiveRun, spec: TargetSpec, dtype: str) -> Target:
        """The target, loaded if it is not; `run` shows the progress."""

        def report(words: str, fraction: float | None) -> None:
            run.activity, run.progress = words, fraction

        run.state = "loading"
        report(f"loading {spec.title or spec.name}", None)
        return self._models.target(spec, dtype, report)

    def drafter(self, config: MethodConfig) -> Drafter:
        """As `Models.drafter`."""
        return self._models.drafter(config)

    @property
    def experience(self) -> ExperienceStore:
        """What drafting has learnt here."""
        return self._models.experience

    def build_context(self) -> BuildContext:
        """The prepared target, and what a method's drafter may use besides it."""
        return self._models.build_context()

    # ---- the work of one job, on the worker thread

    def _load_only(self, run: LiveRun, spec: TargetSpec, dtype: str) -> None:
        self.prepare(run, spec, dtype)
        run.activity = "ready"
        run.end("completed")

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
        """Load, build the drafter, decode; a run that cannot begin is in the log too, with why."""
        where = f"run {run.id}"
        ready = attempt(lambda: self._ready(run, request), where=where)
        if isinstance(ready, Fault):
            written = attempt(
                lambda: log_unbegun(self.log, run, request, ready.sentence),
                where=f"the log entry of {where}",
            )
            run.log_id = None if isinstance(written, Fault) else written
            run.activity, run.refused = "failed", ready.expected
            run.end("failed", error=ready.sentence)
            return
        run.state, run.activity = "prefill", "reading the prompt"
        fault = attempt(lambda: self._decode(run, request, *ready), where=where)
        reason = run.finish.reason if run.finish else None
        run.refused = fault is not None and fault.expected and run.first is None
        run.activity = "failed" if fault else REASON_WORDS.get(reason or "", "done")
        state: State = "failed" if fault else "cancelled" if reason == "cancelled" else "completed"
        run.end(state, error=fault.sentence if fault else None)

    def _ready(self, run: LiveRun, request: GenerateRequest) -> tuple[Target, Drafter, list[int]]:
        """Target, drafter and prompt of a run that can begin."""
        target = self.prepare(run, request.target, request.dtype)
        badge = run_badge(request.config.badge, run.meta, target.environment())
        run.meta |= {"badge": badge}
        run.activity, run.progress = "preparing the drafter", None
        drafter = self.drafter(request.config)
        run.notes = (*target.notes, *drafter.notes)
        messages = run.messages
        prompt_ids = list(request.prompt_ids)
        if not prompt_ids:
            text = run.meta["prompt"]
            prompt_ids = target.encode_chat(messages) if messages else target.encode(text)
        elif target.tokenizer is not None:
            run.meta["prompt"] = target.tokenizer.decode(prompt_ids)
        return target, drafter, prompt_ids

    def _decode(
        self,
        run: LiveRun,
        request: GenerateRequest,
        target: Target,
        drafter: Drafter,
        prompt_ids: list[int],
    ) -> None:
        """Run the loop here and the recording beside it; both are over when this returns."""
        plain: BaselineTimer | None = None
        ttft_s = step_s = 0.0

        def begin() -> None:
            nonlocal plain
            plain = self._baseline_timer(run, request, prompt_ids)

        def time_plain_decoding(record: Record) -> None:
            nonlocal ttft_s, step_s
            if isinstance(record, Prefill):
                ttft_s = record.ttft_s
            elif isinstance(record, Step):
                step_s = (record.at_s - ttft_s) / (record.index + 1)
            elif plain and not self._is_over(run):
                run.activity = "timing plain decoding"
                middle = record.output_ids[: len(record.output_ids) // 2]
                run.plain = plain.after([*prompt_ids, *middle], step_s)

        def prefilled(num_tokens: int) -> None:
            whole = len(prompt_ids)
            run.progress = num_tokens / whole
            run.activity = f"reading the prompt: {num_tokens:,} of {whole:,} tokens"

        decode_and_record(
            self.log,
            target,
            drafter,
            request.config,
            prompt_ids,
            sampling=request.sampling,
            limits=request.limits,
            cancelled=lambda: self._is_over(run),
            before=begin,
            prefilled=prefilled,
            each=time_plain_decoding,
            prefix_caching=True,
            prompt_text=run.meta["prompt"],
            messages=run.messages,
            stored={"method_title": request.title, "labels": self._labels(run)},
            run=run,
        )

    def _labels(self, run: LiveRun) -> dict[str, str]:
        """Of a chat's next turn: the run that wrote the answer before it."""
        parent = run.meta["parent"]
        live = self.runs.get(parent) if parent else None
        parent = live.log_id if live else parent
        return {PARENT: parent} if parent else {}

    def _baseline_timer(
        self, run: LiveRun, request: GenerateRequest, prompt_ids: list[int]
    ) -> BaselineTimer | None:
        """Times plain decoding before a run that is to be compared with it."""
        if not request.compares_with_plain or request.config.decoding_type == PLAIN:
            return None
        plain = BaselineTimer(
            self.build_context(), prompt_ids, lambda: self._is_over(run), self._recent
        )
        run.plain = plain.before
        return plain

    def _is_over(self, run: LiveRun) -> bool:
        return run.cancel_asked.is_set() or self._closing

    def _conversation(self, request: GenerateRequest) -> _Conversation:
        """The conversation that the run answers."""
        if request.repeats:
            return self._again(request.repeats)
        if request.messages:
            return _Conversation(list(request.messages), request.messages[-1]["content"], None)
        if request.mode == "raw":
            return _Conversation([], request.prompt, None)
        turns = self._turns_of(request.parent) if request.parent else []
        if not turns and request.system.strip():
            turns = [{"role": "system", "content": request.system}]
        messages = [*turns, {"role": "user", "content": request.prompt}]
        return _Conversation(messages, request.prompt, request.parent)

    def _again(self, run_id: str) -> _Conversation:
        past = self._past(run_id)
        if past is None:
            raise PromptError("That run is no longer in the log. Write the prompt again.")
        return past[0]

    def _turns_of(self, run_id: str) -> list[Message]:
        """A run's conversation with its answer."""
        past = self._past(run_id)
        if past is None or not past[0].messages:
            return []
        return [*past[0].messages, {"role": "assistant", "content": past[1]}]

    def _past(self, run_id: str) -> tuple[_Conversation, str] | None:
        """A run's conversation and answer, from memory or the log."""
        live = self.runs.get(run_id)
        if live is not None:
            answer = live.finish.text if live.finish else ""
            meta = live.meta
            return _Conversation(live.messages, meta["prompt"], meta["parent"]), answer
        stored = self.log.get(run_id)
        if stored is None:
            return None
        messages = [dict(message) for message in stored.messages]
        return _Conversation(messages, stored.prompt_text, stored.labels.get(PARENT)), stored.text


@dataclass(frozen=True, slots=True)
class _Conversation:
    """Turns up to the prompt (none for a raw completion), the prompt, the run before it."""

    messages: list[Message]
    prompt: str
    parent: str | None
