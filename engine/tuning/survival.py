"""How often draft tokens are accepted, learnt from past drafts.

A draft token has a first guess of its probability of being accepted after its parent: the
drafter's own probability, or 0.6 · 0.5^rank where it has none. Tokens with about the same guess, or
at the same depth and rank, form a group that is corrected together:

    P(accepted) = guess · (accepted + PRIOR) / (sum of guesses + PRIOR)

Every child of an accepted node was tried, so a draft of depth d also teaches all shallower depths.
Whole levels are counted as well: they predict what drafting as set brings. Tokens that were drafted
but not verified are judged by the text that is committed later, so a draft that was pruned hard
still shows whether more of it would have paid off.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence

from engine.proposal import Proposal

CONFIDENCE_BINS = (0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 0.9)
"""Bounds of the bins of draft probability; each bin is a group."""
_BIN_GROUPS = [f"p{i}" for i in range(len(CONFIDENCE_BINS) + 1)]
MATCH_BINS = (1, 2, 4, 8)
"""Bounds of the bins of `match_len`: tokens of context by which a draft was looked up, plus tokens
for which drafts have been right without a miss."""
MEMORY = 0.98
"""Weight of the past per token that was tried."""
PRIOR = 3.0
"""Tokens per group that are assumed to have been accepted as guessed."""
ATTEMPTS = "offered"
"""The group that counts calls of the drafter: how many returned a draft."""
MAX_DEPTH, MAX_RANK = 12, 5
"""Greater depths and ranks share the last group."""


def has_usable_probs(proposal: Proposal) -> bool:
    """Whether nodes may be chosen by draft probability; not where tokens were sampled from it."""
    return proposal.draft_probs is not None and proposal.dists is None


class TrackedDraft:
    """A draft, perhaps not all of it verified, that is compared with the text committed later.

    Attributes:
        path: nodes that were right so far, root first.
        is_open: whether the children of the last one are still to be judged.
    """

    def __init__(self, proposal: Proposal, match_len: int | None = None) -> None:
        self.proposal, self.match_len = proposal, match_len
        self._tokens: list[int] = proposal.tokens.tolist()
        self.path, self.is_open = [0], True

    def follow(self, committed: Sequence[int]) -> bool:
        """Compare with the tokens committed next; False where they leave the draft."""
        children = self.proposal.shape.children
        for token in committed:
            matches = (node for node in children[self.path[-1]] if self._tokens[node] == token)
            node = next(matches, None)
            if node is not None:
                self.path.append(node)
            self.is_open = node is not None and bool(children[node])
            if not self.is_open:
                return node is not None
        return True


class Survival:
    """Acceptance estimates by group: `[accepted, sum of guesses]`, both fading by `memory`."""

    def __init__(
        self, groups: Mapping[str, list[float]] | None = None, memory: float = MEMORY
    ) -> None:
        self._memory = memory
        self.groups = {name: list(counts) for name, counts in (groups or {}).items()}

    def rate(self, group: str, guess: float) -> float:
        """Probability that a token of this group is accepted after its parent."""
        accepted, expected = self.groups.get(group, (0.0, 0.0))
        return min(1.0, guess * (accepted + PRIOR) / (expected + PRIOR))

    @property
    def calibration(self) -> float:
        """Accepted tokens over the number that the drafter's own probabilities promise."""
        groups = [counts for name, counts in self.groups.items() if name.startswith("p")]
        accepted, expected = (sum(counts[i] for counts in groups) for i in range(2))
        return (accepted + PRIOR) / (expected + PRIOR)

    @property
    def draft_rate(self) -> float | None:
        """Share of calls at which the drafter returned a draft; None before the first call."""
        drafts, attempts = self.groups.get(ATTEMPTS, (0.0, 0.0))
        return drafts / attempts if attempts else None

    def observe_attempt(self, has_draft: bool) -> None:
        """Record that the drafter was called."""
        self._count(ATTEMPTS, has_draft, 1.0)

    def expected_mat(self, depth: int) -> float | None:
        """Tokens that a step commits with full drafts of this depth; None before the first."""
        if self.draft_rate is None:
            return None
        tokens, level_prob = 0.0, self.draft_rate
        for level in range(1, depth + 1):
            level_prob *= self.level_rate(level)
            tokens += level_prob
        return 1 + tokens

    def level_rate(self, depth: int) -> float:
        """Chance that a token of this depth is accepted after its parent was."""
        return self.rate(*_level_group(depth))

    def chain_rate(self, depth: int, match_len: int | None = None) -> float:
        """Acceptance rate of the first choice at a depth, for drafters without probabilities."""
        return self.rate(*_rank_group(depth, 0, match_len))

    def path_probs(self, proposal: Proposal, match_len: int | None = None) -> list[float]:
        """Probability that each node and all its ancestors are accepted, `(n,)`; 1 for the root.

        Without draft probabilities, a node's is never above that of an earlier sibling: sampled
        siblings are verified in the order drawn, so a smaller tree must keep a prefix of them.
        """
        group_of, parents = _groups_of(proposal, match_len), proposal.shape.parents
        has_probs = has_usable_probs(proposal)
        path_probs, lowest_rates = [1.0], [1.0] * len(parents)
        for node in range(1, len(parents)):
            parent, rate = parents[node], self.rate(*group_of(node))
            if not has_probs:
                rate = lowest_rates[parent] = min(lowest_rates[parent], rate)
            path_probs.append(path_probs[parent] * rate)
        return path_probs

    def observe_tracked(self, draft: TrackedDraft) -> None:
        """Record a draft that was followed through the text."""
        path = draft.path
        self.observe(draft.proposal, path, draft.match_len, len(path) - draft.is_open)

    def observe(
        self,
        proposal: Proposal,
        path: Sequence[int],
        match_len: int | None = None,
        num_judged: int | None = None,
    ) -> None:
        """Record the accepted path (root first) of a draft.

        Args:
            num_judged: nodes of the path whose children have been judged; None = all.
        """
        children, num_drafted = proposal.shape.children, len(proposal.shape) - proposal.num_forced
        depths = proposal.shape.depths.tolist()
        tried_nodes: list[int] = []
        for node in path[:num_judged]:
            drafted = [child for child in children[node] if child < num_drafted]
            tried_nodes += drafted
            if depths[node] < proposal.shape.max_depth:
                group, guess = _level_group(depths[node] + 1)
                self._count(group, any(child in path for child in drafted), guess)
        group_of = _groups_of(proposal, match_len)
        for node in tried_nodes:
            group, guess = group_of(node)
            self._count(group, node in path, guess)

    def _count(self, group: str, accepted: bool, guess: float) -> None:
        counts = self.groups.setdefault(group, [0.0, 0.0])
        counts[0] = self._memory * counts[0] + accepted
        counts[1] = self._memory * counts[1] + guess


def _groups_of(proposal: Proposal, match_len: int | None) -> Callable[[int], tuple[str, float]]:
    """Maps each node of a draft to its group and first guess."""
    if has_usable_probs(proposal):
        assert proposal.draft_probs is not None
        probs = proposal.draft_probs.tolist()
        return lambda node: (_BIN_GROUPS[bisect_left(CONFIDENCE_BINS, probs[node])], probs[node])
    depths, ranks = proposal.shape.depths.tolist(), proposal.sibling_ranks()
    return lambda node: _rank_group(depths[node], ranks[node], match_len)


@functools.cache
def _level_group(depth: int) -> tuple[str, float]:
    """The group of a whole level, and the first guess that one of its tokens is accepted."""
    return f"l{min(depth, MAX_DEPTH)}", 0.6


@functools.lru_cache(4096)
def _rank_group(depth: int, rank: int, match_len: int | None) -> tuple[str, float]:
    """The group of a token without a draft probability, and its first guess."""
    match = "" if match_len is None else f"m{bisect_left(MATCH_BINS, match_len)} "
    return f"{match}d{min(depth, MAX_DEPTH)} r{min(rank, MAX_RANK)}", 0.6 * 0.5**rank
