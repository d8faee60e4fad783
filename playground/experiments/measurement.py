"""The one loop that measures: every request is decoded alone and timed by the engine's own clock.

Nothing but the loop runs while a request is timed: its records go to the log when its text is
finished (where people watch, they are streamed, by a thread that takes milliseconds of a core).
What is in the log as completed is never run again: killing the process loses the running request at
most, and measuring the same plan again does the rest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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
from playground.experiments.finished import FinishedRequest, Pair, finished_requests, pairs_of
from playground.experiments.job import Progress
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
from playground.host import paths
from playground.host.live import LiveRun, Message
from playground.host.recording import decode_and_record
from playground.host.stream import REASON_WORDS
from storage import RunDetail, RunLog

WARM_UP_PROMPT = "Write the numbers from one to twenty as words, and then backwards."
WARM_UP_TOKENS = 24
NUM_AUDITS: Mapping[Kind, int] = {"benchmark": 8, "compare": 1, "fastest": 0, "trial": 0}
"""Answers of a configuration that are audited where they differ from plain decoding's."""


def check_same_target(then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse to go on with an experiment on other weights or in another dtype.

    Args:
        then: environment of its first run; empty before it.
        now: the environment here.
    """
    for key in ("weights", "revision", "dtype"):
        if then and then.get(key) != now.get(key):
            raise ConfigError(
                f"The experiment began with {key} {then.get(key)!r}, but the target here has "
                f"{now.get(key)!r}: the figures could not be compared. Start a new one."
            )


@dataclass(frozen=True, slots=True)
class Skipped:
    """A turn that the target cannot take, and why."""

    suite: str
    prompt: str
    turn: int
    reason: str


@dataclass(frozen=True, slots=True)
class Summary:
    """How one pass over a plan ended.

    Attributes:
        faults: configurations that could not go on, and why.
        notes: what their figures should be read with, by configuration: a drafter
            that was made for other weights.
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


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a round is asked; no messages for plain text."""

    text: str
    messages: tuple[Message, ...]
    prompt_ids: tuple[int, ...]


Announce = Callable[[int, Sequence[Request], Prompt], Mapping[str, LiveRun]]
"""Told of every round before it begins (counted from 1); the runs to stream, by configuration."""


@dataclass(kw_only=True)
class Measurement:
    """One pass over what the log lacks of a plan.

    In a comparison and in a search, a configuration that fails is left out from then on. In a
    benchmark its request is in the log as failed, a later pass tries it again, and a bug ends it.

    Attributes:
        benchmark_id: the experiment's id, which its runs carry in the log.
        chooser: says which configurations go on; all, if it is left out.
        announce: for experiments that people watch: their runs stream while they are decoded.
        worker: its name among those of a cluster. What another machine has begun of a round is
            measured again, so that every ratio is of two times of one machine.
    """

    plan: ExperimentPlan
    log: RunLog
    benchmark_id: str
    tell: Callable[[Progress], None] = lambda progress: None
    cancelled: Callable[[], bool] = lambda: False
    chooser: Chooser | None = None
    announce: Announce | None = None
    worker: str = ""

    def __post_init__(self) -> None:
        self.chooser = self.chooser or Chooser(self.plan)
        self._drops_faulty = self.plan.kind in ("compare", "fastest")
        self.faults: dict[str, str] = {}
        self._done: dict[Key, FinishedRequest] = {}
        self._drafters: dict[str, Drafter] = {}
        self._experience = ExperienceStore(paths.drafting(), presets.priors())
        self._notes: dict[str, tuple[str, ...]] = {}
        self._skipped: dict[tuple[str, str, int], Skipped] = {}
        self._num_past = self._num_new = self._num_failed = 0
        self._spent_s = 0.0

    def run(self, bench: BuildContext) -> Summary:
        """Measure on a loaded target.

        Raises PlaygroundError: a drafter cannot be made, or the target cannot take text at all.
        """
        self._bench, self._target = bench, bench.target
        self.plan.runnable  # noqa: B018
        self._chosen.begin()
        mine = {request.key for requests in self.plan.rounds() for request in requests}
        requests = self.log.wait_for(lambda: finished_requests(self.log, self.benchmark_id))
        self._done = {request.key: request for request in requests if request.key in mine}
        for request in self._done.values():
            self._chosen.add(request, self.faults)
        whole = self._rounds()
        if whole and self.plan.sampling.greedy and NUM_AUDITS[self.plan.kind]:
            self._audit()
        return Summary(
            self.cancelled() and not whole,
            self._num_new,
            self._num_failed,
            tuple(self._skipped.values()),
            dict(self.faults),
            {name: notes for name, notes in self._notes.items() if notes},
        )

    @property
    def _chosen(self) -> Chooser:
        assert self.chooser is not None
        return self.chooser

    def _is_over(self) -> bool:
        return self.cancelled() or self._chosen.is_over

    # ---- rounds

    def _rounds(self) -> bool:
        """False if it was cancelled."""
        repeat = 0
        try:
            for number, requests in enumerate(self.plan.rounds(), start=1):
                if requests[0].repeat != repeat:
                    repeat = requests[0].repeat
                    self._close_drafters()
                if not self._round(number, requests):
                    return False
                if len(self.faults) == len(self.plan.configurations):
                    break
            self._say("done")
            return True
        finally:
            self._close_drafters()

    def _round(self, number: int, requests: Sequence[Request]) -> bool:
        """One turn of one prompt by every configuration; False if it was cancelled."""
        missing = self._missing(requests)
        self._num_past += len(requests) - len(missing)
        if not missing:
            return True
        item, turn = missing[0].item, missing[0].turn
        try:
            prompt = self._prompt(item, turn)
        except PromptError as error:
            skipped = Skipped(item.suite, item.id, turn, str(error))
            self._skipped[item.suite, item.id, turn] = skipped
            self._num_past += len(missing)
            return True
        if not self._drafters and not self._make_drafters():
            return False
        fit = [
            request
            for request in missing
            if request.configuration in self._drafters
            and self._chosen.answers(request.configuration)
        ]
        self._num_past += len(missing) - len(fit)
        runs = {} if self.announce is None else self.announce(number, fit, prompt)
        try:
            return all(
                not self._is_over()
                and self._answer(number, request, prompt, runs.get(request.configuration))
                for request in fit
            )
        finally:
            for run in runs.values():
                if not run.over.is_set():
                    run.activity = "stopped before it started"
                    run.end("cancelled")

    def _missing(self, requests: Sequence[Request]) -> list[Request]:
        """What is to be measured of a round: nothing of one that a single machine has done."""
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
        """New drafters, warmed up: some learn from text to text, and a repeat starts from none.

        Nobody sees the tokens of the warm-up, and the log has none of them: they are no result.
        """
        for configuration in self.plan.configurations:
            if self._is_over():
                return False
            if configuration.name not in self.faults and self._chosen.answers(configuration.name):
                self._say(f"warming up · {configuration.name}")
                self._attempted(configuration, lambda c=configuration: self._warm_up(c))  # type: ignore[misc]
        return True

    def _warm_up(self, configuration: Configuration) -> None:
        drafter = build_drafter(configuration.config, self._bench, self._experience)
        self._drafters[configuration.name] = drafter
        self._notes[configuration.name] = drafter.notes
        prompt_ids = self._encoded(
            [{"role": "user", "content": WARM_UP_PROMPT}], raw=not self._target.has_chat_template
        )
        limits = Limits(max_new_tokens=WARM_UP_TOKENS, ignore_eos=True)
        for _ in decode(self._target, drafter, prompt_ids, limits=limits, cancelled=self._is_over):
            pass

    def _attempted(self, configuration: Configuration, work: Callable[[], None]) -> None:
        """Do work for a configuration that is left out from then on if it fails."""
        if not self._drops_faulty:
            work()
            return
        done = attempt(work, where=f"running {configuration.name}")
        if isinstance(done, Fault):
            self._drop(configuration.name, done.sentence)

    def _drop(self, name: str, sentence: str) -> None:
        self.faults.setdefault(name, sentence)
        if (drafter := self._drafters.pop(name, None)) is not None:
            drafter.close()

    def _close_drafters(self) -> None:
        while self._drafters:
            self._drafters.popitem()[1].close()

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
        raw = item.raw or not (self._target.has_chat_template or item.suite == TYPED)
        prompt_ids = self._encoded(messages, raw=raw)
        check_prompt(self._target, prompt_ids)
        return Prompt(item.turns[turn], () if raw else tuple(messages), tuple(prompt_ids))

    def _encoded(self, messages: Sequence[Message], *, raw: bool) -> list[int]:
        """Token ids of a conversation; plain text where there is no chat template."""
        if raw:
            return self._target.encode("\n\n".join(message["content"] for message in messages))
        return self._target.encode_chat(list(messages))

    # ---- one request

    def _answer(self, number: int, request: Request, prompt: Prompt, live: LiveRun | None) -> bool:
        """Decode and record one request; False if it was cancelled on the way."""
        name = request.configuration
        if name in self.faults:
            self._num_past += 1
            return True
        rounds = self.plan.num_turns
        self._say(message := f"round {number} of {rounds} · {name}")
        began_s = time.perf_counter()
        detail = self._recorded(request, prompt, live)
        if live is not None:
            self._end(live, name, detail)
        if detail is not None and detail.status == "cancelled":
            return False
        self._num_past += 1
        last = None
        if detail is not None and detail.status == "completed":
            last = self._done[request.key] = FinishedRequest.of(detail)
            self._chosen.add(last, self.faults)
            self._num_new += 1
            self._spent_s += time.perf_counter() - began_s
        else:
            self._num_failed += 1
            if self._drops_faulty:
                self._drop(name, (detail and detail.error) or "The run failed.")
        self._say(message, last)
        return True

    def _recorded(self, request: Request, prompt: Prompt, live: LiveRun | None) -> RunDetail | None:
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
                prompt.prompt_ids,
                sampling=sampling,
                limits=self.plan.limits,
                cancelled=self._is_over,
                undisturbed=live is None,
                prompt_text=prompt.text,
                messages=prompt.messages,
                stored={
                    "method_title": configuration.title,
                    "benchmark_id": self.benchmark_id,
                    "labels": self._labels(request, configuration),
                },
                run=run,
            )

        try:
            self._attempted(configuration, record)
        except PlaygroundError:
            if run.log_id is None:
                raise
        run_id = run.log_id
        return None if run_id is None else self.log.wait_for(lambda: self.log.get(run_id))

    def _labels(self, request: Request, configuration: Configuration) -> dict[str, str]:
        labels = request.labels
        if self.plan.kind == "compare":
            place = self.plan.configurations.index(configuration)
            labels |= {"compare": self.benchmark_id, "place": str(place)}
        return labels | ({"worker": self.worker} if self.worker else {})

    def _end(self, live: LiveRun, name: str, detail: RunDetail | None) -> None:
        """Tell who watches a run how it ended."""
        error = self.faults.get(name) or (None if detail is None else detail.error)
        reason = None if detail is None else detail.finish_reason
        live.activity = "failed" if error else REASON_WORDS.get(reason or "", "done")
        ended = "failed" if detail is None else detail.status
        live.end(ended if ended in ("completed", "cancelled") else "failed", error=error)

    # ---- afterwards

    def pairs(self, name: str) -> list[Pair]:
        """What a configuration has answered so far, with plain decoding's answers."""
        return pairs_of(list(self._done.values()), name, self.plan)

    def _audit(self) -> None:
        for configuration in self.plan.configurations[1:]:
            audit_divergences(
                self._target,
                self.log,
                self.pairs(configuration.name),
                benchmark_id=self.benchmark_id,
                most=NUM_AUDITS[self.plan.kind],
                tell=lambda c=configuration: self._say(f"auditing differences · {c.name}"),  # type: ignore[misc]
                cancelled=self.cancelled,
            )

    def _say(self, message: str, last: FinishedRequest | None = None) -> None:
        planned = self.plan.num_requests
        eta_s = self._chosen.left_s
        if eta_s is None and self._num_new:
            eta_s = (planned - self._num_past) * self._spent_s / self._num_new
        self.tell(Progress(self._num_past, planned, message, eta_s, self._num_failed, last))
