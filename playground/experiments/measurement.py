"""The measurement loop: every request is decoded alone and timed by the engine's own clock.

Nothing else runs while a request is timed: its records go to the log when its text is finished. (On
a page they are streamed by a thread that takes milliseconds of a core.) Requests that the log has
as completed are never repeated: killing the process loses at most the running request, and
measuring the same plan again does the rest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import presets
from engine.config import Limits
from engine.decode import check_prompt, decode
from engine.drafters.base import BuildContext, Drafter
from engine.errors import ConfigError, PlaygroundError, PromptError
from engine.tuning.controller import build_drafter
from engine.tuning.experience import ExperienceStore
from playground.errors import Fault, attempt
from playground.experiments.chooser import Chooser
from playground.experiments.plan import (
    TYPED,
    Configuration,
    ExperimentPlan,
    Item,
    Key,
    Kind,
    Request,
)
from playground.experiments.report.verdict import audit_divergences
from playground.experiments.statistics import FinishedRequest, finished_requests, plain_pairs
from playground.host.live import REASON_WORDS, LiveRun
from playground.host.recording import Prompt, decode_and_record
from playground.host.task import State
from storage import ExperimentKind, RequestKey, RunDetail, RunLog

WARM_UP_PROMPT = "Write the numbers from one to twenty as words, and then backwards."
WARM_UP_TOKENS = 24
NUM_AUDITS: Mapping[Kind, int] = {"benchmark": 8, "compare": 1, "fastest": 0, "trial": 0}
"""Answers of a configuration that are audited where they differ from plain decoding's."""
RUN_KINDS: Mapping[Kind, ExperimentKind] = {
    "benchmark": "benchmark",
    "fastest": "benchmark",
    "compare": "compare",
    "sweep": "sweep",
    "trial": "sweep",
}
"""The kind of experiment that the log lists runs under."""


