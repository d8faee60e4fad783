"""A suffix array over texts that do not change: the continuations of a context and their counts.

Every position of the texts is a row, the tokens from there on up to a depth. The rows are sorted,
so all occurrences of a context are adjacent, and so are those of each continuation.

    texts 1 2 3 and 1 2 4, depth 3      rows  1 2 3    context 1 2 → rows 0 … 1
                                              1 2 4      3: row 0, once;  4: row 1, once
                                              2 3 -
                                              2 4 -
                                              3 - -
                                              4 - -

A position takes `depth` numbers of 2 bytes (4 for large vocabularies), in an automaton hundreds of
bytes: this is for millions of tokens. Source: arXiv:2311.08252, section 3.1 (REST's datastore).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from engine.drafters.lookup.bounded import ENTRY_BYTES, BoundedTable

WORD = 8
"""Bytes of a row that are sorted at a time."""
MOST_FOLLOWERS = 16
"""Continuations of a context that are used, the most frequent ones."""

FOLLOWER_BYTES = 300
"""Memory of a cached continuation."""


class Rows(NamedTuple):
    """Adjacent rows that share their first `length` tokens."""

    begin: int
    end: int
    length: int


def array_bytes(num_tokens: int, depth: int, vocab: int) -> int:
    """Memory of the array of `num_tokens` tokens."""
    kind, depth = _layout(depth, vocab)
    return num_tokens * (depth * kind.itemsize + 2 * WORD)


def _layout(depth: int, vocab: int) -> tuple[np.dtype[Any], int]:
    """The type of a token, and the tokens of a row of whole words."""
    kind = np.dtype(">u2") if vocab < (1 << 16) else np.dtype(">u4")
    return kind, -(-depth * kind.itemsize // WORD) * WORD // kind.itemsize


class SuffixArray:
    """All positions of some texts, sorted.

    Attributes:
        depth: tokens of a row: the longest context and its continuation together.
    """

    def __init__(self, texts: Iterable[Sequence[int] | np.ndarray], depth: int, vocab: int) -> None:
        """`vocab`: token ids are below this."""
        self._followers = BoundedTable[Rows, list[tuple[int, Rows, int]]]()
        # 0 marks the end of a text, so tokens are stored as token + 1.
        kind, self.depth = _layout(depth, vocab)
        gap = np.zeros(self.depth, kind)
        parts = [gap]
        for text in texts:
            parts += [(np.asarray(text).astype(np.int64) + 1).astype(kind), gap]
        # Bytes are compared, so they must be big-endian, which concatenate does not keep.
        joined = np.concatenate(parts).astype(kind)
        positions = np.flatnonzero(joined)
        if len(positions) == 0:
            self._rows = np.empty((0, self.depth), kind)
            self._heads = np.empty(0, np.uint64)
            self._shared = np.empty(0, np.int64)
            return
        rows = np.lib.stride_tricks.sliding_window_view(joined, self.depth)[positions]
        words = np.ascontiguousarray(rows).view(f">u{WORD}").astype(np.uint64)
        order = np.lexsort(words.T[::-1])
        self._rows = np.ascontiguousarray(rows[order])
        # The first tokens of every row as one number, for a fast binary search.
        self._heads = np.ascontiguousarray(words[order, 0])
        self._shared = _shared_prefix_lengths(self._rows)

    @property
    def num_tokens(self) -> int:
        return len(self._rows)

    def matches(self, text: Sequence[int]) -> Iterator[Rows]:
        """Occurrences of the text's last tokens, longest match first."""
        matches: list[Rows] = []
        for length in range(1, min(len(text), self.depth - 1) + 1):
            rows = self._find(text[-length:])
            if rows.begin == rows.end:
                break
            matches.append(rows)
        yield from reversed(matches)

    def _find(self, context: Sequence[int]) -> Rows:
        length, size = len(context), self._rows.itemsize
        key = (np.asarray(context, np.int64) + 1).astype(self._rows.dtype).tobytes()
        head = key[:WORD]
        low, high = (int.from_bytes(head.ljust(WORD, pad), "big") for pad in (b"\0", b"\xff"))
        begin = int(self._heads.searchsorted(np.uint64(low), "left"))
        end = int(self._heads.searchsorted(np.uint64(high), "right"))
        if len(key) > WORD:
            first, rest = WORD // size, key[WORD:]
            rows = range(end)

            def tail(row: int) -> bytes:
                return self._rows[row, first:length].tobytes()

            begin = bisect_left(rows, rest, begin, key=tail)
            end = bisect_right(rows, rest, begin, key=tail)
        return Rows(begin, end, length)

    def occurrences(self, rows: Rows) -> int:
        """Number of occurrences of a context."""
        return rows.end - rows.begin

    def followers(self, rows: Rows) -> list[tuple[int, Rows, int]]:
        """The most frequent next tokens, each with its rows and their number."""
        followers = self._followers.get(rows)
        if followers is None:
            followers = self._look_up(rows)
            self._followers.put(rows, followers, ENTRY_BYTES + FOLLOWER_BYTES * len(followers))
        return followers

    def after(self, rows: Rows, token: int) -> Rows | None:
        """The rows that continue with a token, if it is one of the most frequent."""
        return next((after for own, after, _ in self.followers(rows) if own == token), None)

    def _look_up(self, rows: Rows) -> list[tuple[int, Rows, int]]:
        begin, end, length = rows
        if length >= self.depth:
            return []
        starts, counts = self._runs(rows)
        # One more, because the end of texts may be among them.
        best = sorted(zip(counts, starts, strict=True), key=lambda run: -run[0])[
            : MOST_FOLLOWERS + 1
        ]
        column = self._rows[:, length]
        return [
            (token, Rows(first, first + count, length + 1), count)
            for count, first in best
            if (token := int(column[first]) - 1) >= 0
        ][:MOST_FOLLOWERS]

    def _runs(self, rows: Rows) -> tuple[list[int], list[int]]:
        """First row of each continuation of a context, and its number of rows.

        All of the rows share `length` tokens; a row that shares no more begins a continuation. The
        rarest continuations are left out.
        """
        begin, end, length = rows
        starts = np.flatnonzero(self._shared[begin + 1 : end] == length) + begin + 1
        starts = np.concatenate([[begin], starts])
        counts = np.diff(starts, append=end)
        if len(counts) > MOST_FOLLOWERS + 1:
            least = np.partition(counts, -MOST_FOLLOWERS - 1)[-MOST_FOLLOWERS - 1]
            frequent = np.flatnonzero(counts >= least)
            starts, counts = starts[frequent], counts[frequent]
        return starts.tolist(), counts.tolist()


def _shared_prefix_lengths(rows: np.ndarray) -> np.ndarray:
    """Per row `(n,)`: the number of leading tokens it shares with the row before it."""
    shared = np.zeros(len(rows), np.min_scalar_type(rows.shape[1]))
    same = np.ones(len(rows) - 1, bool)
    for column in rows.T:
        same &= column[1:] == column[:-1]
        shared[1:] += same
    return shared
