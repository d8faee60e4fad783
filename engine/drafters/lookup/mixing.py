"""Estimates from several matched contexts at once, weighted by their evidence.

The longest match often has a single continuation of many possible ones. So every context, from the
shortest to the longest, is interpolated with the estimate of the shorter ones, and its weight rises
with its occurrences and falls with the number of distinct tokens after it:

    P(token) = λ · count(token) / total + (1 - λ) · P_shorter(token)
    λ = total / (total + e · kinds)

with e the `escape`. Example, e = 1: a short context saw a 3 times and b once: λ = 4 / 6, so a 0.5,
b 0.17; a longer one saw b once: λ = 1 / 2, so a 0.25, b 0.58.

Source: prediction by partial matching, Cleary and Witten 1984 (doi:10.1109/TCOM.1984.1096090);
λ as in method C of Moffat 1990 (doi:10.1109/26.61469) if e is 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from engine.drafters.lookup.bounded import BoundedTable, tokens_bytes

COUNTS = {1: 3, 2: 6}
"""Weight of one of the target's predictions, by the length of its context."""

Key = tuple[int, ...]


class Memory(Protocol):
    """An index of texts; a state stands for all occurrences of a context."""

    def followers(self, state: Any) -> Sequence[tuple[int, Any, int]]:
        """Per continuation: token, next state, occurrences; oldest first if ordered."""

    def after(self, state: Any, token: int) -> Any:
        """The next state after one of the continuations; None for another token."""

    def occurrences(self, state: Any) -> int:
        """Number of occurrences of the state's context."""


class Context(NamedTuple):
    """The text's last tokens as they occur in a memory.

    Attributes:
        length: number of matching tokens.
        max_depth: its continuations are counted up to this many tokens.
        weight: weight of an occurrence.
    """

    memory: Memory
    state: Any
    length: int
    max_depth: int
    weight: float = 1.0

    def extend(self, token: int) -> Iterator[Context]:
        """The context with one more token, if it occurs."""
        if self.max_depth > 0 and (after := self.memory.after(self.state, token)) is not None:
            yield Context(self.memory, after, self.length + 1, self.max_depth - 1, self.weight)


def mixed(contexts: Sequence[Context], escape: float) -> dict[int, float]:
    """Probability of each possible next token.

    Args:
        contexts: shortest first.
    """
    probs: dict[int, float] = {}
    for memory, state, _, max_depth, weight in contexts:
        followers = memory.followers(state) if max_depth > 0 else ()
        total = weight * sum([count for _, _, count in followers])
        if not total:
            continue
        share = 1 / (total + escape * len(followers))
        rest = 1 - share * total
        for token in probs:
            probs[token] *= rest
        share *= weight
        for token, _, count in followers:
            probs[token] = probs.get(token, 0.0) + share * count
    return probs


class TargetPredictions:
    """The target's newest prediction after every one or two tokens; a memory of contexts.

    Every row of a verify forward predicts the next token on its path. Rejected paths do not occur
    in the text, but after the same one or two tokens the target often predicts the same again
    (arXiv:2402.02057 and 2408.08696 draft from this alone).

    Example: the tree 5 → 7, 8 is verified and the target predicts 9 after 7, which is rejected.
    From then on 9 is expected after 5 7, and after 7.
    """

    def __init__(self) -> None:
        self._next = BoundedTable[Key, int]()

    def observe(
        self, before: int, tokens: Sequence[int], parents: Sequence[int], best: Sequence[int]
    ) -> None:
        """Store the target's predictions after every node of a verified tree (`best`).

        Args:
            before: the token before the root.
        """
        for node, parent in enumerate(parents):
            earlier = tokens[parent] if node else before
            for key in ((tokens[node],), (earlier, tokens[node])):
                self._next.put(key, best[node], tokens_bytes(key))

    def matches(self, text: Sequence[int]) -> list[Key]:
        """Contexts at the text's end that have a prediction, the longer one first."""
        return [key for length in (2, 1) if (key := tuple(text[-length:])) in self._next]

    def followers(self, state: Key) -> list[tuple[int, Key, int]]:
        token = self._next.get(state)
        return [] if token is None else [(token, (state[-1], token), COUNTS[len(state)])]

    def after(self, state: Key, token: int) -> Key | None:
        return (state[-1], token) if self._next.get(state) == token else None

    def occurrences(self, state: Key) -> int:
        """One: only the newest prediction is kept."""
        return 1
