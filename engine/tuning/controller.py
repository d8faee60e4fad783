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
steps between is handed over when it is wanted again. The parts of a combination are asked in turn,
each by what its own drafts have brought: copying may pay where a model's drafts do not.

Lossless under sampling: decisions follow from past steps and from the drafter's own probabilities
of tokens that it did not draw at random, never from what the target says at this step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from engine.accept import Rule
from engine.config import Sampling
from engine.drafters.base import BuildContext, Drafter, Start
from engine.drafters.method import MethodConfig
from engine.model.target import Target
from engine.proposal import Budget, Outcome, Proposal
from engine.tree import MAX_NODES, TreeShape
from engine.tuning.costs import LARGEST_STEP, Account, Kind
from engine.tuning.experience import LOOKUP, SHARE, SHORT, Experience, ExperienceStore, Returns
from engine.tuning.sleeping import Part
from engine.tuning.survival import Draft, uses_probs

TRIAL_SHARE, FIRST_TRIAL = 0.006, 0.4
"""Of the elapsed time, the most that drafts may lose which are tried while they do not pay, and at
first of a plain step; a quarter of that where they have seldom paid."""
REFRESH = 24
"""Steps after which a plain one is made to know what it takes; more where drafts gain much."""
FEW_ROWS = 3
"""Rows beside the root over which the price of one more is taken."""
LARGEST_MIN_PROB = 0.9
FEW_MISSED = 4
"""Steps to catch up with that belong to a draft's usual time, where parts take turns."""
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

    part: Part
    kind: Kind
    depth: int
    allowed: float
    trial: _Trials | None


