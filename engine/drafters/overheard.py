"""What the target said in its verify forwards, after tokens that were not kept as well.

Every row of a verify forward tells the target's next token for the text that the row stands for.
For rejected rows that is no text that ever comes about, but after the same one or two tokens the
target often says the same again (arXiv:2402.02057 and 2408.08696 draft from this alone).

Example: the tree 5 → 7, 8 is verified and the target says 9 after 7, which is not kept. From then
on 9 is expected after 5 7, and after 7.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

COUNTS = {1: 3, 2: 6}
"""What one such row counts, by the tokens of its context: it is the target's own word."""

Key = tuple[int, ...]


class Overheard:
    """The newest next token after every one or two tokens; a memory of contexts."""

    def __init__(self) -> None:
        self._next: dict[Key, int] = {}

    def note(
        self, before: int, tokens: Sequence[int], parents: Sequence[int], best: Sequence[int]
    ) -> None:
        """Remember a verified tree.

        Args:
            before: the token before the root.
            tokens, parents: of every node, the root first.
            best: what the target said after every node.
        """
        for node, parent in enumerate(parents):
            earlier = tokens[parent] if node else before
            self._next[tokens[node],] = best[node]
            self._next[earlier, tokens[node]] = best[node]

    def matches(self, text: Sequence[int]) -> Iterator[Key]:
        """What is known after the text's last tokens, the longer context first."""
        for length in sorted(COUNTS, reverse=True):
            key = tuple(text[-length:])
            if key in self._next:
                yield key

    def followers(self, state: Key) -> list[tuple[int, Key, int]]:
        """The next token, the state with it, and what it counts."""
        token = self._next.get(state)
        return [] if token is None else [(token, (state[-1], token), COUNTS[len(state)])]

    def after(self, state: Key, token: int) -> Key | None:
        """The state with the next token, if it is this one."""
        return (state[-1], token) if self._next.get(state) == token else None

    def occurrences(self, state: Key) -> int:
        """Of a context: the newest only is kept."""
        return 1
