"""The Jacobi window of lookahead decoding: guesses of future tokens, refined column by column.

Worked example, n-gram size N = 4, window size W = 3, last token `r` at position p. In the full
phase level 0 has W - 1 tokens and levels 1 … N - 2 have W each; column i of the upper levels ends
the ordinary sequence r, a[:i], b[i], c[i]:

    column      0     1     2        position
    level 0     r     a0    a1       p      p+1   p+2
    level 1     b0    b1    b2       p+1    p+2   p+3
    level 2     c0    c1    c2       p+2    p+3   p+4
    results     x0    x1    x2       the target's argmax after each c

Every column is an n-gram for the pool: r b0 c0 x0, a0 b1 c1 x1, a1 b2 c2 x2. Then the window
moves up one level and one column: a ← b[1:], b ← c, c ← x.
Source: arXiv:2402.02057, section 3 and Alg. 2.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.proposal import ExtraRows


def first_level_len(window_size: int, ngram_size: int) -> int:
    """Tokens to draw for the first level: every fill pass uses one up, W - 1 remain."""
    return window_size + ngram_size - 3


class JacobiWindow:
    """The window's tokens; filled one level per forward until there are N - 1 levels.

    Attributes:
        levels: token ids, oldest level first; the root is no part of level 0.
    """

    def __init__(self, first_level: Sequence[int], *, ngram_size: int) -> None:
        self.levels: list[list[int]] = [list(first_level)]
        self.ngram_size = ngram_size

    @property
    def num_rows(self) -> int:
        return sum(map(len, self.levels))

    @property
    def tokens(self) -> list[int]:
        """Tokens of all rows, level by level."""
        return [token for level in self.levels for token in level]

    def rows(self, tokens: Tensor, num_nodes: int) -> ExtraRows:
        """The window as rows behind a draft tree of `num_nodes` nodes.

        Args:
            tokens: `(m,)` int64, `self.tokens` on the target's device.
        """
        depths, among = _geometry(tuple(map(len, self.levels)), tokens.device)
        visible = among.new_zeros(len(tokens), num_nodes + len(tokens))
        visible[:, 0] = True
        visible[:, num_nodes:] = among
        return ExtraRows(tokens, depths, visible)

    def results(self, best: Sequence[int], num_nodes: int) -> list[int]:
        """The target's argmax at the newest level, one per column.

        While there is but one level, the root is its first column.

        Args:
            best: the target's argmax at every row of the verify forward.
        """
        newest = best[num_nodes + self.num_rows - len(self.levels[-1]) :]
        return [best[0], *newest] if len(self.levels) == 1 else list(newest)

    def advance(self, root: int, results: Sequence[int]) -> list[tuple[int, ...]]:
        """Move on by one forward; return what its columns spell, first column first.

        That are n-grams, key token first; shorter ones while the window is being filled.

        Args:
            root: the last committed token *of the step that made the results*.
        """
        levels = [*self.levels, list(results)]
        if len(levels) < self.ngram_size:
            self.levels = [level[1:] for level in levels]
        else:
            self.levels = [levels[1][1:], *levels[2:]]
        return list(zip([root, *levels[0]], *levels[1:], strict=True))


@functools.lru_cache(maxsize=64)
def _geometry(widths: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """`(depths (m,), who sees whom among the window's rows (m, m))` of levels this wide."""
    starts = [sum(widths[:level]) for level in range(len(widths))]
    total = sum(widths)
    depths = torch.zeros(total, dtype=torch.int64)
    visible = torch.zeros(total, total, dtype=torch.bool)
    for level, width in enumerate(widths):
        for column in range(width):
            row = starts[level] + column
            depths[row] = column + max(level, 1)
            visible[row, : column + (level == 0)] = True
            for upper in range(1, level + 1):
                visible[row, starts[upper] + column] = True
    return depths.to(device), visible.to(device)