@dataclass(frozen=True, slots=True)
class _Drafted:
    """The step under way, if it drafts; it says how fast drafted steps are if it `counts`.

    Attributes:
        usual_draft_ms: what drafts like it take; `draft_ms` where none was made before.
        whole: all that was drafted; None where nothing was.
    """

    part: Part | None
    kind: Kind
    draft_ms: float
    usual_draft_ms: float
    rows: int
    depth: int
    trial: _Trials | None
    counts: bool
    whole: Proposal | None = None


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
        self._parts = [Part(part, copies=part is not inner.parts[-1]) for part in inner.parts]
        self._worth = 0.0
        self._start: Start | None = None

    # ---- a text

    def start(self, start: Start) -> None:
        self._began = self._clock()
        self.text = [*start.prompt_ids, start.root]
        self.account = Account()
        self._drafts: list[Draft] = []
        self._right_len = 0
        self._start = start
        self._step: _Drafted | None = None
        self._num_steps = self._num_committed = 0
        self._num_prompt = len(start.prompt_ids)
        self._on_credit = False
        self._worth = self.experience.costs.base
        self._trials: dict[Kind, _Trials] = {}
        self._returns: dict[Kind, Returns] = {}
        for part in self._parts:
            part.start(start)
            horizon = SHORT if part.drafter.has_network else LOOKUP
            for kind in part.kinds:
                self._returns[kind] = Returns(self.experience.of_kind(kind).speedup, *horizon)
        usual = min(start.limits.max_new_tokens, self.experience.answer_len or SHORT_TEXT)
        self._credit = min(self.experience.credit, SHARE * usual * self.experience.costs.base)

    def propose(self, budget: Budget) -> Proposal:
        began = self._clock()
        self._close_step(began)
        if reason := self._plainly(budget):
            return self._plain(reason)
        drafts: list[tuple[Proposal, _Drafted, _Plan]] = []
        for part in self._parts:
            plan = self._plan(part, budget)
            if isinstance(plan, str):
                reason = plan
                continue
            drafts.append((*self._draft(plan, budget, began), plan))
            if len(drafts[-1][0].shape) > 1:
                break
        if not drafts:
            return self._plain(reason)
        proposal, self._step, plan = drafts[-1]
        self.experience.survival.observe_offer(len(proposal.shape) > 1)
        return self._worthwhile(proposal, self._step, plan)

    def _draft(self, plan: _Plan, budget: Budget, began: float) -> tuple[Proposal, _Drafted]:
        """What a part drafts at the step that began then."""
        part, costs, asked = plan.part, self.experience.costs, self._clock()
        num_unread, part.unread = part.unread, 0
        num_missed = part.wake()
        proposal = part.drafter.propose(self._budget(budget, plan))
        if len(proposal.shape) > 1:
            part.by_probs = uses_probs(proposal)
        part.extra_rows = proposal.num_rows - len(proposal.shape)
        now, depth = self._clock(), proposal.shape.max_depth
        draft_ms, step_ms = 1000 * (now - asked), 1000 * (now - began)
        usual_ms = costs.draft_ms(plan.kind, depth) if plan.kind in costs.draft else draft_ms
        counts = not num_unread and num_missed <= (FEW_MISSED if len(self._parts) > 1 else 0)
        if counts or plan.kind not in costs.draft:
            costs.observe_draft(plan.kind, depth, draft_ms)
        elif num_unread > SHORT_PROMPT:
            costs.observe_reading(part.kinds, draft_ms - usual_ms, num_unread)
        usual_ms += step_ms - draft_ms
        return proposal, _Drafted(part, plan.kind, step_ms, usual_ms, 1, 0, plan.trial, counts)

    def observe(self, outcome: Outcome) -> None:
        self._num_steps += 1
        self._num_committed = len(outcome.committed)
        self.text.extend(outcome.committed)
        shape = outcome.proposal.shape
        step, is_right = self._step, False
        if step is not None and step.part is not None and step.whole is not None:
            match_len, whole = self._match_len(step.part), step.whole
            # One drawn at random is right by chance, not by its token; reading the tokens of one on
            # another device would wait for that.
            if whole.dists is None and whole.tokens.is_cpu:
                self._drafts.append(Draft(whole, match_len))
            elif len(shape) > 1:
                self.experience.survival.observe(outcome.proposal, outcome.path, match_len)
                is_right = shape.max_depth < len(outcome.path)
        elif len(shape) > 1:  # tokens that a grammar left no choice about
            step = step or _Drafted(None, "tree", 0.0, 0.0, 1, 0, None, counts=False)
            self._step = replace(step, rows=len(shape), depth=shape.max_depth, counts=False)
        self._learn(outcome.committed, is_right=is_right)
        for part in self._parts:
            part.observe(outcome)

    def finish(self) -> None:
        if self._start is None:
            return
        for draft in self._drafts:
            self.experience.survival.learn(draft)
        for part in self._parts:
            part.finish()
            if part.unread:
                self.experience.costs.doubt_reading(part.kinds)
        if self._num_steps:
            lost, elapsed = self.account.loss(self.experience.costs.base), self.account.elapsed
            self.experience.end_text(lost, elapsed, len(self.text) - self._num_prompt)
            self._keep(self.experience)
        self._start = None

    def _learn(self, committed: Sequence[int], *, is_right: bool) -> None:
        """How often drafts are accepted, of each once the text says so.

        Args:
            is_right: a draft that is not followed was accepted whole.
        """
        are_right = [is_right, *(draft.follow(committed) for draft in self._drafts)]
        self._right_len = self._right_len + len(committed) if any(are_right) else 0
        for draft in self._drafts:
            if not draft.is_open:
                self.experience.survival.learn(draft)
        self._drafts = [draft for draft in self._drafts if draft.is_open]

    def _match_len(self, part: Part) -> int:
        """What drafts without probabilities are judged by: the longer, the more are right."""
        length = part.drafter.match_len
        return self._right_len if length is None else length

    # ---- whether to draft

    def _plainly(self, budget: Budget) -> str:
        """Why nothing is drafted at this step, whoever would; empty = it may be."""
        if budget.depth < 1:
            return "the context ends here"
        if not self._num_steps:
            return "every text begins with a plain step"
        costs, best = self.experience.costs, max(own.speedup for own in self._returns.values())
        self._worth = costs.base / max(1.0, best)
        if costs.since_plain >= REFRESH * best**2:
            return "plain decoding is measured again"
        return ""

    def _plan(self, part: Part, budget: Budget) -> _Plan | str:
        """What a part is to draft at this step, or why nothing."""
        elapsed, costs = self.account.elapsed, self.experience.costs
        speedups = {kind: self._returns[kind].speedup for kind in part.kinds}
        best = max(speedups, key=speedups.__getitem__)
        loss = self.account.loss(costs.base)
        allowed = SHARE * elapsed + self._credit - loss
        reading = costs.reading_ms(best, part.unread)
        if reading and not self._on_credit and self._reads(part, reading):
            self._on_credit = True
            self._credit += CAUTION * reading + costs.base
            allowed += CAUTION * reading + costs.base
        # What pays less than another kind, or not at all: now and then, within a limit of its own.
        pays = speedups[best] >= 1
        for kind in speedups:
            if (kind != best) == pays:
                trial = self._trial(kind)
                most = allowed if trial.left else min(allowed, trial.allowed(elapsed))
                if depth := self._affordable(part, kind, budget.depth, most):
                    trial.left = (trial.left or BURST) - 1
                    return _Plan(part, kind, depth, most, trial)
                trial.left = 0
        if not pays:
            return f"drafts were {speedups[best]:.2f}× plain; {_words(loss)}"
        depth = self._affordable(part, best, budget.depth, allowed)
        if not depth:
            return f"a draft might lose more than is allowed; {_words(loss)}"
        return _Plan(part, best, depth, allowed, None)

    def _trial(self, kind: Kind) -> _Trials:
        """The trials of a kind in this text."""
        if kind not in self._trials:
            part = 1.0 if self.experience.of_kind(kind).speedup > SELDOM else 0.25
            first = part * FIRST_TRIAL * self.experience.costs.base
            self._trials[kind] = _Trials(part * TRIAL_SHARE, first)
        return self._trials[kind]

    def _affordable(self, part: Part, kind: Kind, depth: int, allowed: float) -> int:
        """The greatest depth at which a draft that is wrong altogether loses no more; 0 = none."""
        costs = self.experience.costs
        if allowed <= 0:
            return 0
        allowed += costs.base - CAUTION * costs.reading_ms(kind, part.unread)
        for levels in range(min(depth, costs.deepest(kind)), 0, -1):
            rows = 1 + levels + part.extra_rows
            if costs.draft_ms(kind, levels) + costs.verify_ms(rows) <= allowed:
                return levels if levels < costs.deepest(kind) else depth
        return 0

    def _reads(self, part: Part, reading_ms: float) -> bool:
        """Whether the drafter may read the prompt on credit, as what it gained before justifies."""
        assert self._start is not None
        experience = self.experience
        speedup = max(experience.of_kind(kind).speedup for kind in part.kinds)
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
        is_chain = plan.kind == "chain" and len(plan.part.kinds) > 1
        depth, width = plan.depth, 1 if is_chain else MAX_NODES
        if plan.part.by_probs:
            min_prob = min(least / survival.factor, LARGEST_MIN_PROB)
            return Budget(depth, budget.nodes, width, min_prob)
        if level_ms > 0.01 * costs.base:
            match_len = self._match_len(plan.part)
            levels, chance = 1, survival.chain_rate(1, match_len)
            while levels < depth:
                chance *= survival.chain_rate(levels + 1, match_len)
                if chance < least:
                    break
                levels += 1
            depth = levels
        return Budget(depth, budget.nodes, width)

    def _worthwhile(self, proposal: Proposal, step: _Drafted, plan: _Plan) -> Proposal:
        """The nodes of a draft that are worth verifying."""
        costs, size, draft_ms = self.experience.costs, len(proposal.shape), step.draft_ms
        part = plan.part
        if size == 1 and not part.extra_rows:
            expected = (1.0, (draft_ms + costs.base) / 1000)
            return replace(proposal, decision="nothing was found to draft", expected=expected)
        allowed = max(0.0, plan.allowed - draft_ms)
        chances = self.experience.survival.paths(proposal, self._match_len(part))
        order = sorted(range(size), key=lambda node: -chances[node])
        count, tokens, verify_ms = self._best(proposal, chances, order, allowed)
        if part.extra_rows and verify_ms - costs.base > allowed:
            proposal, count = replace(proposal, extra=None), 1
            tokens, verify_ms = 1.0, costs.base
        elif count == size:
            order = []
        whole = proposal
        if order:
            nodes = sorted(order[:count])
            proposal = proposal.keep(
                range(count) if nodes[-1] == count - 1 else nodes, with_extra=True
            )
        rows, depth = proposal.num_rows, proposal.shape.max_depth
        self._step = replace(step, rows=rows, depth=depth, whole=whole)
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
        self, proposal: Proposal, chances: list[float], order: list[int], allowed: float
    ) -> tuple[int, float, float]:
        """Nodes to keep, root included; tokens that they bring; milliseconds of verifying them."""
        costs, worth, shape = self.experience.costs, self._worth, proposal.shape
        extra = proposal.num_rows - len(shape)
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
        return Proposal(
            torch.full((1,), self.text[-1], device=self._device),
            TreeShape.chain(0),
            decision=reason,
            expected=(1.0, self.experience.costs.base / 1000),
            bypass="not_worth_it",
        )

    def rule(self, sampling: Sampling) -> Rule:
        return self.inner.rule(sampling)

    def close(self) -> None:
        self.inner.close()


def _words(loss_ms: float) -> str:
    return f"{loss_ms:.0f} ms lost so far" if loss_ms > 0 else f"{abs(loss_ms):.0f} ms saved so far"


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
    model = drafter.parts[-1]
    if model.has_network and not experience.costs.times(model):
        experience.costs.time_drafts(model, context.target)
    return ControlledDrafter(
        drafter,
        context.target,
        experience,
        keep=lambda learnt: store.keep(config, context.target, learnt),
    )
