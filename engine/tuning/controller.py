"""Drafting that decides for itself: as much as pays at every step, never much slower than plain.

Three things are known at every step, all from what happened (`survival`, `costs`):

    chances     how likely each drafted token is to be accepted
    costs       what drafting so deep, verifying so many rows and a plain step take now
    account     loss = time of drafted steps - their tokens · time of a plain step

A token is worth the time that it takes at the present speed. Levels are drafted and nodes verified
while the tokens they bring are worth more than their time. Whether anything is drafted follows from
what recent drafts *realised*, not from forecasts; where they lost, a draft is tried now and then.
In both cases only while the account allows it: the loss so far and the most that the next draft can
lose stay within `SHARE` of the elapsed time. What earlier texts have gained gives a little credit.

A drafter that is not wanted does nothing at all: it is not started, and what it has to know of the
steps between is handed over when it is wanted again.

Lossless under sampling: decisions follow from past steps and from the drafter's own probabilities
of tokens that it did not draw at random, never from what the target says at this step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from engine.accept import Rule
from engine.config import Sampling
from engine.drafters.base import BuildContext, Drafter, Start
from engine.drafters.method import MethodConfig
from engine.model.target import Target
from engine.proposal import Budget, Outcome, Proposal, TargetOutput
from engine.tree import MAX_NODES, TreeShape, upload
from engine.tuning.costs import KINDS, LARGEST_STEP, Account, Kind
from engine.tuning.experience import LOOKUP, SHARE, SHORT, Experience, ExperienceStore, Returns
from engine.tuning.survival import uses_probs

TRIAL_SHARE, FIRST_TRIAL = 0.006, 0.4
"""Of the elapsed time, the most that drafts may lose which are tried while they do not pay, and at
first of a plain step; a quarter of that where they have seldom paid."""
REFRESH = 24
"""Steps after which a plain one is made to know what it takes; more where drafts gain much."""
FEW_ROWS = 3
"""Rows beside the root over which the price of one more is taken."""
LARGEST_MIN_PROB = 0.9
MOST_ASLEEP, KEPT_LOGITS = 256, 1 << 14
"""Steps that are kept for a sleeping drafter before it is told of them; fewer, by so many logits
each, where it reads them."""
PROVEN, SELDOM = 1.25, 0.9
"""Speeds of drafted steps over plain ones, in all texts: worth a risk, and hardly worth a trial."""
CAUTION = 1.5
"""Reading the prompt may take so many times what is known of it, and is of no use by itself."""
RISK = 0.2
"""Of what drafts of proven worth are expected to gain, what reading the prompt may take."""
BURST = 4
"""Drafts in a row of a trial: the first pays for what the drafter has missed."""
SHORT_PROMPT, SHORT_TEXT = 16, 64
"""Tokens of a prompt that tell how long reading takes, and of a text that has only begun."""


@dataclass(slots=True)
class _Trials:
    """Drafts of a kind that does not pay, or less than another.

    Attributes:
        share, first: what they may lose: of the elapsed time, and at first (ms).
        lost: what they have lost (ms).
        left: drafts of the trial under way.
    """

    share: float
    first: float
    lost: float = 0.0
    left: int = 0

    def allowed(self, elapsed: float) -> float:
        return self.first + self.share * elapsed - self.lost


@dataclass(frozen=True, slots=True)
class _Plan:
    """A draft to be made; it may lose `allowed` milliseconds in all."""

    kind: Kind
    depth: int
    allowed: float
    trial: _Trials | None


@dataclass(frozen=True, slots=True)
class _Drafted:
    """The step under way, if it drafts; it says how fast drafted steps are if it `counts`.

    Attributes:
        usual_draft_ms: what drafts like it take; `draft_ms` where none was made before.
    """

    kind: Kind
    draft_ms: float
    usual_draft_ms: float
    rows: int
    depth: int
    trial: _Trials | None
    counts: bool


Missed = tuple[Tensor, tuple[int, ...], tuple[int, ...], TargetOutput]
"""Tokens fed, accepted rows, tokens committed and the output of a step that a drafter slept."""


class ControlledDrafter(Drafter):
    """Wraps any drafter and asks it for as much as pays.

    Args:
        experience: what is known of it; goes on from text to text.
        clock: seconds, from any beginning.
        keep: told of the experience when a text has ended.
    """

    def __init__(
        self,
        inner: Drafter,
        target: Target,
        experience: Experience,
        *,
        clock: Callable[[], float] = time.perf_counter,
        keep: Callable[[Experience], None] = lambda experience: None,
    ) -> None:
        self.inner, self._device = inner, target.device
        self._clock, self._keep = clock, keep
        self.needs, self.notes, self.num_ranks = inner.needs, inner.notes, inner.num_ranks
        self.experience = experience
        self._none = torch.empty(0, target.vocab_size, device=target.device)
        self._by_probs = True
        self._extra_rows, self._worth = 0, 0.0
        self._start: Start | None = None

    # ---- a text

    def start(self, start: Start) -> None:
        self._began = self._clock()
        self.text = [*start.prompt_ids, start.root]
        self.account = Account()
        self._start, self._started = start, False
        self._missed: list[Missed] = []
        self._step: _Drafted | None = None
        self._awake = False
        self._num_steps = self._num_committed = 0
        self._num_prompt = len(start.prompt_ids)
        self._unread = self._num_prompt - (start.num_cached or 0)
        self._on_credit = False
        self._worth = self.experience.costs.base
        self._trials: dict[Kind, _Trials] = {}
        kinds = KINDS if self.inner.branches else KINDS[:1]
        speedups = {kind: self.experience.of_kind(kind).speedup for kind in kinds}
        horizon = SHORT if self.inner.has_network else LOOKUP
        self._returns = {kind: Returns(speedup, *horizon) for kind, speedup in speedups.items()}
        usual = min(start.limits.max_new_tokens, self.experience.answer_len or SHORT_TEXT)
        self._credit = min(self.experience.credit, SHARE * usual * self.experience.costs.base)

    def propose(self, budget: Budget) -> Proposal:
        began = self._clock()
        self._close_step(began)
        plan = self._plan(budget)
        if isinstance(plan, str):
            return self._plain(plan)
        num_unread, self._unread = self._unread, 0
        missed = bool(self._missed)
        self._wake()
        proposal = self.inner.propose(self._budget(budget, plan))
        self.experience.survival.observe_offer(len(proposal.shape) > 1)
        if len(proposal.shape) > 1:
            self._by_probs = uses_probs(proposal)
        self._extra_rows = proposal.num_rows - len(proposal.shape)
        draft_ms = 1000 * (self._clock() - began)
        costs, depth = self.experience.costs, proposal.shape.max_depth
        usual_ms = costs.draft_ms(plan.kind, depth) if plan.kind in costs.draft else draft_ms
        if not missed or plan.kind not in costs.draft:
            costs.observe_draft(plan.kind, depth, draft_ms)
        elif num_unread > SHORT_PROMPT:
            costs.observe_reading(draft_ms - costs.draft_ms(plan.kind, depth), num_unread)
        step = _Drafted(plan.kind, draft_ms, usual_ms, 1, 0, plan.trial, counts=not missed)
        return self._worthwhile(proposal, step, plan)

    def observe(self, outcome: Outcome) -> None:
        self._num_steps += 1
        self._num_committed = len(outcome.committed)
        self.text.extend(outcome.committed)
        shape, output = outcome.proposal.shape, outcome.output
        if self._awake:
            if len(shape) > 1:
                match_len = self.inner.match_len
                self.experience.survival.observe(outcome.proposal, outcome.path, match_len)
            self.inner.observe(outcome)
            return
        if len(shape) > 1:  # tokens that a grammar left no choice about
            self._step = _Drafted("tree", 0.0, 0.0, len(shape), shape.max_depth, None, counts=False)
        if not self.inner.reads_logits:  # not a view of them, which would keep them all
            output = TargetOutput(self._none, output.hidden, output.layers, shared=output.shared)
        self._missed.append((outcome.proposal.tokens, outcome.path, outcome.committed, output))
        size = max(len(self._missed), output.logits.numel() * len(self._missed) // KEPT_LOGITS)
        if self._started and size >= MOST_ASLEEP:
            self._tell()

    def finish(self) -> None:
        if self._start is None:
            return
        if self.inner.remembers:
            self._wake()
        if self._started:
            self.inner.finish()
        if self._num_steps:
            lost, elapsed = self.account.loss(self.experience.costs.base), self.account.elapsed
            self.experience.end_text(lost, elapsed, len(self.text) - self._num_prompt)
            self._keep(self.experience)
        self._start, self._missed = None, []

    # ---- whether to draft

    def _plan(self, budget: Budget) -> _Plan | str:
        """What to draft at this step, or why nothing."""
        if budget.depth < 1:
            return "the context ends here"
        if not self._num_steps:
            return "every text begins with a plain step"
        experience, elapsed = self.experience, self.account.elapsed
        costs = experience.costs
        speedups = {kind: own.speedup for kind, own in self._returns.items()}
        best = max(speedups, key=speedups.__getitem__)
        self._worth = costs.base / max(1.0, speedups[best])
        if costs.since_plain >= REFRESH * speedups[best] ** 2:
            return "plain decoding is measured again"
        loss = self.account.loss(costs.base)
        allowed = SHARE * elapsed + self._credit - loss
        reading = costs.reading_ms(self._unread)
        if reading and not self._on_credit and self._reads(reading):
            self._on_credit = True
            self._credit += CAUTION * reading + costs.base
            allowed += CAUTION * reading + costs.base
        # What pays less than another kind, or not at all: now and then, within a limit of its own.
        pays = speedups[best] >= 1
        for kind in speedups:
            if (kind != best) == pays:
                trial = self._trial(kind)
                most = allowed if trial.left else min(allowed, trial.allowed(elapsed))
                if depth := self._affordable(kind, budget.depth, most):
                    trial.left = (trial.left or BURST) - 1
                    return _Plan(kind, depth, most, trial)
                trial.left = 0
        if not pays:
            return f"drafts were {speedups[best]:.2f}× plain; {_words(loss)}"
        depth = self._affordable(best, budget.depth, allowed)
        if not depth:
            return f"a draft might lose more than is allowed; {_words(loss)}"
        return _Plan(best, depth, allowed, None)

    def _trial(self, kind: Kind) -> _Trials:
        """The trials of a kind in this text."""
        if kind not in self._trials:
            part = 1.0 if self.experience.of_kind(kind).speedup > SELDOM else 0.25
            first = part * FIRST_TRIAL * self.experience.costs.base
            self._trials[kind] = _Trials(part * TRIAL_SHARE, first)
        return self._trials[kind]

    def _affordable(self, kind: Kind, depth: int, allowed: float) -> int:
        """The greatest depth at which a draft that is wrong altogether loses no more; 0 = none."""
        costs = self.experience.costs
        if allowed <= 0:
            return 0
        allowed += costs.base - CAUTION * costs.reading_ms(self._unread)
        for levels in range(min(depth, costs.deepest(kind)), 0, -1):
            rows = 1 + levels + self._extra_rows
            if costs.draft_ms(kind, levels) + costs.verify_ms(rows) <= allowed:
                return levels if levels < costs.deepest(kind) else depth
        return 0

    def _reads(self, reading_ms: float) -> bool:
        """Whether the drafter may read the prompt on credit, as what it gained before justifies."""
        assert self._start is not None
        experience = self.experience
        speedup = max(own.speedup for own in experience.returns.values())
        written = len(self.text) - self._num_prompt
        usual = max(experience.answer_len - written, SHORT_TEXT)
        left = min(self._start.limits.max_new_tokens - written, usual)
        gain = (1 - 1 / speedup) * left * experience.costs.base
        return speedup > PROVEN and reading_ms < min(RISK * gain, experience.credit)

    # ---- how much

    def _budget(self, budget: Budget, plan: _Plan) -> Budget:
        """A level is drafted while the tokens that it brings are worth its time."""
        costs, survival = self.experience.costs, self.experience.survival
        row_ms = (costs.verify_ms(1 + FEW_ROWS) - costs.base) / FEW_ROWS
        level_ms = costs.level_ms(plan.kind)
        least = (level_ms + row_ms) / self._worth
        depth, width = plan.depth, 1 if plan.kind == "chain" and self.inner.branches else MAX_NODES
        if self._by_probs:
            min_prob = min(least / survival.factor, LARGEST_MIN_PROB)
            return Budget(depth, budget.nodes, width, min_prob)
        if level_ms > 0.01 * costs.base:
            levels, chance = 1, survival.chain_rate(1)
            while levels < depth:
                chance *= survival.chain_rate(levels + 1)
                if chance < least:
                    break
                levels += 1
            depth = levels
        return Budget(depth, budget.nodes, width)

    def _worthwhile(self, proposal: Proposal, step: _Drafted, plan: _Plan) -> Proposal:
        """The nodes of a draft that are worth verifying."""
        costs, size, draft_ms = self.experience.costs, len(proposal.shape), step.draft_ms
        self._step = step
        if size == 1 and not self._extra_rows:
            expected = (1.0, (draft_ms + costs.base) / 1000)
            return replace(proposal, decision="nothing was found to draft", expected=expected)
        allowed = max(0.0, plan.allowed - draft_ms)
        chances = self.experience.survival.paths(proposal, self.inner.match_len)
        order = sorted(range(size), key=lambda node: -chances[node])
        count, tokens, verify_ms = self._best(proposal.shape, chances, order, allowed)
        if self._extra_rows and verify_ms - costs.base > allowed:
            proposal, count = replace(proposal, extra=None), 1
            tokens, verify_ms = 1.0, costs.base
        elif count == size:
            order = []
        if order:
            nodes = sorted(order[:count])
            proposal = proposal.keep(
                range(count) if nodes[-1] == count - 1 else nodes, with_extra=True
            )
        shape = proposal.shape
        self._step = replace(step, rows=proposal.num_rows, depth=shape.max_depth)
        step_ms, loss = draft_ms + verify_ms, self.account.loss(costs.base)
        tried = ", on trial" if plan.trial else ""
        return replace(
            proposal,
            decision=f"{count - 1} of {size - 1} drafted{tried}: {tokens:.1f} tokens in "
            f"{step_ms:.1f} ms expected, plainly {tokens * costs.base:.1f}; {_words(loss)}",
            expected=(tokens, step_ms / 1000),
            bypass="not_worth_it" if count == 1 < size else proposal.bypass,
        )

    def _best(
        self, shape: TreeShape, chances: list[float], order: list[int], allowed: float
    ) -> tuple[int, float, float]:
        """Nodes to keep, root included; tokens that they bring; milliseconds of verifying them."""
        costs, worth, extra = self.experience.costs, self._worth, self._extra_rows
        depths = None if costs.curve.trees is None else shape.depths.tolist()
        best, most, tokens, deepest = (1, 1.0, costs.verify_ms(1 + extra)), 0.0, 0.0, 0
        for count, node in enumerate(order, start=1):
            tokens += chances[node]
            deepest = deepest if depths is None else max(deepest, depths[node])
            ms = costs.verify_ms(count + extra, deepest or None)
            if count == 1:
                most = worth - ms
            elif ms - costs.base > allowed:
                break
            elif tokens * worth - ms > most:
                best, most = (count, tokens, ms), tokens * worth - ms
        return best

    # ---- what became of it

    def _close_step(self, now: float) -> None:
        """What the last step took, from its beginning to this one's."""
        ms, self._began = 1000 * (now - self._began), now
        costs, step, self._step = self.experience.costs, self._step, None
        if not self._num_steps:
            return
        if step is None:
            before = costs.base
            costs.observe_plain(ms)
            self.account.plain(ms, before, costs.base)
            return
        verified_ms = ms - step.draft_ms
        hiccup = sum(
            took - usual
            for took, usual in (
                (step.draft_ms, step.usual_draft_ms),
                (verified_ms, costs.verify_ms(step.rows, step.depth or None)),
            )
            if took > LARGEST_STEP * usual and took - usual > costs.base
        )
        charged = self.account.drafted(ms, self._num_committed, hiccup)
        costs.observe_verify(verified_ms, step.rows, step.depth)
        if step.counts:
            for returns in (self._returns[step.kind], self.experience.of_kind(step.kind)):
                returns.observe(charged / costs.base, self._num_committed)
        if step.trial:
            step.trial.lost += max(0.0, charged - self._num_committed * costs.base)

    def _plain(self, reason: str) -> Proposal:
        self._awake = False
        return Proposal(
            torch.full((1,), self.text[-1], device=self._device),
            TreeShape.chain(0),
            decision=reason,
            expected=(1.0, self.experience.costs.base / 1000),
            bypass="not_worth_it",
        )

    # ---- sleep

    def _wake(self) -> None:
        assert self._start is not None
        self._awake = True
        if not self._started:
            self._started = True
            self.inner.start(self._start)
        self._tell()

    def _tell(self) -> None:
        """Hand over the steps that the drafter has missed, as one."""
        if self._missed:
            self.inner.observe(_merged(self._missed))
            self._missed = []

    def rule(self, sampling: Sampling) -> Rule:
        return self.inner.rule(sampling)

    def close(self) -> None:
        self.inner.close()


