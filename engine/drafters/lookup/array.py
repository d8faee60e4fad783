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

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from engine.drafters.lookup.bounded import ENTRY_BYTES, BoundedTable

MOST_FOLLOWERS = 16
"""Continuations of a context that are used, the most frequent ones."""
FEW_ROWS = 128
"""Occurrences of a context that are counted one by one."""
FOLLOWER_BYTES = 300
"""Memory of a cached continuation."""


class Rows(NamedTuple):
    """Adjacent rows that share their first `length` tokens."""

    begin: int
    end: int
    length: int


def token_type(vocab: int) -> np.dtype[Any]:
    """Of stored tokens; rows are compared as bytes, so it is big-endian."""
    return np.dtype(">u2" if vocab < (1 << 16) else ">u4")


class SuffixArray:
    """All positions of some texts, sorted.

    Attributes:
        depth: tokens of a row: the longest context and its continuation together.
    """

    def __init__(self, texts: Iterable[Sequence[int] | np.ndarray], depth: int, vocab: int) -> None:
        """`vocab`: token ids are below this."""
        self.depth = depth
        self._followers = BoundedTable[Rows, list[tuple[int, Rows, int]]]()
        # 0 marks the end of a text, so tokens are stored as token + 1.
        kind = token_type(vocab)
        gap = np.zeros(depth, kind)
        parts = [gap]
        for text in texts:
            parts += [(np.asarray(text).astype(np.int64) + 1).astype(kind), gap]
        joined = np.concatenate(parts).astype(kind)
        rows = np.lib.stride_tricks.sliding_window_view(joined, depth)[np.flatnonzero(joined)]
        self._keys = np.ascontiguousarray(rows).view(f"S{depth * kind.itemsize}").ravel()
        self._keys.sort(kind="stable")
        self._rows = self._keys.view(kind).reshape(-1, depth)

    def matches(self, text: Sequence[int]) -> Iterator[Rows]:
        """Occurrences of the text's last tokens, longest match first."""
        matches: list[Rows] = []
        for length in range(1, min(len(text), self.depth - 1) + 1):
            key = (np.asarray(text[-length:], np.int64) + 1).astype(self._rows.dtype).tobytes()
            last = key.ljust(self._keys.itemsize, b"\xff")
            begin = int(self._keys.searchsorted(np.bytes_(key)))
            end = int(self._keys.searchsorted(np.bytes_(last), "right"))
            if begin == end:
                break
            matches.append(Rows(begin, end, length))
        yield from reversed(matches)

    def followers(self, rows: Rows) -> list[tuple[int, Rows, int]]:
        """The most frequent next tokens, each with its rows and their number."""
        followers = self._followers.get(rows)
        if followers is None:
            followers = self._look_up(*rows)
            self._followers.put(rows, followers, ENTRY_BYTES + FOLLOWER_BYTES * len(followers))
        return followers

    def _look_up(self, begin: int, end: int, length: int) -> list[tuple[int, Rows, int]]:
        if length >= self.depth:
            return []
        column = self._rows[begin:end, length]
        if end - begin <= FEW_ROWS:
            return self._count_few(column.tolist(), begin, length)
        starts = np.flatnonzero(np.concatenate([[True], column[1:] != column[:-1]]))
        counts = np.diff(starts, append=len(column))
        # One more, because the end of texts may be among them.
        best = np.argsort(-counts, kind="stable")[: MOST_FOLLOWERS + 1]
        firsts, counts = starts[best], counts[best]
        tokens = (column[firsts].astype(np.int64) - 1).tolist()
        runs = zip(tokens, (begin + firsts).tolist(), counts.tolist(), strict=True)
        return [
            (token, Rows(first, first + count, length + 1), count)
            for token, first, count in runs
            if token >= 0
        ][:MOST_FOLLOWERS]

    @staticmethod
    def _count_few(column: list[int], begin: int, length: int) -> list[tuple[int, Rows, int]]:
        """`_look_up` without NumPy, whose calls take longer than counting a few rows."""
        followers: list[tuple[int, Rows, int]] = []
        for token, group in groupby(column):
            count = len(list(group))
            if token:
                followers.append((token - 1, Rows(begin, begin + count, length + 1), count))
            begin += count
        followers.sort(key=lambda follower: -follower[2])
        return followers[:MOST_FOLLOWERS]