def check_same_target(then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse to resume an experiment with other weights, in another dtype or on another device.

    Args:
        then: environment of the experiment's first run; empty before it.
        now: the current environment.
    """
    for key in ("weights", "revision", "dtype", "device_name"):
        if then and then.get(key) != now.get(key):
            raise ConfigError(
                f"The experiment began with {key} {then.get(key)!r}, but the target here has "
                f"{now.get(key)!r}: the figures could not be compared. Start a new one."
            )


@dataclass(frozen=True, slots=True)
class Skipped:
    """A turn that was not run, and why, for example a prompt longer than the context."""

    suite: str
    prompt: str
    turn: int
    reason: str


@dataclass(frozen=True, slots=True)
class Progress:
    """How far an experiment is.

    Attributes:
        num_done: requests (of a sweep: trials) done, failed or left out.
        eta_s: None until it can be estimated.
        last: the request that has just finished.
    """

    num_done: int
    num_planned: int
    message: str
    eta_s: float | None
    num_failed: int = 0
    last: FinishedRequest | None = None

    @property
    def share(self) -> float:
        """The share of the requests that are done."""
        return self.num_done / max(1, self.num_planned)


@dataclass(frozen=True, slots=True)
class Summary:
    """How one pass over a plan ended.

    Attributes:
        faults: configurations that failed, and why.
        notes: remarks on the figures by configuration, for example that the drafter was made for
            other weights.
    """

    cancelled: bool
    num_new: int
    num_failed: int
    skipped: tuple[Skipped, ...]
    faults: Mapping[str, str] = field(default_factory=dict)
    notes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def status(self) -> Literal["completed", "cancelled"]:
        return "cancelled" if self.cancelled else "completed"

    @classmethod
    def of(cls, parts: Sequence[Summary]) -> Summary:
        """Of a pass that several workers share."""
        return cls(
            any(one.cancelled for one in parts),
            sum(one.num_new for one in parts),
            sum(one.num_failed for one in parts),
            tuple(skip for one in parts for skip in one.skipped),
            {name: fault for one in parts for name, fault in one.faults.items()},
            {name: notes for one in parts for name, notes in one.notes.items()},
        )


OnRound = Callable[[int, Sequence[Request], Prompt], Mapping[str, LiveRun]]
"""Called before every round with its number (from 1); returns the live runs to stream into, by
configuration."""


@dataclass(kw_only=True)
class Measurement:
    """One pass over the requests of a plan that the log lacks.

    In a comparison and in a search, a configuration that fails is left out from then on. In a
    benchmark, the log has its request as failed, a later pass repeats it, and a bug ends the pass.

    Attributes:
        benchmark_id: the experiment's id, which its runs carry in the log.
        trial: in a sweep the trial's id, which they carry, too.
        chooser: which configurations continue; by default all.
        on_round: for experiments on a page, whose runs are streamed while they are decoded.
        worker: name of this worker of a cluster. A round that another machine has begun is measured
            again, so that every ratio compares two times of one machine.
    """

    plan: ExperimentPlan
    log: RunLog
    benchmark_id: str
    on_progress: Callable[[Progress], None] = lambda progress: None
    cancelled: Callable[[], bool] = lambda: False
    chooser: Chooser | None = None
    on_round: OnRound | None = None
    worker: str = ""
    trial: str = ""

    def __post_init__(self) -> None:
        self._chooser = self.chooser or Chooser(self.plan)
        self._drops_faulty = self.plan.kind in ("compare", "fastest")
        self._done: dict[Key, FinishedRequest] = {}
        self._drafters: dict[str, Drafter] = {}
        self._notes: dict[str, tuple[str, ...]] = {}
        self._skipped: dict[Skipped, None] = {}  # in order, each once
        self._num_done = self._num_new = self._num_failed = 0
        self._spent_s = 0.0

    def run(self, context: BuildContext) -> Summary:
        """Measure on a loaded target.

        Raises PlaygroundError: a drafter cannot be built, or the target has no tokenizer.
        """
        self._context, self._target = context, context.target
        self._experience = ExperienceStore(context.experience_dir, presets.priors())
        self._chooser.begin()
        planned = {request.key for requests in self.plan.rounds() for request in requests}
        read = partial(finished_requests, self.log, self.benchmark_id, trial=self.trial)
        requests = self.log.wait_for(read)
        self._done = {request.key: request for request in requests if request.key in planned}
        for request in self._done.values():
            self._chooser.add(request)
        whole = self._run_rounds()
        if whole and self.plan.sampling.greedy and NUM_AUDITS[self.plan.kind]:
            self._audit()
        return Summary(
            self.cancelled() and not whole,
            self._num_new,
            self._num_failed,
            tuple(self._skipped),
            dict(self._chooser.faults),
            {name: notes for name, notes in self._notes.items() if notes},
        )

    def _is_over(self) -> bool:
        return self.cancelled() or self._chooser.is_over

    # ---- rounds

    def _run_rounds(self) -> bool:
        """False if it was cancelled."""
        repeat = 0
        try:
            for number, requests in enumerate(self.plan.rounds(), start=1):
                if requests[0].repeat != repeat:
                    repeat = requests[0].repeat
                    self._drafters.clear()
                if not self._run_round(number, requests):
                    return False
                if len(self._chooser.faults) == len(self.plan.configurations):
                    break
            self._report_progress("done")
            return True
        finally:
            self._drafters.clear()

    def _run_round(self, number: int, requests: Sequence[Request]) -> bool:
        """One turn of one prompt by every configuration; False if it was cancelled."""
        missing = self._unmeasured(requests)
        self._num_done += len(requests) - len(missing)
        if not missing:
            return True
        item, turn = missing[0].item, missing[0].turn
        try:
            prompt = self._prompt(item, turn)
        except PromptError as error:
            self._skipped[Skipped(item.suite, item.id, turn, str(error))] = None
            self._num_done += len(missing)
            return True
        if not self._drafters and not self._make_drafters():
            return False
        fit = [request for request in missing if self._chooser.is_active(request.configuration)]
        self._num_done += len(missing) - len(fit)
        runs = self.on_round(number, fit, prompt) if fit and self.on_round else {}
        try:
            return all(
                not self._is_over()
                and self._answer(number, request, prompt, runs.get(request.configuration))
                for request in fit
            )
        finally:
            for run in runs.values():
                run.end("cancelled", "stopped before it started")

    def _unmeasured(self, requests: Sequence[Request]) -> list[Request]:
        """The requests of a round still to be measured; none if one machine has done them all."""
        here = (self.worker, self._target.device_name)
        done = [self._done.get(request.key) for request in requests]
        if None not in done and len({one.machine for one in done if one is not None}) == 1:
            return []
        return [
            request
            for request, one in zip(requests, done, strict=True)
            if one is None or one.machine != here
        ]

    # ---- drafters

    def _make_drafters(self) -> bool:
        """Build new drafters and warm them up; False if it was cancelled.

        Some drafters learn from every text, so each repeat starts with new ones. The log has
        nothing of the warm-up.
        """
        for configuration in self.plan.configurations:
            if self._is_over():
                return False
            if self._chooser.is_active(configuration.name):
                self._report_progress(f"warming up · {configuration.name}")
                self._attempt(configuration, partial(self._warm_up, configuration))
        return True

    def _warm_up(self, configuration: Configuration) -> None:
        drafter = build_drafter(configuration.config, self._context, self._experience)
        self._drafters[configuration.name] = drafter
        self._notes[configuration.name] = drafter.notes
        turn = {"role": "user", "content": WARM_UP_PROMPT}
        messages = [turn] if self._target.has_chat_template else []
        ids = Prompt.encode(self._target, WARM_UP_PROMPT, messages).token_ids
        limits = Limits(max_new_tokens=WARM_UP_TOKENS, ignore_eos=True)
        for _ in decode(self._target, drafter, ids, limits=limits, cancelled=self._is_over):
            pass

    def _attempt(self, configuration: Configuration, work: Callable[[], None]) -> None:
        """Do work for a configuration; where `_drops_faulty`, one that fails is dropped."""
        if not self._drops_faulty:
            work()
            return
        done = attempt(work, where=f"running {configuration.name}")
        if isinstance(done, Fault):
            self._chooser.faults[configuration.name] = done.sentence
            self._drafters.pop(configuration.name, None)

    # ---- prompts

    def _prompt(self, item: Item, turn: int) -> Prompt:
        """The conversation up to a turn, with plain decoding's answers of the first repeat.

        Raises PromptError: an earlier turn has no answer, or the target cannot take the prompt.
        """
        messages = [dict(message) for message in item.history]
        for earlier in range(turn):
            key = (item.suite, item.id, earlier, 0, self.plan.reference.name)
            if (answer := self._done.get(key)) is None:
                raise PromptError(f"Turn {earlier + 1} has no answer to continue from.")
            messages.append({"role": "user", "content": item.turns[earlier]})
            messages.append({"role": "assistant", "content": answer.text})
        messages.append({"role": "user", "content": item.turns[turn]})
        if item.raw or not (self._target.has_chat_template or item.suite == TYPED):
            ids = self._target.encode("\n\n".join(message["content"] for message in messages))
            prompt = Prompt(item.turns[turn], (), tuple(ids))
        else:
            template = self.plan.sampling.chat_template_kwargs
            prompt = Prompt.encode(self._target, item.turns[turn], messages, template)
        check_prompt(self._target, prompt.token_ids)
        return prompt

    # ---- one request

    def _answer(self, number: int, request: Request, prompt: Prompt, live: LiveRun | None) -> bool:
        """Decode and record one request; False if it was cancelled."""
        name = request.configuration
        self._report_progress(message := f"round {number} of {self.plan.num_turns} · {name}")
        began_s = time.perf_counter()
        detail = self._record(request, prompt, live)
        if live is not None:
            self._end_live_run(live, name, detail)
        if detail is not None and detail.status == "cancelled":
            return False
        self._num_done += 1
        last = None
        if detail is not None and detail.status == "completed":
            last = self._done[request.key] = FinishedRequest.of(detail)
            self._chooser.add(last)
            self._num_new += 1
            self._spent_s += time.perf_counter() - began_s
        else:
            self._num_failed += 1
        self._report_progress(message, last)
        return True

    def _record(self, request: Request, prompt: Prompt, live: LiveRun | None) -> RunDetail | None:
        """The run as the log has it, however it ended; None if it never got there."""
        configuration = self.plan.configuration(request.configuration)
        sampling, run = self.plan.sampling, live or LiveRun(owner="")
        run.notes = (*self._target.notes, *self._notes.get(configuration.name, ()))
        if not sampling.greedy:
            sampling = sampling.replace(seed=(sampling.seed + request.repeat) % 2**63)

        def record() -> None:
            decode_and_record(
                self.log,
                self._target,
                self._drafters[configuration.name],
                configuration.config,
                prompt,
                sampling=sampling,
                limits=self.plan.limits,
                cancelled=self._is_over,
                undisturbed=live is None,
                title=configuration.title,
                labels={"category": request.item.category, "group": request.item.group},
                request=self._key(request),
                run=run,
            )

        try:
            self._attempt(configuration, record)
        except PlaygroundError:
            if run.log_id is None:
                raise
        run_id = run.log_id
        return None if run_id is None else self.log.wait_for(lambda: self.log.get(run_id))

    def _key(self, request: Request) -> RequestKey:
        """The request as its run names it."""
        return RequestKey(
            experiment_id=self.benchmark_id,
            kind=RUN_KINDS[self.plan.kind],
            trial=self.trial,
            suite=request.item.suite,
            prompt=request.item.id,
            turn=request.turn,
            repeat=request.repeat,
            configuration=request.configuration,
            worker=self.worker,
        )

    def _end_live_run(self, live: LiveRun, name: str, detail: RunDetail | None) -> None:
        """Show how a streamed run ended."""
        error = self._chooser.faults.get(name)
        reason = (detail and detail.finish_reason) or ""
        words = "failed" if error else REASON_WORDS.get(reason, "done")
        stopped = detail is None or detail.status != "completed"
        state: State = "failed" if error else "cancelled" if stopped else "completed"
        live.end(state, words, error=error)

    # ---- afterwards

    def _audit(self) -> None:
        requests = list(self._done.values())
        for name in self.plan.names[1:]:
            audit_divergences(
                self._target,
                self.log,
                plain_pairs(requests, name, self.plan),
                benchmark_id=self.benchmark_id,
                most=NUM_AUDITS[self.plan.kind],
                on_audit=partial(self._report_progress, f"auditing differences · {name}"),
                cancelled=self.cancelled,
            )

    def _report_progress(self, message: str, last: FinishedRequest | None = None) -> None:
        planned = self.plan.num_requests
        eta_s = self._chooser.remaining_s
        if eta_s is None and self._num_new:
            eta_s = (planned - self._num_done) * self._spent_s / self._num_new
        self.on_progress(Progress(self._num_done, planned, message, eta_s, self._num_failed, last))