def _words(loss_ms: float) -> str:
    return f"{loss_ms:.0f} ms lost so far" if loss_ms > 0 else f"{-loss_ms:.0f} ms saved so far"


def _merged(missed: list[Missed]) -> Outcome:
    """Steps as one whose draft was accepted whole."""
    outputs = [output for *_, output in missed]
    paths = [list(path) for _, path, _, _ in missed]
    last = outputs[-1]
    output = TargetOutput(
        _rows([output.logits for output in outputs], paths),
        None if last.hidden is None else _rows([output.hidden for output in outputs], paths),
        None if last.layers is None else _rows([output.layers for output in outputs], paths),
        shared=last.shared,
    )
    tokens = _rows([tokens for tokens, *_ in missed], paths)
    committed = tuple(token for _, _, some, _ in missed for token in some)
    path = tuple(range(len(tokens)))
    return Outcome(Proposal(tokens, TreeShape.chain(len(tokens) - 1)), output, path, committed)


def _rows(tensors: list[Any], paths: list[list[int]]) -> Tensor:
    """The accepted rows of all steps; none where they were dropped."""
    if not len(tensors[-1]):
        return tensors[-1]  # type: ignore[no-any-return]
    device = tensors[-1].device
    kept = [upload(torch.tensor(path), device) for path in paths]
    return torch.cat([rows[path] for rows, path in zip(tensors, kept, strict=True)])


def build_drafter(
    config: MethodConfig, context: BuildContext, store: ExperienceStore | None = None
) -> Drafter:
    """The method's drafter, under the controller unless the method drafts as set.

    Args:
        store: where experience is kept; None = in memory, from text to text of this drafter.

    Raises DrafterError: the weights do not fit the target, or cannot be found.
    """
    drafter = config.build(context)
    if config.drafting == "as set" or not drafter.drafts:
        return drafter
    store = store or ExperienceStore(None)
    experience = store.of(config, context.target, context.locate)
    if drafter.has_network and not experience.costs.draft:
        experience.costs.time_drafts(drafter, context.target)
    return ControlledDrafter(
        drafter,
        context.target,
        experience,
        keep=lambda learnt: store.keep(config, context.target, learnt),
    )
