"""Adaptive drafting: per step, draft as much as recent acceptance and measured time justify.

Before each step the controller asks, for every draft depth d and tree size n, what a step would
bring and cost:

    tokens(d, n) = 1 + sum of the n highest estimated path probabilities among nodes of depth ≤ d
    ms(d, n)     = draft_ms(d) + verify_ms(n + 1, d) + other_ms
    plain        = 1 token in verify_ms(1) + other_ms

and takes the best ratio; where plain decoding wins, it drafts nothing and looks again later. The
estimates use ranks and earlier outcomes only, never this step's tokens, so the choice does not
bias lossless sampling.

With draft probabilities it does better: the drafter goes on only while a path is probable enough to
pay for one more level and row (`min_prob`), and only the nodes that pay at this very step are
verified. The probabilities are calibrated by how often such tokens were accepted (`Calibration`).
They follow from the context alone, like the tokens, so this does not bias sampling either; drafts
that were sampled are sized by ranks. What a row costs is corrected by what the run's own steps
took: long texts and busy machines make rows dearer than the curve says.
"""

from __future__ import annotations

import functools
import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from engine import formats
from engine.accept import Rule
from engine.config import Sampling
from engine.drafters.base import BuildContext, Drafter, Start, root_only
from engine.drafters.method import MethodConfig
from engine.model.target import Target
from engine.proposal import Outcome, Proposal
from engine.tuning.latency import LatencyCurve
from engine.tuning.timing import measure_curve

CONTROLLER_ROWS, CONTROLLER_TREES = (1, 2, 4, 8, 16, 32, 64), (4, 16, 64)
"""Row counts that the controller measures: coarser than the chart's, done in a second or two."""
WARM_UP_STEPS = 3
"""Steps with the whole draft at the start, to have something to estimate from."""
FIRST_PAUSE = 4
LONGEST_PAUSE = 64
"""Plain steps before drafting is tried again; doubles while it does not pay."""
MEMORY = 0.95
"""Weight of the past in every running mean, per step."""
CONFIDENCE_BINS = (0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 0.9)
"""Bounds of the bins of draft probability that are calibrated separately."""
PRIOR = 3.0
"""Accepted tokens per bin that are assumed before any was seen, at the drafter's own rate."""
FEW_ROWS = 3
"""Rows beside the root over which the price of one more is taken."""
MARGIN = 1.03
"""Drafting must promise this much over plain decoding: estimates are noisy, plain is safe.

Drafts that stay empty may cost as much: less often asked, a drafter finds less.
"""


@dataclass(frozen=True, slots=True)
class DraftBudget:
    """The draft that promises most, and how many times plain decoding's speed it promises."""

    depth: int
    num_nodes: int
    speedup: float


@dataclass(slots=True)
class AcceptanceEstimate:
    """Running estimate of P(node accepted | its parent accepted) by depth and rank."""

    hits: dict[tuple[int, int], float] = field(default_factory=dict)
    trials: dict[tuple[int, int], float] = field(default_factory=dict)

    def observe(self, proposal: Proposal, path: tuple[int, ...]) -> None:
        """Every child of an accepted node was tried."""
        accepted = set(path)
        depths = proposal.shape.depths.tolist()
        ranks = proposal.sibling_ranks()
        for parent in path:
            for child in proposal.shape.children[parent]:
                key = (depths[child], ranks[child])
                self.hits[key] = MEMORY * self.hits.get(key, 0.0) + (child in accepted)
                self.trials[key] = MEMORY * self.trials.get(key, 0.0) + 1

    def rate(self, depth: int, rank: int) -> float:
        """With a weak prior, so that one miss does not end a depth."""
        key = (depth, rank)
        prior = 0.6 * 0.5**rank
        return (self.hits.get(key, 0.0) + prior) / (self.trials.get(key, 0.0) + 1.0)


def path_probabilities(proposal: Proposal, estimate: AcceptanceEstimate) -> np.ndarray:
    """Estimated probability that each node is accepted, `(n,)`; the root's is 1.

    Never above that of an earlier sibling: sampled siblings are verified in the order drawn, so a
    smaller tree must keep a prefix of them.
    """
    ranks = proposal.sibling_ranks()
    depths = proposal.shape.depths.tolist()
    probs = np.ones(len(ranks))
    for parent, siblings in enumerate(proposal.shape.children):
        ceiling = 1.0
        for node in siblings:
            ceiling = min(ceiling, estimate.rate(depths[node], ranks[node]))
            probs[node] = probs[parent] * ceiling
    return probs


