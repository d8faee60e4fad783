"""Runs a plan: every request is decoded alone, timed by the loop, and then written to the log.

A request's records are handed to the recorder when its text is finished, so that nothing but the
loop runs while it is timed. What is in the log as completed is never run again: killing the process
loses the running request at most, and running the same plan under the same id does the rest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from engine.config import Limits, Sampling
from engine.decode import decode
from engine.drafters.base import Drafter
from engine.drafters.method import MethodConfig
from engine.errors import PlaygroundError, PromptError
from engine.model.target import Target
from engine.steps import End, Record
from playground.experiments.bench.measured import Measured, measured_runs
from playground.experiments.bench.plan import Key, Plan, Request
from playground.experiments.bench.progress import Eta, Outcome, Progress, Skipped
from playground.experiments.bench.suites import Item
from playground.host.recording import record_run
from storage import RunLog

__all__ = ["Bench", "Outcome", "Progress", "Skipped", "run_plan"]
WARM_UP_PROMPT = "Write the numbers from one to twenty as words, and then backwards."
WARM_UP_TOKENS = 24
Message = dict[str, str]


class Bench(Protocol):
    """Where a plan runs: a loaded target, and drafters made for it."""

    @property
    def target(self) -> Target: ...

    def new_drafter(self, config: MethodConfig) -> Drafter:
        """A drafter that nobody else uses; the caller closes it."""


def run_plan(
    plan: Plan,
    bench: Bench,
    log: RunLog,
    benchmark_id: str,
    *,
    tell: Callable[[Progress], None] = lambda progress: None,
    cancelled: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Run what the log lacks of a plan.

    A request that fails is in the log as failed, and the rest goes on; a later call tries it again.

    Raises:
        PlaygroundError: a drafter cannot be made, or the target cannot take text at all.
    """
    return _Run(plan, bench, log, benchmark_id, tell, cancelled).run()


