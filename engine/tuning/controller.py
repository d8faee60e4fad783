"""The controller: whether to draft at a step, with which drafter, and how much.

It decides by what past steps have shown:

    survival    how likely each draft token is to be accepted
    costs       time of a draft by depth, of verifying n rows, and of a plain step
    speedups    realized speed of recent drafted steps over plain decoding, by kind of draft
    account     loss = time of drafted steps - their tokens · time of a plain step

A step is decided in this order (`ControlledDrafter.propose`):

    1. Some steps are plain: the first of a text, and one now and then to time it.
    2. Each drafter of the method in turn may draft the kind that was fastest so far. A kind that is
       slower than plain decoding, or than another kind, is only tried occasionally. Either way the
       loss so far and the most that the draft can lose must stay within `MAX_LOSS_SHARE` of the
       elapsed time, plus a little credit that earlier texts have left.
    3. Levels are drafted while the tokens that they are expected to bring are worth their time; a
       token is worth what it takes at the present speed.
    4. Nodes of the draft are verified on the same condition.

A session that may not draft does nothing, and reads later what it missed (`FeatureLog`). The
sessions of a combination are judged each by its own drafts: copying may pay off where a model's
drafts do not.

Lossless under sampling: decisions follow from past steps and from the drafter's own probabilities
of tokens that it did not sample, never from the target's output at this step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from engine.accept import Rule
from engine.drafters.base import BuildContext, Drafter, DraftSession, Start, root_only
from engine.drafters.method import MethodConfig
from engine.model.clock import time_s
from engine.model.target import Target
from engine.proposal import Budget, Outcome, Proposal
from engine.tree import MAX_NODES
from engine.tuning.account import LossAccount, RunningSpeedup, Trials
from engine.tuning.costs import DraftKind
from engine.tuning.experience import MAX_LOSS_SHARE, Experience, ExperienceStore
from engine.tuning.survival import TrackedDraft, has_usable_probs
from engine.tuning.turn import DraftedStep, DraftPlan, Turn

SHORT_TERM = (0.98, 20.0)
"""`memory` and `prior_steps` of the speedups within a text."""
TRIAL_LOSS_SHARE, TRIAL_LOSS_STEPS = 0.006, 0.4
"""The most that trials may lose: a share of the elapsed time, and an initial amount in plain steps;
a quarter of both for kinds below `POOR_SPEEDUP`."""
TRIAL_DRAFTS = 4
"""Drafts of a trial: the first pays for catching up with the steps that the drafter missed."""
REPEAT_STEPS = 3
"""Steps for which a decision is kept that brought no draft: deciding takes 3% of a small model's
step."""
REFRESH_STEPS = 24
"""Steps after which a plain one is made to time it; more where drafts gain much."""
ROW_COST_ROWS = 7
"""Rows beside the root over which the cost of one more row is averaged."""
MAX_MIN_PROB = 0.9
"""Bound of the draft probability below which a path is not drafted further."""
MAX_USUAL_MISSED = 4
"""In a combination, catching up with this many missed steps is part of a draft's usual time."""
PROVEN_SPEEDUP, POOR_SPEEDUP = 1.1, 0.9
"""Of a kind of draft over all texts: worth reading the prompt on credit; hardly worth a trial."""
PROMPT_TIME_FACTOR = 1.5
"""Allowance for reading the prompt, over its expected time."""
PROMPT_GAIN_SHARE = 0.2
"""Of the gain expected of proven drafts, the most that reading the prompt may take."""
MIN_TIMED_PROMPT, DEFAULT_ANSWER_LEN = 16, 64
"""Prompt tokens from which the time of reading is learnt; length expected of a text."""


