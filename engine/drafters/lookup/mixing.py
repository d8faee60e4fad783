"""Drafts from several matched contexts at once: long ones are believed as far as they are proven.

What followed the longest match is often one occurrence of many possible ones. So every context,
from the shortest to the longest, corrects the estimate of the shorter ones before it, and the more
so the more often it occurred and the fewer tokens followed it:

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
"""What a prediction counts, by the tokens of its context: it is the target's own."""

Key = tuple[int, ...]


class Memory(Protocol):
    """Texts in which contexts are found again; a state stands for a context's places."""

    def followers(self, state: Any) -> Sequence[tuple[int, Any, int]]:
        """Per continuation: token, state with it, occurrences; oldest first where known."""

    def after(self, state: Any, token: int) -> Any:
        """The state with this token, one of the continuations; None if it is none of them."""

    def occurrences(self, state: Any) -> int:
        """How often the state's context occurs."""


class Context(NamedTuple):
    """The text's last tokens, found in a memory.

    Attributes:
        length: how many tokens match.
        deepest: its continuations are counted so many tokens far.
        weight: what an occurrence counts.
    """

    memory: Memory
    state: Any
    length: int
    deepest: int
    weight: float = 1.0

    def going_on(self, token: int) -> Iterator[Context]:
        """The context with a token, if that continues it."""
        if self.deepest > 0 and (after := self.memory.after(self.state, token)) is not None:
            yield Context(self.memory, after, self.length + 1, self.deepest - 1, self.weight)


def mixed(contexts: Sequence[Context], escape: float) -> dict[int, float]:
    """Probability of each token that may come next.

    Args:
        contexts: shortest first.
    """
    probs: dict[int, float] = {}
    for memory, state, _, deepest, weight in contexts:
        following = memory.followers(state) if deepest > 0 else ()
        total = weight * sum([count for _, _, count in following])
        if not total:
            continue
        share = 1 / (total + escape * len(following))
        rest = 1 - share * total
        for token in probs:
            probs[token] *= rest
        share *= weight
        for token, _, count in following:
            probs[token] = probs.get(token, 0.0) + share * count
    return probs


class TargetPredictions:
    """The target's newest prediction after every one or two tokens; a memory of contexts.

    Every row of a verify forward predicts the next token for the text that the row stands for. For
    rejected rows that is no text that ever comes about, but after the same one or two tokens the
    target often says the same again (arXiv:2402.02057 and 2408.08696 draft from this alone).

    Example: the tree 5 → 7, 8 is verified and the target predicts 9 after 7, which is not kept.
    From then on 9 is expected after 5 7, and after 7.
    """

    def __init__(self) -> None:
        self._next = BoundedTable[Key, int]()

    def observe(
        self, before: int, tokens: Sequence[int], parents: Sequence[int], best: Sequence[int]
    ) -> None:
        """Remember a verified tree and what the target predicted after every node (`best`).

        Args:
            before: the token before the root.
        """
        for node, parent in enumerate(parents):
            earlier = tokens[parent] if node else before
            for key in ((tokens[node],), (earlier, tokens[node])):
                self._next.put(key, best[node], tokens_bytes(key))

    def matches(self, text: Sequence[int]) -> list[Key]:
        """What is known after the text's last tokens, the longer context first."""
        return [key for length in (2, 1) if (key := tuple(text[-length:])) in self._next]

    def followers(self, state: Key) -> list[tuple[int, Key, int]]:
        token = self._next.get(state)
        return [] if token is None else [(token, (state[-1], token), COUNTS[len(state)])]

    def after(self, state: Key, token: int) -> Key | None:
        return (state[-1], token) if self._next.get(state) == token else None

    def occurrences(self, state: Key) -> int:
        """One: the newest only is kept."""
        return 1
