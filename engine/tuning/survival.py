"""How often draft tokens are accepted, learnt from what became of them.

A drafted token has a first guess of its chance of being accepted after its parent: the drafter's
own probability, or 0.6 · 0.5^rank where it has none. Tokens with about the same guess (or at the
same depth and rank) are corrected together:

    P(token) = guess · (accepted + k) / (sum of their guesses + k)

Every child of an accepted node was tried, so a draft of depth d teaches all shallower depths.
Levels are counted as wholes besides: that says what drafting as set brings. Tokens that were
drafted but not verified are judged by what is committed later: so a draft of which little is kept
tells whether more would pay.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

from engine.proposal import Proposal

CONFIDENCE_BINS = (0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 0.9)
"""Bounds of the bins of draft probability that are corrected separately."""
MATCH_BINS = (1, 2, 4, 8)
"""The same of the length of the context by which a draft was looked up, or else of how many tokens
drafts have been right for."""
MEMORY = 0.98
"""Weight of the past per token that was tried."""
PRIOR = 3.0
"""Tokens per group that are assumed to have been accepted as guessed."""
OFFERED = "offered"
"""The group that counts drafts: how many had a token."""
DEEPEST, LOWEST_RANK = 12, 5
"""Depths and ranks beyond are taken together."""


def uses_probs(proposal: Proposal) -> bool:
    """Whether its nodes may be chosen by their probabilities: not where they were drawn by them."""
    return proposal.draft_probs is not None and proposal.dists is None


class Draft:
    """A draft, not all of it verified perhaps, followed through the text that is committed.

    Attributes:
        path: nodes that were right so far, root first.
        is_open: whether the children of the last one are still to be judged.
    """

    def __init__(self, proposal: Proposal, match_len: int | None = None) -> None:
        self.proposal, self.match_len = proposal, match_len
        self._tokens: list[int] = proposal.tokens.tolist()
        self.path, self.is_open = [0], True

    def follow(self, committed: Sequence[int]) -> bool:
        """These tokens were committed next; False if it has others."""
        children = self.proposal.shape.children
        for token in committed:
            right = (node for node in children[self.path[-1]] if self._tokens[node] == token)
            node = next(right, None)
            if node is not None:
                self.path.append(node)
            self.is_open = node is not None and bool(children[node])
            if not self.is_open:
                return node is not None
        return True


class Survival:
    """Estimates by group: `[accepted, sum of guesses]`, both fading by `memory` per token."""

    def __init__(
        self, groups: Mapping[str, list[float]] | None = None, memory: float = MEMORY
    ) -> None:
        self._memory = memory
        self.groups = {name: list(counts) for name, counts in (groups or {}).items()}

    def rate(self, group: str, guess: float) -> float:
        """Chance of a token of this group after its parent."""
        accepted, expected = self.groups.get(group, (0.0, 0.0))
        return min(1.0, guess * (accepted + PRIOR) / (expected + PRIOR))

    @property
    def factor(self) -> float:
        """Accepted tokens per token that the drafter's own probabilities promise."""
        counts = [own for name, own in self.groups.items() if name.startswith("p")]
        accepted, expected = (sum(own[i] for own in counts) for i in range(2))
        return (accepted + PRIOR) / (expected + PRIOR)

    @property
    def offered(self) -> float | None:
        """Share of the steps where the drafter had something to offer; None where none was made."""
        some, steps = self.groups.get(OFFERED, (0.0, 0.0))
        return some / steps if steps else None

    def observe_offer(self, has_draft: bool) -> None:
        """A draft was asked for."""
        self._count(OFFERED, has_draft, 1.0)

    def tokens(self, depth: int) -> float | None:
        """Tokens that a step commits which drafts so deep; None before the first draft."""
        if self.offered is None:
            return None
        tokens, reached = 0.0, self.offered
        for level in range(1, depth + 1):
            reached *= self.rate(*_by_level(level))
            tokens += reached
        return 1 + tokens

    def chain_rate(self, depth: int, match_len: int | None = None) -> float:
        """Chance of the likeliest token at a depth, where the drafter has no probabilities."""
        return self.rate(*_by_place(depth, 0, match_len))

    def paths(self, proposal: Proposal, match_len: int | None = None) -> list[float]:
        """Chance that each node is accepted, `(n,)`; the root's is 1.

        Without probabilities never above that of an earlier sibling: sampled siblings are verified
        in the order drawn, so a smaller tree must keep a prefix of them.
        """
        chances, parents = [1.0], proposal.shape.parents
        if uses_probs(proposal):
            assert proposal.draft_probs is not None
            for prob, parent in zip(proposal.draft_probs.tolist()[1:], parents[1:], strict=True):
                chances.append(chances[parent] * self.rate(_by_prob(prob), prob))
            return chances
        depths, ranks = proposal.shape.depths.tolist(), proposal.sibling_ranks()
        ceilings = [1.0] * len(parents)
        for node in range(1, len(parents)):
            parent = parents[node]
            rate = self.rate(*_by_place(depths[node], ranks[node], match_len))
            ceilings[parent] = min(ceilings[parent], rate)
            chances.append(chances[parent] * ceilings[parent])
        return chances

    def learn(self, draft: Draft) -> None:
        """Take note of a draft that has been followed."""
        path = draft.path
        self.observe(draft.proposal, path, draft.match_len, len(path) - draft.is_open)

    def observe(
        self,
        proposal: Proposal,
        path: Sequence[int],
        match_len: int | None = None,
        num_judged: int | None = None,
    ) -> None:
        """Take note of the accepted path (root first) of a draft.

        Args:
            num_judged: nodes of the path whose children have been judged; None = all.
        """
        children, forced = proposal.shape.children, len(proposal.shape) - proposal.num_forced
        depths = proposal.shape.depths.tolist()
        tried: list[int] = []
        for node in path[:num_judged]:
            mine = [child for child in children[node] if child < forced]
            tried += mine
            if depths[node] < proposal.shape.max_depth:
                level, guess = _by_level(depths[node] + 1)
                self._count(level, any(child in path for child in mine), guess)
        if uses_probs(proposal):
            assert proposal.draft_probs is not None
            probs = proposal.draft_probs.tolist()
            keys = [(_by_prob(probs[node]), probs[node]) for node in tried]
        else:
            ranks = proposal.sibling_ranks()
            keys = [_by_place(depths[node], ranks[node], match_len) for node in tried]
        for node, (group, guess) in zip(tried, keys, strict=True):
            self._count(group, node in path, guess)

    def _count(self, group: str, accepted: bool, guess: float) -> None:
        counts = self.groups.setdefault(group, [0.0, 0.0])
        counts[0] = self._memory * counts[0] + accepted
        counts[1] = self._memory * counts[1] + guess


def _by_prob(prob: float) -> str:
    return f"p{bisect_left(CONFIDENCE_BINS, prob)}"


def _by_level(depth: int) -> tuple[str, float]:
    """The group of all tokens of a level together, and the first guess that one is accepted."""
    return f"l{min(depth, DEEPEST)}", 0.6


def _by_place(depth: int, rank: int, match_len: int | None) -> tuple[str, float]:
    """The group of a token without a probability, and the first guess."""
    matched = "" if match_len is None else f"m{bisect_left(MATCH_BINS, match_len)} "
    place = f"d{min(depth, DEEPEST)} r{min(rank, LOWEST_RANK)}"
    return matched + place, 0.6 * 0.5**rank