class _Run:
    """State of one call: what is done, the conversations so far, the drafters, the clock."""

    def __init__(
        self,
        plan: Plan,
        bench: Bench,
        log: RunLog,
        benchmark_id: str,
        tell: Callable[[Progress], None],
        cancelled: Callable[[], bool],
    ) -> None:
        self._plan = plan
        self._bench = bench
        self._log = log
        self._id = benchmark_id
        self._tell = tell
        self._cancelled = cancelled
        self._done: dict[Key, Measured] = {m.key: m for m in measured_runs(log, benchmark_id)}
        self._drafters: dict[str, Drafter] = {}
        self._skipped: dict[tuple[str, str, int], Skipped] = {}
        self._num_past = self._num_new = self._num_failed = 0
        self._eta = Eta()

    def run(self) -> Outcome:
        repeat = 0
        try:
            for requests in self._plan.rounds():
                if requests[0].repeat != repeat:
                    repeat = requests[0].repeat
                    self._close_drafters()
                if not self._round(requests):
                    return self._outcome(cancelled=True)
            self._say("done")
            return self._outcome(cancelled=False)
        finally:
            self._close_drafters()

    def _outcome(self, *, cancelled: bool) -> Outcome:
        skipped = tuple(self._skipped.values())
        return Outcome(cancelled, self._num_new, self._num_failed, skipped)

    def _round(self, requests: Sequence[Request]) -> bool:
        """One turn of one prompt by every configuration; False if it was cancelled."""
        missing = [request for request in requests if request.key not in self._done]
        self._num_past += len(requests) - len(missing)
        if not missing:
            return True
        item, turn = missing[0].item, missing[0].turn
        try:
            messages = self._messages(item, turn)
            prompt_ids = self._prompt_ids(item, messages)
        except PromptError as error:
            self._skipped[item.suite, item.id, turn] = Skipped(
                item.suite, item.id, turn, str(error)
            )
            self._num_past += len(missing)
            return True
        if not self._drafters and not self._make_drafters():
            return False
        return all(
            not self._cancelled() and self._answer(request, messages, prompt_ids)
            for request in missing
        )

    # ---- drafters

    def _make_drafters(self) -> bool:
        """New drafters, warmed up: some learn from text to text, and a repeat starts from none."""
        for configuration in self._plan.configurations:
            if self._cancelled():
                return False
            self._say(f"preparing {configuration.name}")
            drafter = self._bench.new_drafter(configuration.config)
            self._drafters[configuration.name] = drafter
            self._warm_up(drafter)
        return True

    def _warm_up(self, drafter: Drafter) -> None:
        target = self._bench.target
        prompt_ids = _encode(target, [{"role": "user", "content": WARM_UP_PROMPT}])
        limits = Limits(max_new_tokens=WARM_UP_TOKENS, ignore_eos=True)
        for _ in decode(target, drafter, prompt_ids, limits=limits, cancelled=self._cancelled):
            pass

    def _close_drafters(self) -> None:
        while self._drafters:
            self._drafters.popitem()[1].close()

    # ---- prompts

    def _messages(self, item: Item, turn: int) -> list[Message]:
        """The conversation up to a turn, with the reference's answers of the first repeat.

        Raises:
            PromptError: an earlier turn has no answer.
        """
        messages = [dict(message) for message in item.history]
        for earlier in range(turn):
            key = (item.suite, item.id, earlier, 0, self._plan.reference.name)
            answer = self._done.get(key)
            if answer is None:
                raise PromptError(f"Turn {earlier + 1} has no answer to go on from.")
            messages.append({"role": "user", "content": item.turns[earlier]})
            messages.append({"role": "assistant", "content": answer.text})
        return [*messages, {"role": "user", "content": item.turns[turn]}]

    def _prompt_ids(self, item: Item, messages: list[Message]) -> list[int]:
        """Raises PromptError: it leaves no room for an answer."""
        target = self._bench.target
        prompt_ids = _encode(target, messages, raw=item.raw)
        if len(prompt_ids) >= target.context_len:
            raise PromptError(
                f"{len(prompt_ids)} tokens do not fit the context of {target.context_len}."
            )
        return prompt_ids

    # ---- one request

    def _answer(self, request: Request, messages: list[Message], prompt_ids: list[int]) -> bool:
        """Decode and record one request; False if it was cancelled on the way."""
        where = f"{request.item.suite} · {request.item.id} · {request.configuration}"
        self._say(where)
        began_s = time.perf_counter()
        run_id = self._record(request, messages, prompt_ids)
        detail = self._log.get(run_id)
        assert detail is not None
        if detail.status == "cancelled":
            return False
        self._num_past += 1
        last = None
        if detail.status == "completed":
            last = self._done[request.key] = Measured.of(detail)
            self._num_new += 1
            self._eta.add(request.configuration, time.perf_counter() - began_s)
        else:
            self._num_failed += 1
        self._say(where, last)
        return True

    def _record(self, request: Request, messages: list[Message], prompt_ids: list[int]) -> str:
        """The run's id; it is in the log however it ended."""
        plan, target = self._plan, self._bench.target
        configuration = plan.configuration(request.configuration)
        sampling = _seeded(plan.sampling, request.repeat)
        raw = request.item.raw or not target.has_chat_template
        recorder = record_run(
            self._log,
            target,
            configuration.config,
            sampling=sampling,
            limits=plan.limits,
            prompt_ids=prompt_ids,
            prompt_text=messages[-1]["content"],
            messages=() if raw else messages,
            stored={
                "method_title": configuration.title,
                "benchmark_id": self._id,
                "labels": request.labels,
            },
        )
        run_id = ""
        try:
            with recorder as recording:
                run_id = recording.run_id
                records: list[Record] = []
                try:
                    drafter = self._drafters[request.configuration]
                    records += self._decode(drafter, prompt_ids, sampling)
                finally:
                    for record in records:
                        recording.put(record)
        except PlaygroundError:
            if not run_id:
                raise
        return run_id

    def _decode(
        self, drafter: Drafter, prompt_ids: Sequence[int], sampling: Sampling
    ) -> list[Record]:
        limits = self._plan.limits
        records = list(
            decode(
                self._bench.target,
                drafter,
                prompt_ids,
                sampling=sampling,
                limits=limits,
                cancelled=self._cancelled,
            )
        )
        assert isinstance(records[-1], End)
        return records

    def _say(self, words: str, last: Measured | None = None) -> None:
        total = self._plan.num_requests
        eta_s = self._eta.seconds(total - self._num_past)
        self._tell(Progress(self._num_past, total, self._num_failed, words, eta_s, last))


def _seeded(sampling: Sampling, repeat: int) -> Sampling:
    return sampling if sampling.greedy else sampling.replace(seed=sampling.seed + repeat)


def _encode(target: Target, messages: Sequence[Message], *, raw: bool = False) -> list[int]:
    """Token ids of a conversation; plain text where there is no chat template."""
    if raw or not target.has_chat_template:
        return target.encode("\n\n".join(message["content"] for message in messages))
    return target.encode_chat(list(messages))
