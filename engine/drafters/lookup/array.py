"""A suffix array over texts that do not change: what followed a context, and how often.

Every place of the texts is a row, the tokens from there on up to a depth; the rows are sorted, so
all places where a context goes on are neighbours, and those of each continuation within them.

    texts 1 2 3 and 1 2 4, depth 3      rows  1 2 3    context 1 2 → rows 0 … 1
                                              1 2 4      3: row 0, once;  4: row 1, once
                                              2 3 -
                                              2 4 -
                                              3 - -
                                              4 - -

A place takes `depth` numbers of 2 bytes (4 for large vocabularies), an automaton's hundreds: so
this is for texts by the million. Source: arXiv:2311.08252, section 3.1 (REST's datastore).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from engine.drafters.lookup.bounded import ENTRY_BYTES, BoundedTable

WORD = 8
"""Rows are sorted by so many bytes at a time."""
MOST_FOLLOWERS = 16
"""Rarer continuations of a context are not looked at."""

FEW_ROWS = 64
"""Up to so many, a list is gone through sooner than an array."""
FOLLOWER_BYTES = 300
"""What a remembered continuation takes: the same ones are asked for again and again."""


class Rows(NamedTuple):
    """Neighbouring rows that agree in their first `length` tokens."""

    begin: int
    end: int
    length: int


def array_bytes(num_tokens: int, depth: int, vocab: int) -> int:
    """What the array of so many tokens takes in memory."""
    kind, depth = _layout(depth, vocab)
    return num_tokens * (depth * kind.itemsize + 2 * WORD)


def _layout(depth: int, vocab: int) -> tuple[np.dtype[Any], int]:
    """How tokens are stored, and how many make a row of whole words."""
    kind = np.dtype(">u2") if vocab < (1 << 16) else np.dtype(">u4")
    return kind, -(-depth * kind.itemsize // WORD) * WORD // kind.itemsize


class SuffixArray:
    """All places of some texts, sorted.

    Attributes:
        depth: tokens of a row: the longest context and its continuation together.
    """

    def __init__(self, texts: Iterable[Sequence[int] | np.ndarray], depth: int, vocab: int) -> None:
        """`vocab`: token ids are below this."""
        self._known = BoundedTable[Rows, list[tuple[int, Rows, int]]]()
        # 0 stands behind the end of a text, so tokens are stored as one more.
        kind, self.depth = _layout(depth, vocab)
        gap = np.zeros(self.depth, kind)
        parts = [gap]
        for text in texts:
            parts += [(np.asarray(text).astype(np.int64) + 1).astype(kind), gap]
        # In the end bytes are compared, so they must be big-endian; numpy does not keep that.
        joined = np.concatenate(parts).astype(kind)
        places = np.flatnonzero(joined)
        if len(places) == 0:
            self._rows = np.empty((0, self.depth), kind)
            self._heads = np.empty(0, np.uint64)
            self._shared = np.empty(0, np.int64)
            return
        rows = np.lib.stride_tricks.sliding_window_view(joined, self.depth)[places]
        words = np.ascontiguousarray(rows).view(f">u{WORD}").astype(np.uint64)
        order = np.lexsort(words.T[::-1])
        self._rows = np.ascontiguousarray(rows[order])
        # The first tokens of every row as one number: such numbers are found at once.
        self._heads = np.ascontiguousarray(words[order, 0])
        self._shared = _shared_with_the_row_before(self._rows)

    @property
    def num_tokens(self) -> int:
        return len(self._rows)

    def matches(self, text: Sequence[int]) -> Iterator[Rows]:
        """Where the text's last tokens occur and may go on, longest match first."""
        found: list[Rows] = []
        for length in range(1, min(len(text), self.depth - 1) + 1):
            rows = self._find(text[-length:])
            if rows.begin == rows.end:
                break
            found.append(rows)
        yield from reversed(found)

    def _find(self, context: Sequence[int]) -> Rows:
        length, size = len(context), self._rows.itemsize
        wanted = (np.asarray(context, np.int64) + 1).astype(self._rows.dtype).tobytes()
        head = wanted[:WORD]
        low, high = (int.from_bytes(head.ljust(WORD, pad), "big") for pad in (b"\0", b"\xff"))
        begin = int(self._heads.searchsorted(np.uint64(low), "left"))
        end = int(self._heads.searchsorted(np.uint64(high), "right"))
        if len(wanted) > WORD:
            first, rest = WORD // size, wanted[WORD:]
            rows = range(end)

            def tail(row: int) -> bytes:
                return self._rows[row, first:length].tobytes()

            begin = bisect_left(rows, rest, begin, key=tail)
            end = bisect_right(rows, rest, begin, key=tail)
        return Rows(begin, end, length)

    def occurrences(self, rows: Rows) -> int:
        """How often a context occurs."""
        return rows.end - rows.begin

    def followers(self, rows: Rows) -> list[tuple[int, Rows, int]]:
        """The commonest next tokens, each with the rows that it leaves and their number."""
        known = self._known.get(rows)
        if known is None:
            known = self._look_up(rows)
            self._known.put(rows, known, ENTRY_BYTES + FOLLOWER_BYTES * len(known))
        return known

    def after(self, rows: Rows, token: int) -> Rows | None:
        """The rows that go on with a token, if it is one of the commonest."""
        onward = (onward for known, onward, _ in self.followers(rows) if known == token)
        return next(onward, None)

    def _look_up(self, rows: Rows) -> list[tuple[int, Rows, int]]:
        begin, end, length = rows
        if length >= self.depth:
            return []
        few = end - begin <= FEW_ROWS
        starts, counts = self._runs(rows) if few else self._many_runs(rows)
        # One more than wanted: the end of texts may be among them.
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
        """Where each continuation of a context begins, and how many rows it has.

        All of the rows share `length` tokens: where one shares no more, the next one begins.
        """
        begin, end, length = rows
        shared = self._shared[begin + 1 : end].tolist()
        starts = [begin, *(begin + i for i, count in enumerate(shared, start=1) if count == length)]
        return starts, [b - a for a, b in pairwise([*starts, end])]

    def _many_runs(self, rows: Rows) -> tuple[list[int], list[int]]:
        """The same for rows by the thousand, the rarest left out."""
        begin, end, length = rows
        starts = np.flatnonzero(self._shared[begin + 1 : end] == length) + begin + 1
        starts = np.concatenate([[begin], starts])
        counts = np.diff(starts, append=end)
        if len(counts) > MOST_FOLLOWERS + 1:
            least = np.partition(counts, -MOST_FOLLOWERS - 1)[-MOST_FOLLOWERS - 1]
            common = np.flatnonzero(counts >= least)
            starts, counts = starts[common], counts[common]
        return starts.tolist(), counts.tolist()


def _shared_with_the_row_before(rows: np.ndarray) -> np.ndarray:
    """Per row `(n,)`: how many first tokens it has in common with the row before it."""
    shared = np.zeros(len(rows), np.min_scalar_type(rows.shape[1]))
    same = np.ones(len(rows) - 1, bool)
    for column in rows.T:
        same &= column[1:] == column[:-1]
        shared[1:] += same
    return shared