class ControlledSession(DraftSession["ControlledDrafter"]):
    """One text under the controller."""

    def __init__(self, drafter: ControlledDrafter, start: Start) -> None:
        super().__init__(drafter, start)
        self._inner = drafter.inner.open(start)
        self.experience, self._clock = drafter.experience, drafter.clock
        parts = self._inner.parts
        self._turns = [Turn(part, copies=part is not parts[-1]) for part in parts]
        self._step_began_s = self._clock()
        self.account = LossAccount()
        self._open_drafts: list[TrackedDraft] = []
        self._step: DraftedStep | None = None
        self._num_steps = self._num_committed = self._num_right_in_a_row = 0
        self._follows_draft = self._reads_on_credit = False
        self._token_ms = plain_ms = self.experience.costs.plain_ms
        self._trials: dict[DraftKind, Trials] = {}
        self._speedups: dict[DraftKind, RunningSpeedup] = {}
        for turn in self._turns:
            for kind in turn.kinds:
                prior = self.experience.speedup_of(kind).value
                self._speedups[kind] = RunningSpeedup(prior, *SHORT_TERM)
        usual_len = self.experience.answer_len or DEFAULT_ANSWER_LEN
        usual_ms = min(start.limits.max_new_tokens, usual_len) * plain_ms
        self._credit_ms = min(self.experience.credit * plain_ms, MAX_LOSS_SHARE * usual_ms)

    def propose(self, budget: Budget) -> Proposal:
        began_s = self._clock()
        self._record_last_step(began_s)
        if reason := self._reason_for_plain_step(budget):
            return self._plain_step(reason)
        drafted: tuple[Proposal, DraftedStep] | None = None
        for turn in self._turns:
            decision = self._decide(turn, budget)
            if isinstance(decision, str):
                reason = decision
                continue
            drafted = self._draft(decision, began_s)
            if len(drafted[0].shape) > 1:
                turn.num_repeats = 0
                break
        if drafted is None:
            return self._plain_step(reason)
        proposal, step = drafted
        self.experience.survival.observe_attempt(len(proposal.shape) > 1)
        proposal = self._prune(proposal, step)
        step.propose_ms = 1000 * (self._clock() - began_s)
        return proposal

    def _draft(self, plan: DraftPlan, step_began_s: float) -> tuple[Proposal, DraftedStep]:
        """Make the planned draft and time it."""
        turn, kind, costs = plan.turn, plan.kind, self.experience.costs
        began_s = self._clock()
        num_unread, turn.num_unread = turn.num_unread, 0
        num_missed, turn.num_missed, turn.was_asked = turn.num_missed, 0, True
        turn.session.read()
        caught_up_s = self._clock()
        proposal = turn.session.propose(plan.budget)
        if len(proposal.shape) > 1:
            turn.has_draft_probs = has_usable_probs(proposal)
        turn.num_extra_rows = proposal.num_rows - len(proposal.shape)
        now_s, depth = self._clock(), proposal.shape.max_depth
        draft_ms, since_step_ms = 1000 * (now_s - began_s), 1000 * (now_s - step_began_s)
        is_first, own_ms = kind not in costs.draft_times, 1000 * (now_s - caught_up_s)
        usual_ms = own_ms if is_first else costs.draft_ms(kind, depth)
        max_missed = MAX_USUAL_MISSED if len(self._turns) > 1 else 0
        is_typical = not num_unread and num_missed <= max_missed
        if is_typical or is_first:
            costs.observe_draft(kind, depth, draft_ms if is_typical else own_ms)
        if num_unread > MIN_TIMED_PROMPT:
            costs.observe_prompt(turn.kinds[0], draft_ms - usual_ms, num_unread)
        # Reading and catching up are no hiccups: they are charged whole.
        usual_ms = since_step_ms - draft_ms + (usual_ms if is_typical else draft_ms)
        return proposal, DraftedStep(plan, since_step_ms, usual_ms, is_typical)

    def observe(self, outcome: Outcome) -> None:
        self._num_steps += 1
        self._num_committed = len(outcome.committed)
        shape = outcome.proposal.shape
        step, is_right = self._step, False
        if step is None and len(shape) > 1:  # tokens that a grammar left no choice about
            self._step = step = DraftedStep()
        if step is not None:  # as verified: a grammar cuts drafts and adds to them
            step.rows, step.depth = outcome.proposal.num_rows, shape.max_depth
        if step is not None and step.plan is not None and step.draft is not None:
            match_len, draft = self._match_len(step.plan.turn), step.draft
            # Sampled tokens are right by chance. Tokens on another device would have to be waited
            # for.
            if draft.dists is None and draft.tokens.is_cpu:
                self._open_drafts.append(TrackedDraft(draft, match_len))
            elif len(shape) > 1:
                self.experience.survival.observe(outcome.proposal, outcome.path, match_len)
                is_right = shape.max_depth < len(outcome.path)
        elif step is not None and len(shape) > 1:
            step.is_typical = False
        self._follow_drafts(outcome.committed, is_right=is_right)
        for turn in self._turns:
            if turn.was_asked:
                turn.session.observe(outcome)
            else:
                turn.num_missed += 1
            turn.was_asked = False

    def close(self) -> None:
        costs = self.experience.costs
        for draft in self._open_drafts:
            self.experience.survival.observe_tracked(draft)
        self._inner.close()
        for turn in self._turns:
            if turn.num_unread:
                costs.decay_prompt_ms(turn.kinds[0])
        if self._num_steps:
            self.drafter.loss_ms = loss_ms = self.loss_ms
            elapsed_ms = self.account.elapsed_ms
            self.experience.end_text(loss_ms, elapsed_ms, len(self.text) - self.log.num_prompt)
            for kind, trials in self._trials.items():
                self.experience.trial_debts_ms[kind] = max(0.0, -trials.balance_ms(elapsed_ms))
            self.drafter.save(self.experience)

    def rule(self) -> Rule:
        return self._inner.rule()

    @property
    def loss_ms(self) -> float:
        """What drafting has lost in this text, by the account; negative for a gain."""
        costs = self.experience.costs
        return self.account.loss_ms(costs.plain_ms, costs.noise)

    def _follow_drafts(self, committed: Sequence[int], *, is_right: bool) -> None:
        """Judge open drafts by the text; `is_right`: an untracked draft was accepted whole."""
        any_right = any([is_right, *(draft.follow(committed) for draft in self._open_drafts)])
        self._num_right_in_a_row = self._num_right_in_a_row + len(committed) if any_right else 0
        for draft in self._open_drafts:
            if not draft.is_open:
                self.experience.survival.observe_tracked(draft)
        self._open_drafts = [draft for draft in self._open_drafts if draft.is_open]

    def _match_len(self, turn: Turn) -> int:
        """What drafts without probabilities are judged by: see `survival.MATCH_BINS`."""
        return self._num_right_in_a_row + (turn.session.match_len or 0)

    # ---- whether to draft

    def _reason_for_plain_step(self, budget: Budget) -> str:
        """The reason why this step must be plain; empty = drafters may draft."""
        if budget.depth < 1:
            return "the context ends here"
        if not self._num_steps:
            return "every text begins with a plain step"
        costs, best = self.experience.costs, max(s.value for s in self._speedups.values())
        self._token_ms = costs.plain_ms / max(1.0, best)
        if costs.steps_since_plain >= REFRESH_STEPS * best**2:
            return "plain decoding is measured again"
        return ""

    def _decide(self, turn: Turn, budget: Budget) -> DraftPlan | str:
        """What a drafter is to draft at this step, or the reason for no draft."""
        if turn.num_repeats and budget.depth >= MAX_NODES:  # the context does not end soon
            turn.num_repeats -= 1
            return turn.decision
        turn.decision = decision = self._plan_draft(turn, budget)
        if isinstance(decision, str) or not (decision.trial or turn.traits.has_network):
            turn.num_repeats = REPEAT_STEPS
        return decision

    def _plan_draft(self, turn: Turn, budget: Budget) -> DraftPlan | str:
        elapsed_ms, costs = self.account.elapsed_ms, self.experience.costs
        speedups = {kind: self._speedups[kind].value for kind in turn.kinds}
        fastest = max(speedups, key=speedups.__getitem__)
        loss_ms = self.loss_ms
        max_loss_ms = MAX_LOSS_SHARE * elapsed_ms + self._credit_ms - loss_ms
        prompt_ms = costs.prompt_ms(turn.kinds[0], turn.num_unread)
        if prompt_ms and not self._reads_on_credit and self._may_read_prompt(turn, prompt_ms):
            self._reads_on_credit = True
            reading_credit_ms = PROMPT_TIME_FACTOR * prompt_ms + costs.plain_ms
            self._credit_ms += reading_credit_ms
            max_loss_ms += reading_credit_ms
        pays_off = speedups[fastest] >= 1
        slower = [kind for kind in speedups if kind != fastest]
        for kind in slower if pays_off else [fastest]:
            trial = self._trials_of(kind)
            trial_loss_ms = min(max_loss_ms, trial.max_loss_ms(elapsed_ms))
            if depth := self._affordable_depth(turn, kind, budget.depth, trial_loss_ms):
                trial.num_left = (trial.num_left or TRIAL_DRAFTS) - 1
                draft_budget = self._draft_budget(turn, kind, depth)
                return DraftPlan(turn, kind, draft_budget, trial_loss_ms, trial)
            trial.num_left = 0
        if not pays_off:
            return f"drafts were {speedups[fastest]:.2f}× plain; {_loss_text(loss_ms)}"
        depth = self._affordable_depth(turn, fastest, budget.depth, max_loss_ms)
        if not depth:
            return f"a draft might lose more than is allowed; {_loss_text(loss_ms)}"
        draft_budget = self._draft_budget(turn, fastest, depth)
        return DraftPlan(turn, fastest, draft_budget, max_loss_ms, None)

    def _trials_of(self, kind: DraftKind) -> Trials:
        if kind not in self._trials:
            share = 1.0 if self.experience.speedup_of(kind).value > POOR_SPEEDUP else 0.25
            initial_loss_ms = share * TRIAL_LOSS_STEPS * self.experience.costs.plain_ms
            debt_ms = self.experience.trial_debts_ms.get(kind, 0.0)
            self._trials[kind] = Trials(share * TRIAL_LOSS_SHARE, initial_loss_ms, debt_ms)
        return self._trials[kind]

    def _affordable_depth(self, turn: Turn, kind: DraftKind, depth: int, max_loss_ms: float) -> int:
        """The greatest depth at which a wholly rejected draft loses no more than this; 0 = none."""
        costs = self.experience.costs
        if max_loss_ms <= 0:
            return 0
        prompt_ms = PROMPT_TIME_FACTOR * costs.prompt_ms(turn.kinds[0], turn.num_unread)
        max_step_ms = max_loss_ms + costs.plain_ms - prompt_ms
        deepest = costs.max_depth(kind)
        for levels in range(min(depth, deepest), 0, -1):
            rows = 1 + levels + turn.num_extra_rows
            if costs.draft_ms(kind, levels) + costs.verify_ms(rows) <= max_step_ms:
                return levels if levels < deepest else depth
        return 0

    def _may_read_prompt(self, turn: Turn, prompt_ms: float) -> bool:
        """Whether the gain that the drafter can be expected to make is worth reading the prompt."""
        experience, costs = self.experience, self.experience.costs
        num_new_tokens = len(self.text) - self.log.num_prompt
        speedup = max(experience.speedup_of(kind).value for kind in turn.kinds)
        usual_left = max(experience.answer_len - num_new_tokens, DEFAULT_ANSWER_LEN)
        num_left = min(self.start.limits.max_new_tokens - num_new_tokens, usual_left)
        left_ms = num_left * costs.plain_ms
        max_ms = PROMPT_GAIN_SHARE * (1 - 1 / speedup) * left_ms
        max_ms = min(max_ms, max(experience.credit * costs.plain_ms, MAX_LOSS_SHARE * left_ms))
        return speedup > PROVEN_SPEEDUP and prompt_ms < max_ms

    # ---- how much to draft

    def _draft_budget(self, turn: Turn, kind: DraftKind, depth: int) -> Budget:
        """Levels are drafted while the tokens that they bring are worth their time."""
        costs, survival = self.experience.costs, self.experience.survival
        row_ms = (costs.verify_ms(1 + ROW_COST_ROWS) - costs.verify_ms(1)) / ROW_COST_ROWS
        level_ms = costs.level_ms(kind)
        min_prob = (level_ms + row_ms) / self._token_ms
        is_chain = kind == "chain" and len(turn.kinds) > 1
        width = 1 if is_chain else MAX_NODES
        if turn.has_draft_probs:
            if turn.traits.has_network:  # stops by the parents of what comes next
                min_prob /= survival.level_rate(2)
            min_draft_prob = min(min_prob / survival.calibration, MAX_MIN_PROB)
            return Budget(depth, width, min_draft_prob)
        if level_ms > 0.01 * costs.plain_ms:
            match_len = self._match_len(turn)
            path_prob = survival.chain_rate(1, match_len)
            for levels in range(1, depth):
                path_prob *= survival.chain_rate(levels + 1, match_len)
                if path_prob < min_prob:
                    depth = levels
                    break
        return Budget(depth, width)

    def _prune(self, proposal: Proposal, step: DraftedStep) -> Proposal:
        """The nodes of a draft that are worth verifying."""
        costs, size, draft_ms = self.experience.costs, len(proposal.shape), step.draft_ms
        assert step.plan is not None
        plan, turn, self._step = step.plan, step.plan.turn, step
        if size == 1 and not turn.num_extra_rows:
            expected = (1.0, (draft_ms + costs.verify_ms(1)) / 1000)
            return replace(proposal, decision="the drafter found nothing", expected=expected)
        max_loss_ms = max(0.0, plan.max_loss_ms - draft_ms)
        path_probs = self.experience.survival.path_probs(proposal, self._match_len(turn))
        order = sorted(range(size), key=lambda node: -path_probs[node])
        count, tokens, verify_ms = self._best_size(proposal, path_probs, order, max_loss_ms)
        if turn.num_extra_rows and verify_ms - costs.plain_ms > max_loss_ms:
            proposal, count = replace(proposal, extra=None), 1
            tokens, verify_ms = 1.0, costs.verify_ms(1)
        elif count == size:
            order = []
        step.draft = proposal
        if order:
            proposal = proposal.keep(sorted(order[:count]))
        step_ms, loss_ms = draft_ms + verify_ms, self.loss_ms
        trial_note = " on trial" if plan.trial else ""
        return replace(
            proposal,
            decision=f"verify {count - 1} of {size - 1} draft tokens{trial_note}: {tokens:.1f} "
            f"tokens expected in {step_ms:.1f} ms (plain decoding: {tokens * costs.plain_ms:.1f} "
            f"ms); {_loss_text(loss_ms)}",
            expected=(tokens, step_ms / 1000),
            bypass="not_worth_it" if count == 1 < size else proposal.bypass,
        )

    def _best_size(
        self, proposal: Proposal, path_probs: list[float], order: list[int], max_loss_ms: float
    ) -> tuple[int, float, float]:
        """How many nodes of `order` (most probable first, root included) are worth verifying.

        Returns:
            Their number, the tokens expected of them, and the milliseconds of verifying them.
        """
        costs, token_ms, shape = self.experience.costs, self._token_ms, proposal.shape
        extra = proposal.num_rows - len(shape)
        depths = None if costs.curve.trees is None else shape.depths.tolist()
        best, best_gain_ms = (1, 1.0, costs.verify_ms(1 + extra)), 0.0
        tokens, deepest = 0.0, 0
        for count, node in enumerate(order, start=1):
            tokens += path_probs[node]
            deepest = deepest if depths is None else max(deepest, depths[node])
            ms = costs.verify_ms(count + extra, deepest or None)
            if count == 1:
                best_gain_ms = token_ms - ms
            elif ms - costs.plain_ms > max_loss_ms:
                break
            elif tokens * token_ms - ms > best_gain_ms:
                best, best_gain_ms = (count, tokens, ms), tokens * token_ms - ms
        return best

    def _plain_step(self, reason: str) -> Proposal:
        expected = (1.0, self.experience.costs.plain_ms / 1000)
        return root_only(self.root, self.drafter.device, "not_worth_it", reason, expected)

    # ---- what a step took

    def _record_last_step(self, now_s: float) -> None:
        """Enter the last step, from its beginning to this one's, in costs, account and speedups."""
        ms, self._step_began_s = 1000 * (now_s - self._step_began_s), now_s
        costs, step, self._step = self.experience.costs, self._step, None
        if not self._num_steps:
            return
        is_disturbed = step is not None and (step.rows > 1 or step.ran_network)
        follows_draft, self._follows_draft = self._follows_draft, is_disturbed
        if step is None:
            self._record_plain_step(ms, follows_draft=follows_draft)
            return
        draft_ms = step.propose_ms if step.rows == 1 else step.draft_ms
        num_tokens, plan, verify_ms = self._num_committed, step.plan, ms - draft_ms
        hiccup_ms, learnt_ms = costs.split_hiccup(draft_ms, step.usual_draft_ms)
        if step.rows == 1:  # a plain step, but for the draft
            self.account.add_drafted_step(draft_ms, 0, hiccup_ms, step.usual_draft_ms)
            self._record_plain_step(verify_ms, follows_draft=follows_draft or is_disturbed)
            learnt_ms += costs.verify_ms(1)
        else:
            usual_ms = costs.verify_ms(step.rows, step.depth or None)
            verify_hiccup_ms, learnt_verify_ms = costs.split_hiccup(verify_ms, usual_ms)
            learnt_ms += learnt_verify_ms
            hiccup_ms, usual_ms = hiccup_ms + verify_hiccup_ms, step.usual_draft_ms + usual_ms
            self.account.add_drafted_step(ms, num_tokens, hiccup_ms, usual_ms)
            costs.observe_verify(verify_ms, step.rows, step.depth)
        # A lookup that finds nothing is charged to the account alone: finds come in bursts, and
        # steps without one say nothing of the next.
        is_judged = step.draft is not None or step.ran_network
        if plan and step.is_typical and is_judged:
            for speedup in (self._speedups[plan.kind], self.experience.speedup_of(plan.kind)):
                speedup.observe(num_tokens, learnt_ms / costs.plain_ms)
        if plan and plan.trial:
            plan.trial.lost_ms += max(0.0, learnt_ms - num_tokens * costs.plain_ms)

    def _record_plain_step(self, ms: float, *, follows_draft: bool) -> None:
        """Record a step of one row.

        Args:
            follows_draft: a draft was verified just before it, or a drafter's network ran in this
                step. Then it is a little slower than plain decoding, which drafting is charged for.
        """
        costs = self.experience.costs
        before_ms, is_first = costs.plain_ms, self._num_steps == 1
        if follows_draft and not costs.is_far_from_plain(ms):
            costs.observe_verify(ms, 1, 0)
            self.account.add_drafted_step(ms, 1, 0.0, costs.verify_ms(1))
            return
        if is_first:
            counts = costs.observe_first(ms)
        else:
            counts = costs.observe_plain(ms, follows_draft=follows_draft)
        self.account.add_plain_step(ms, before_ms, costs.plain_ms if counts else None)


