"""A suffix automaton over token sequences: all continuations of every context, in linear space.

Every substring of the text belongs to exactly one state: the substrings that end at the same set
of positions. A state's `link` leads to the longest suffix that ends at more positions, so following
links from the end of the text visits the contexts longest first; `next` leads to the continuations.

Appending a token takes O(max_depth) amortised: at most two new states, and one more occurrence
for each state of a suffix of at most `max_depth` tokens.

Sources: Blumer et al., The smallest automaton recognizing the subwords of a text, 1985 (the
construction); Mohri, Moreno, Weinstein, General suffix automaton construction algorithm, 2009
(several sequences in one automaton).
"""

from __future__ import annotations

ROOT = 0
"""The state of the empty string."""
_NONE = -1
STATE_BYTES = 500
"""Memory of a state with its transitions; a token adds one or two states."""


class SuffixAutomaton:
    """Substrings of a growing set of sequences, with their counts.

    Attributes (of every state):
        next: token → state of the longer string.
        link: the state of its longest suffix that occurs at more positions.
        length: tokens of its longest string; its shortest has length[link] + 1.
        count: occurrences; kept for strings of at most `max_depth` tokens only.

    `suffix` is the state of the sequence's last tokens, at most `max_depth` of them.
    """

    def __init__(self, max_depth: int, max_bytes: int) -> None:
        """`max_bytes`: memory at which it begins anew."""
        self.max_depth, self._max_bytes = max_depth, max_bytes
        self.clear()

    def clear(self) -> None:
        """Forget all sequences."""
        self.num_tokens = 0
        self.next: list[dict[int, int]] = [{}]
        self.link: list[int] = [_NONE]
        self.length: list[int] = [0]
        self.count: list[int] = [0]
        self._last = ROOT
        self.suffix = ROOT
        self._suffix_len = 0

    def shortest(self, state: int) -> int:
        """Tokens of the state's shortest string."""
        return self.length[self.link[state]] + 1 if state else 0

    def followers(self, state: int) -> list[tuple[int, int, int]]:
        """Per continuation of a state, oldest first: token, next state, occurrences."""
        return [(token, after, self.count[after]) for token, after in self.next[state].items()]

    def end_sequence(self) -> None:
        """The next token begins a new sequence."""
        self._last, self.suffix, self._suffix_len = ROOT, ROOT, 0

    def append(self, token: int) -> None:
        """Append one token to the current sequence."""
        if STATE_BYTES * len(self.next) >= self._max_bytes:
            self.clear()
        self.num_tokens += 1
        self._last = self._add_state(token)
        longer = self.next[self.shortened(self.suffix, self._suffix_len)][token]
        self._suffix_len = min(self._suffix_len + 1, self.max_depth)
        state = self.suffix = self.shortened(longer, self._suffix_len)
        while state != _NONE:
            self.count[state] += 1
            state = self.link[state]

    def shortened(self, state: int, length: int) -> int:
        """The state of a string's suffix of `length` tokens, from the state of the string."""
        while state and self.length[self.link[state]] >= length:
            state = self.link[state]
        return state

    def _add_state(self, token: int) -> int:
        """Add the transitions of one more token; return the state of the whole sequence."""
        target = self.next[self._last].get(token)
        if target is not None:
            return self._split(self._last, token, target)
        new = self._new_state({}, self.length[self._last] + 1, ROOT, 0)
        state = self._last
        while state != _NONE and token not in self.next[state]:
            self.next[state][token] = new
            state = self.link[state]
        if state != _NONE:
            self.link[new] = self._split(state, token, self.next[state][token])
        return new

    def _split(self, state: int, token: int, target: int) -> int:
        """The state whose longest string is that of `state` plus `token`.

        Where `target` also holds longer strings, a copy of it takes over the shorter ones.
        """
        length = self.length[state] + 1
        if self.length[target] == length:
            return target
        copy = self._new_state(
            dict(self.next[target]), length, self.link[target], self.count[target]
        )
        self.link[target] = copy
        while state != _NONE and self.next[state].get(token) == target:
            self.next[state][token] = copy
            state = self.link[state]
        return copy

    def _new_state(self, transitions: dict[int, int], length: int, link: int, count: int) -> int:
        self.next.append(transitions)
        self.length.append(length)
        self.link.append(link)
        self.count.append(count)
        return len(self.next) - 1


class Cursor:
    """The longest suffix of a growing text that occurs in an automaton, which does not change.

    Its `state` is `ROOT` if the last token does not occur; `length` is at most `max_depth`.
    """

    def __init__(self, automaton: SuffixAutomaton) -> None:
        self.automaton = automaton
        self.state = ROOT
        self.length = 0

    def advance(self, token: int) -> None:
        """Append a token to the text. Amortised O(1)."""
        automaton = self.automaton
        while self.state and token not in automaton.next[self.state]:
            self.state = automaton.link[self.state]
            self.length = automaton.length[self.state]
        if token not in automaton.next[self.state]:
            return
        self.state = automaton.next[self.state][token]
        self.length = min(self.length + 1, automaton.max_depth)
        self.state = automaton.shortened(self.state, self.length)
