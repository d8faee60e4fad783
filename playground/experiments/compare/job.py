"""Runs a comparison on the engine's thread: new drafters, warm-up, rounds, the lossless audit."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

from engine.config import Limits
from engine.decode import check_prompt, decode
from engine.drafters.method import MethodConfig
from engine.model.audit import audit
from engine.model.target import Target
from playground.errors import Fault, attempt
from playground.experiments.bench.audits import store_audit
from playground.experiments.bench.runner import WARM_UP_PROMPT, WARM_UP_TOKENS
from playground.experiments.bench.suites import Item
from playground.experiments.compare.board import Board, board_of
from playground.experiments.compare.figures import in_pairs
from playground.experiments.compare.plan import OWN_SUITE, ComparePlan
from playground.experiments.compare.report import report_text
from playground.experiments.compare.verdict import first_parting
from playground.host.live import LiveRun, Message, State
from playground.host.runner import EngineHost


@dataclass(frozen=True, slots=True)
class Round:
    """One prompt, once by every configuration that still runs.

    Attributes:
        number: from 1.
        runs: in the order of the configurations, whatever the order in which they run.
    """

    number: int
    repeat: int
    item: Item
    runs: tuple[LiveRun, ...]


class Comparison:
    """One comparison, from the queue to its end.

    The engine's thread writes; pages read.

    Attributes:
        round: the one that is running, or ran last.
        report: what came of it so far, JSON text; see `playground.experiments.compare.report`.
        board: what the report is made from; complete once it is over.
        whole: stands for all of it: state, words, progress, error.
    """

    whole: LiveRun

    def __init__(self, host: EngineHost, plan: ComparePlan, owner: str) -> None:
        self.id = secrets.token_hex(8)
        self.plan = plan
        self.board: Board | None = None
        self.round: Round | None = None
        self.report = ""
        self.num_done = 0
        self._host = host
        self._owner = owner

    @classmethod
    def start(cls, host: EngineHost, plan: ComparePlan, *, owner: str) -> Self:
        """Queue a comparison; an unfinished one of the same owner is cancelled.

        Raises:
            QueueFullError: too many are waiting.
        """
        comparison = cls(host, plan, owner)
        comparison.whole = host.submit(comparison._work, owner=owner)
        return comparison

    @property
    def over(self) -> bool:
        return self.whole.over.is_set()

    def ahead(self) -> int:
        """Jobs to be done before this one starts."""
        return self._host.ahead_of(self.whole)

    def cancel(self) -> None:
        """Stop it within a step; what has run stays in the log."""
        self._host.cancel_owner(self._owner)

    # ---- on the engine's thread

    def _work(self, whole: LiveRun) -> None:
        self.whole = whole
        target = self._host.prepare(whole, self.plan.target, self.plan.dtype)
        whole.state, whole.progress = "running", 0.0
        board = board_of(self.plan, self.id, target.dtype_name, target.device_name)
        self.board = board
        try:
            self._run_rounds(target, board)
        finally:
            for run in () if self.round is None else self.round.runs:
                if not run.over.is_set():
                    run.end("cancelled")
        self._audit(target, board)
        self._end(board)

    def _run_rounds(self, target: Target, board: Board) -> None:
        warm: int | None = None
        for repeat, item, order in self.plan.rounds():
            if warm != repeat:
                self._warm_up(target, board)
                warm = repeat
            if self._is_done(board):
                return
            self._do_round(board, target, repeat, item, order)

    def _is_done(self, board: Board) -> bool:
        """Whether it was stopped, or nothing is left that could run."""
        left = [c for c in self.plan.configurations if c.name not in board.faults]
        return self.whole.cancel_asked.is_set() or not left

    def _warm_up(self, target: Target, board: Board) -> None:
        """New drafters, because some learn from text to text, and a few tokens by each.

        Nobody sees these tokens, and the log has none of them: they are no result.
        """
        self._host.forget_drafters()
        for configuration in self.plan.configurations:
            if configuration.name in board.faults or self.whole.cancel_asked.is_set():
                continue
            self.whole.words = f"warming up · {configuration.name}"
            write = partial(self._write_unseen, target, configuration.config)
            done = attempt(write, where=f"warming up {configuration.name}")
            if isinstance(done, Fault):
                board.faults[configuration.name] = done.sentence

    def _write_unseen(self, target: Target, config: MethodConfig) -> None:
        drafter = self._host.drafter(config, keep=len(self.plan.configurations))
        messages = [{"role": "user", "content": WARM_UP_PROMPT}]
        chat = target.has_chat_template
        prompt_ids = target.encode_chat(messages) if chat else target.encode(WARM_UP_PROMPT)
        limits = Limits(max_new_tokens=WARM_UP_TOKENS, ignore_eos=True)
        for _ in decode(
            target, drafter, prompt_ids, limits=limits, cancelled=self.whole.cancel_asked.is_set
        ):
            pass

    def _do_round(
        self, board: Board, target: Target, repeat: int, item: Item, order: Sequence[int]
    ) -> None:
        """One prompt by every configuration, in this order; one that does not fit is left out."""
        plain_text = item.suite != OWN_SUITE and not target.has_chat_template
        asked = replace(item, raw=item.raw or plain_text)
        fits = attempt(partial(_check_fits, target, asked), where=f"prompt {item.id}")
        if isinstance(fits, Fault):
            board.skipped[item.id] = fits.sentence
            return
        left = [i for i in sorted(order) if self.plan.configurations[i].name not in board.faults]
        runs = {i: self._announce(i, asked, repeat) for i in left}
        number = 1 if self.round is None else self.round.number + 1
        self.round = Round(number, repeat, item, tuple(runs[i] for i in left))
        for i in order:
            if i in runs:
                self._perform(board, i, asked, repeat, runs[i])
        self.report = report_text(self._host.log, board)

    def _announce(self, at: int, item: Item, repeat: int) -> LiveRun:
        """A run that panels can show from now on."""
        run = self._host.announce(self.plan.request(at, item), owner=self._owner)
        if not item.raw:
            run.messages = _messages(item)
            run.meta = {**run.meta, "history": run.messages[:-1]}
        return run

    def _perform(self, board: Board, at: int, item: Item, repeat: int, run: LiveRun) -> None:
        configuration = self.plan.configurations[at]
        number = 0 if self.round is None else self.round.number
        self.whole.words = f"round {number} of {self.plan.num_rounds} · {configuration.name}"
        if self.whole.cancel_asked.is_set():
            run.words = "stopped before it started"
            run.end("cancelled")
            return
        request = self.plan.request(at, item)
        sampling = request.sampling
        if not sampling.greedy:
            sampling = sampling.replace(seed=(sampling.seed + repeat) % 2**63)
        labels = self.plan.labels(self.id, at, item, repeat)
        self._host.perform(
            run,
            replace(request, sampling=sampling),
            stored={"labels": labels},
            keep=len(self.plan.configurations),
        )
        self.num_done += 1
        total = self.plan.num_rounds * len(self.plan.configurations)
        self.whole.progress = self.num_done / total
        self._book(board, configuration.name, run)

    def _book(self, board: Board, name: str, run: LiveRun) -> None:
        """Add a run that is over to the board, as the log has it."""
        stored = None if run.log_id is None else self._host.log.get(run.log_id)
        if stored is not None:
            board.add(stored)
        if run.state == "failed" and run.error:
            board.faults.setdefault(name, run.error)

    def _audit(self, target: Target, board: Board) -> None:
        """Look into the first divergence of every configuration, where texts can be compared."""
        if not self.plan.sampling.greedy:
            return
        plain = board.of(board.plain)
        for entry in board.entries[1:]:
            found = first_parting(in_pairs(board.of(entry.name), plain))
            if found is None or self.whole.cancel_asked.is_set():
                continue
            self.whole.words = f"looking into the divergence · {entry.name}"
            (own, reference), _ = found
            stored = self._host.log.get(reference.run_id)
            if stored is None:
                continue
            texts = reference.output_ids, own.output_ids
            look = partial(audit, target, stored.prompt_ids, *texts)
            seen = attempt(look, where=f"the audit of {entry.name}")
            if seen is not None and not isinstance(seen, Fault):
                board.audits[entry.name] = seen
                store_audit(self._host.log, own.run_id, reference.run_id, seen)

    def _end(self, board: Board) -> None:
        whole = self.whole
        self.report = report_text(self._host.log, board)
        problems = [*board.faults.values(), *board.skipped.values()]
        failed = bool(problems) and not board.runs
        state: State = "failed" if failed else "completed"
        if whole.cancel_asked.is_set():
            state = "cancelled"
        whole.words = {"cancelled": "stopped", "failed": "failed"}.get(state, "done")
        whole.end(state, error=problems[0] if state == "failed" else None)


def _messages(item: Item) -> list[Message]:
    """The conversation up to the first turn."""
    history = [dict(message) for message in item.history]
    return [*history, {"role": "user", "content": item.turns[0]}]


def _check_fits(target: Target, item: Item) -> None:
    """Raises PromptError: the target cannot take the prompt."""
    text = item.turns[0]
    check_prompt(target, target.encode(text) if item.raw else target.encode_chat(_messages(item)))