def _loss_text(loss_ms: float) -> str:
    return f"{loss_ms:.0f} ms lost so far" if loss_ms > 0 else f"{abs(loss_ms):.0f} ms saved so far"


class ControlledDrafter(Drafter):
    """Wraps any drafter and lets it draft as much as pays off.

    Attributes:
        experience: what earlier texts have shown; updated by each text.
        clock: seconds, from any origin.
        save: called with the experience when a text has ended.
        loss_ms: what drafting has lost in the last text, by the account; negative for a gain.
    """

    session = ControlledSession
    loss_ms = 0.0

    def __init__(
        self,
        inner: Drafter,
        target: Target,
        experience: Experience,
        *,
        clock: Callable[[], float] = time_s,
        save: Callable[[Experience], None] = lambda experience: None,
    ) -> None:
        self.inner, self.device, self.experience = inner, target.device, experience
        self.clock, self.save = clock, save
        self.needs, self.notes, self.traits = inner.needs, inner.notes, inner.traits


def build_drafter(
    config: MethodConfig, context: BuildContext, store: ExperienceStore | None = None
) -> Drafter:
    """The method's drafter, under the controller unless the method drafts as set.

    Args:
        store: where experience is kept; None = in memory, from text to text of this drafter.

    Raises DrafterError: the weights do not fit the target, or cannot be found.
    """
    drafter = config.build(context)
    if config.drafting == "as set" or not drafter.traits.drafts:
        return drafter
    store = store or ExperienceStore(None)
    experience = store.load(config, context.target, context.locate)
    model = drafter.parts[-1]
    if model.traits.has_network:
        experience.costs.time_drafts(model, context.target)
    return ControlledDrafter(
        drafter,
        context.target,
        experience,
        save=lambda learnt: store.save(config, context.target, learnt),
    )