class Calibration:
    """How often draft tokens were accepted, over what their probabilities predict, by bin."""

    def __init__(self) -> None:
        self._hits, self._expected = np.zeros((2, len(CONFIDENCE_BINS) + 1))

    def observe(self, proposal: Proposal, path: tuple[int, ...]) -> None:
        """Every child of an accepted node was tried."""
        assert proposal.draft_probs is not None
        probs = proposal.draft_probs.tolist()
        self._hits *= MEMORY
        self._expected *= MEMORY
        for node in path:
            for child in proposal.shape.children[node]:
                at = bisect_left(CONFIDENCE_BINS, probs[child])
                self._hits[at] += child in path
                self._expected[at] += probs[child]

    @property
    def factor(self) -> float:
        """Accepted tokens per token that the draft probabilities predict."""
        return float((self._hits.sum() + PRIOR) / (self._expected.sum() + PRIOR))

    def path_probabilities(self, proposal: Proposal) -> np.ndarray:
        """Corrected probability that each node is accepted, `(n,)`; the root's is 1."""
        assert proposal.draft_probs is not None
        factors = ((self._hits + PRIOR) / (self._expected + PRIOR)).tolist()
        probs = [1.0]
        nodes = zip(proposal.draft_probs.tolist()[1:], proposal.shape.parents[1:], strict=True)
        for prob, parent in nodes:
            calibrated = prob * factors[bisect_left(CONFIDENCE_BINS, prob)]
            probs.append(probs[parent] * min(1.0, calibrated))
        return np.array(probs)


class AdaptiveDrafter(Drafter):
    """Wraps any drafter and asks it for as much as pays.

    Args:
        curve: the target's latency curve as it is now; asked for when a text begins.
        clock: seconds, from any beginning.
    """

    def __init__(
        self,
        inner: Drafter,
        target: Target,
        curve: Callable[[], LatencyCurve],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.inner = inner
        self._clock = clock
        self.needs, self.notes = inner.needs, inner.notes
        self._device = target.device
        self._latest_curve = curve
        self._reset()

    def _reset(self) -> None:
        self._curve = self._latest_curve()
        self._ms_at = functools.cache(self._curve.at)
        self._estimate, self._calibration = AcceptanceEstimate(), Calibration()
        self._expected_speedup = MARGIN
        self._base = self._slope = 1.0
        self._measured_rows_ms = self._curve_rows_ms = 0.0
        self._proposed_at = 0.0
        self._draft_ms: dict[int, float] = {}
        self._template: Proposal | None = None
        self._extra_rows = 0
        self._has_probs = True
        self._proposal: Proposal | None = None
        self._root = self._num_steps = 0
        self._pause, self._next_pause, self._probe = 0, FIRST_PAUSE, False

    def start(self, start: Start) -> None:
        self._reset()
        self._root = start.root
        self.inner.start(start)

    def propose(self, max_depth: int) -> Proposal:
        if self._pause > 0:
            self._pause -= 1
            self._probe = self._pause == 0
            return self._plain(f"plain decoding; drafting is tried again in {self._pause + 1}")
        if self._has_probs:
            return self._pick(max_depth)
        if self._num_steps < WARM_UP_STEPS or self._template is None:
            return self._draft(max_depth, "whole draft: learning what is accepted")
        budget = self._budget(self._template)
        promise = f"{formats.speedup(budget.speedup)} plain"
        decision = f"depth {budget.depth}, {budget.num_nodes} nodes: {promise} expected"
        pays = budget.speedup >= MARGIN
        if not pays and not self._probe:
            self._begin_pause()
            return self._plain(f"drafting does not pay: {promise} at best")
        if not pays:
            self._probe = False
            decision = "trying again: " + decision
        proposal = self._draft(min(max_depth, budget.depth), decision, budget.num_nodes)
        if len(proposal.shape) > 1:
            self._expect(budget.speedup)
            self._next_pause = FIRST_PAUSE if pays else self._next_pause
        return proposal

    def _expect(self, speedup: float) -> None:
        self._expected_speedup = MEMORY * self._expected_speedup + (1 - MEMORY) * speedup

    def _empty(self, proposal: Proposal, elapsed_ms: float) -> Proposal:
        """A step that drafts nothing, at the price of having tried, and of rows beside the root."""
        decision = "nothing was drafted"
        if self._num_steps:  # the first draft also reads the prompt
            plain_ms = self._ms_at(1)
            self._expect(plain_ms / (elapsed_ms + self._ms_at(proposal.num_rows)))
            if self._expected_speedup < 1 / MARGIN:
                self._begin_pause()
                decision += "; over the last steps trying did not pay"
        return replace(proposal, decision=decision)

    def _begin_pause(self) -> None:
        self._expected_speedup = 1.0
        self._pause = self._next_pause
        self._next_pause = min(2 * self._next_pause, LONGEST_PAUSE)

    def _drafted(self, max_depth: int) -> tuple[Proposal, float]:
        """The inner drafter's draft, and how many milliseconds it took."""
        began = self._clock()
        self._proposal = self.inner.propose(max_depth)
        self._extra_rows = self._proposal.num_rows - len(self._proposal.shape)
        return self._proposal, 1000 * (self._clock() - began)

    def _update_draft_ms(self, depth: int, elapsed_ms: float) -> None:
        # The first draft also reads the prompt, which no later one does.
        if self._num_steps:
            before = self._draft_ms.get(depth, elapsed_ms)
            self._draft_ms[depth] = before + 0.2 * (elapsed_ms - before)

    def _plain(self, decision: str) -> Proposal:
        self._proposal = None
        return replace(root_only(self._root, self._device, "not_worth_it"), decision=decision)

    def _pick(self, max_depth: int) -> Proposal:
        """Draft while that may pay, keep the nodes that do."""
        self.inner.min_prob = self._min_path_prob()
        proposal, elapsed_ms = self._drafted(max_depth)
        self._verified, self._proposed_at = (proposal.num_rows, proposal.num_rows), self._clock()
        if len(proposal.shape) == 1:
            return self._empty(proposal, elapsed_ms)
        if not has_draft_probs(proposal):
            self._has_probs, self.inner.min_prob = False, 0.0
            return self._sized(proposal, elapsed_ms, "whole draft: learning what is accepted")
        self._update_draft_ms(proposal.shape.max_depth, elapsed_ms)
        probs = self._calibration.path_probabilities(proposal)
        order = _by_probability(probs)
        deepest = np.maximum.accumulate(proposal.shape.depths.numpy()[order]).tolist()
        curve_ms = np.array([self._ms_at(n, depth) for n, depth in enumerate(deepest, start=1)])
        # The curve, as far as this run bears it out.
        verify_ms = self._base * curve_ms[0] + self._slope * (curve_ms - curve_ms[0])
        ms = self._draft_ms.get(proposal.shape.max_depth, 0.0) + verify_ms
        speedups = np.cumsum(probs[order]) / ms * verify_ms[0]
        num_nodes = int(speedups.argmax())
        best = float(speedups[num_nodes])
        self._expect(best)
        decision = f"{num_nodes} of {len(probs) - 1} nodes: {formats.speedup(best)} plain expected"
        if self._expected_speedup < 1:
            self._begin_pause()
            decision += "; over the last steps drafting did not pay"
        elif best > MARGIN:
            self._next_pause = FIRST_PAUSE
        self._verified = num_nodes + 1, deepest[num_nodes]
        return _subtree(proposal, order[: num_nodes + 1], decision)

    def _min_path_prob(self) -> float:
        """How likely a path must be for a level and a row more to pay, as the drafter says it.

        They pay where they bring more tokens than the time is worth at the present speed.
        """
        one, few = self._curve.at(1), self._curve.at(1 + FEW_ROWS)
        row_ms = self._slope * (few - one) / FEW_ROWS
        tokens_per_ms = self._expected_speedup / (self._base * one)
        least = (self._level_ms() + row_ms) * tokens_per_ms
        return min(least / self._calibration.factor, CONFIDENCE_BINS[-1])

    def _level_ms(self) -> float:
        """What a draft one level deeper costs more, from the depths seen so far."""
        if len(self._draft_ms) < 2:
            return 0.0
        low, high = min(self._draft_ms), max(self._draft_ms)
        return max(0.0, (self._draft_ms[high] - self._draft_ms[low]) / (high - low))

    def _update_row_cost(self) -> None:
        """By what the step took since it was proposed: verification, and little else."""
        elapsed_ms = 1000 * (self._clock() - self._proposed_at)
        one, curve_ms = self._curve.at(1), self._ms_at(*self._verified)
        if self._verified[0] == 1:
            self._base = 0.9 * self._base + 0.1 * _clamp(elapsed_ms / one)
        elif curve_ms > 1.02 * one:  # else nothing can be told of what further rows cost
            # Sums, not a mean of ratios: where a row costs little, a ratio is mostly noise.
            self._measured_rows_ms = MEMORY * self._measured_rows_ms + elapsed_ms - self._base * one
            self._curve_rows_ms = MEMORY * self._curve_rows_ms + curve_ms - one
            self._slope = _clamp((self._measured_rows_ms + one) / (self._curve_rows_ms + one))

    def _draft(self, max_depth: int, decision: str, num_nodes: int | None = None) -> Proposal:
        proposal, elapsed_ms = self._drafted(max_depth)
        return self._sized(proposal, elapsed_ms, decision, num_nodes)

    def _sized(
        self, proposal: Proposal, elapsed_ms: float, decision: str, num_nodes: int | None = None
    ) -> Proposal:
        """Of a draft whose nodes are judged by their ranks, the likeliest; None = all."""
        if len(proposal.shape) == 1:
            return self._empty(proposal, elapsed_ms)
        self._update_draft_ms(proposal.shape.max_depth, elapsed_ms)
        if self._template is None or len(proposal.shape) >= len(self._template.shape):
            self._template = proposal
        if num_nodes is None or num_nodes >= len(proposal.shape) - 1 or proposal.extra is not None:
            return replace(proposal, decision=decision)
        order = _by_probability(path_probabilities(proposal, self._estimate))
        return _subtree(proposal, order[: num_nodes + 1], decision)

    def _budget(self, template: Proposal) -> DraftBudget:
        """The best of the template; of a draft with further rows nothing can be left out."""
        probs = path_probabilities(template, self._estimate)
        depths = template.shape.depths.numpy()
        best = DraftBudget(1, 1, 0.0)
        whole, deepest = self._extra_rows > 0, template.shape.max_depth
        for depth in range(deepest if whole else 1, deepest + 1):
            inside = np.sort(probs[(depths > 0) & (depths <= depth)])[::-1]
            rows = range(2 + self._extra_rows, 2 + self._extra_rows + len(inside))
            curve_ms = np.array([self._ms_at(n, depth) for n in rows])
            ms = self._draft_ms_at(depth) + curve_ms
            gain = (1 + np.cumsum(inside)) / ms * self._curve.at(1)
            at = len(gain) - 1 if whole else int(gain.argmax())
            if gain[at] > best.speedup:
                best = DraftBudget(depth, at + 1, float(gain[at]))
        return best

    def _draft_ms_at(self, depth: int) -> float:
        """Milliseconds to draft this deep, from the depths seen so far, in proportion."""
        if not self._draft_ms:
            return 0.0
        nearest = min(self._draft_ms, key=lambda seen: abs(seen - depth))
        return self._draft_ms[nearest] * depth / nearest

    def observe(self, outcome: Outcome) -> None:
        self._num_steps += 1
        self._root = outcome.next_root
        if self._proposal is not None and self._has_probs:
            if outcome.proposal.draft_probs is not None:
                self._calibration.observe(outcome.proposal, outcome.path)
            if self._num_steps > 1:
                self._update_row_cost()
        elif self._proposal is not None:
            self._estimate.observe(outcome.proposal, outcome.path)
        self.inner.observe(outcome)

    def rule(self, sampling: Sampling) -> Rule:
        return self.inner.rule(sampling)

    def finish(self) -> None:
        self.inner.finish()

    def close(self) -> None:
        self.inner.close()


def has_draft_probs(proposal: Proposal) -> bool:
    """Whether it tells how likely its tokens are, and any of them may be left out."""
    return proposal.draft_probs is not None and proposal.dists is None and proposal.extra is None


def _subtree(proposal: Proposal, nodes: np.ndarray, decision: str) -> Proposal:
    """Only these nodes, the root among them."""
    kept = proposal.keep(sorted(nodes.tolist()), decision)
    return kept if len(kept.shape) > 1 else replace(kept, bypass="not_worth_it")


def _by_probability(probs: np.ndarray) -> np.ndarray:
    """Nodes from the likeliest on; parents come before children that are as likely."""
    order: np.ndarray = np.argsort(-probs, kind="stable")
    return order


def _clamp(ratio: float) -> float:
    """One hiccup of the machine must not count for much."""
    return min(max(ratio, 0.2), 5.0)


def build_drafter(
    config: MethodConfig, context: BuildContext, curve: Callable[[], LatencyCurve] | None = None
) -> Drafter:
    """The method's drafter, under the controller where the method asks for it.

    Args:
        curve: the target's latency curve as it is now, asked for where it is needed, and again for
            every text; None = measured once.

    Raises DrafterError: the weights do not fit the target, or cannot be found.
    """
    drafter = config.build(context)
    if not config.adaptive:
        return drafter
    once = functools.cache(functools.partial(controller_curve, context.target))
    return AdaptiveDrafter(drafter, context.target, curve or once)


def controller_curve(target: Target) -> LatencyCurve:
    """What the controller needs to know of a target, measured."""
    return measure_curve(target, rows=CONTROLLER_ROWS, tree_rows=CONTROLLER_TREES, repeats=3)
