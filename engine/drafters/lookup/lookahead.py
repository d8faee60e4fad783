"""Lookahead decoding: n-grams found by Jacobi iteration, verified in the same forward.

Every forward carries the target's verification of guesses from an n-gram pool and, as rows that
are no candidates, a window of parallel guesses about the future (`JacobiWindow`), whose columns
become new n-grams of the pool. Nothing is trained or loaded.

Lossless under sampling: a step's guesses are fixed before its random draws, so each is a point
mass, given the history. They come from the pool, which holds prompt tokens, committed tokens and
argmaxes of *earlier* forwards, which depend on their context and on the first window, drawn once
from numbers that no verification uses. Argmaxes of the *current* forward enter the pool only after
its tokens are drawn.

Source: arXiv:2402.02057, Alg. 2. Faster than the authors' code, with the same text: all N - 1
tokens of a guess count (theirs: N - 2) and the target's own next one follows; guesses are verified
while the window is still being filled; where n-grams leave room, tails of the window's columns and
predictions after verified tokens are guessed too.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from engine.config import setting
from engine.drafters.base import BuildContext, Drafter, DraftSession, Start, Traits, root_only
from engine.drafters.lookup.bounded import ENTRY_BYTES, BoundedTable, tokens_bytes
from engine.drafters.method import MethodConfig
from engine.proposal import Budget, ExtraRows, Outcome, Proposal
from engine.sampling import SeededDraws
from engine.tree import merge_prefixes, upload


class LookaheadConfig(MethodConfig):
    """Settings of lookahead decoding; W, N and G of the paper.

    Every run has its own pool of 64 MiB at most (`bounded.POOL_BYTES`); the least recently used
    keys are dropped first.
    """

    title = "Lookahead"
    summary = (
        "The target guesses its own future in a window of parallel rows; n-grams found there are "
        "verified later. No weights."
    )
    paper = "2402.02057"
    main_settings = "drafting max_window_size max_ngram_size"

    decoding_type: Literal["Lookahead"] = "Lookahead"
    max_window_size: int = setting(
        4, "Window size (W)", "W: columns of the window = n-grams found per step", ge=1, le=64
    )
    max_ngram_size: int = setting(
        3, "N-gram size (N)", "N: n-gram length; a guess has N - 1 tokens", ge=2, le=16
    )
    max_verification_set_size: int = setting(
        4, "Guesses per step (G)", "G: guesses kept per token, and verified per step", ge=1, le=64
    )
    pool_from_text: bool = setting(
        True,
        "N-grams from the text",
        "also fill the pool with n-grams of the prompt and of the output",
    )

    def build(self, context: BuildContext) -> LookaheadDrafter:
        return LookaheadDrafter(context, self)


class NGramPool:
    """The newest continuations of each key token, at most `size`: n-grams, then shorter ones.

    The shorter ones (predictions after verified rows, and tails of the window's columns) fill the
    verification set only where whole n-grams of `ngram_size` tokens, key included, leave room.
    """

    def __init__(self, size: int, ngram_size: int) -> None:
        self.size, self.ngram_size = size, ngram_size
        # By the key token, and whether the n-grams are whole.
        self._table = BoundedTable[tuple[int, bool], dict[tuple[int, ...], None]]()

    def add(self, ngram: tuple[int, ...]) -> None:
        """Insert as newest of its key, the first token; the oldest leaves if there are too many."""
        key, tokens = (ngram[0], len(ngram) == self.ngram_size), ngram[1:]
        continuations = self._table.get(key)
        if continuations is None:
            continuations = {}
            self._table.put(key, continuations, ENTRY_BYTES)
        num_bytes = 0 if tokens in continuations else tokens_bytes(tokens)
        continuations.pop(tokens, None)
        continuations[tokens] = None
        if len(continuations) > self.size:
            oldest = next(iter(continuations))
            num_bytes -= tokens_bytes(oldest)
            del continuations[oldest]
        self._table.resize(key, num_bytes)

    def get(self, key: int) -> list[tuple[int, ...]]:
        """Continuations of a key, newest first, none of them a prefix of an earlier one."""
        guesses = list(reversed(self._table.get((key, True)) or {}))
        for short in reversed(self._table.get((key, False)) or {}):
            if len(guesses) >= self.size:
                break
            if not any(guess[: len(short)] == short for guess in guesses):
                guesses.append(short)
        return guesses


class JacobiWindow:
    """Guesses of future tokens, refined column by column; one level per forward until it is full.

    Example, n-gram size N = 4, window size W = 3, last token `r` at position p. In the full phase
    level 0 has W - 1 tokens and levels 1 … N - 2 have W each; column i of the upper levels ends the
    ordinary sequence r, a[:i], b[i], c[i]:

        column      0     1     2        position
        level 0     r     a0    a1       p      p+1   p+2
        level 1     b0    b1    b2       p+1    p+2   p+3
        level 2     c0    c1    c2       p+2    p+3   p+4
        results     x0    x1    x2       the target's argmax after each c

    Every column is an n-gram for the pool: r b0 c0 x0, a0 b1 c1 x1, a1 b2 c2 x2. Then the window
    moves up one level and one column: a ← b[1:], b ← c, c ← x.

    Attributes:
        levels: token ids, oldest level first; level 0 excludes the root.
    """

    def __init__(self, first_level: Sequence[int], *, ngram_size: int) -> None:
        self.levels: list[list[int]] = [list(first_level)]
        self.ngram_size = ngram_size

    @property
    def num_rows(self) -> int:
        return sum(map(len, self.levels))

    @property
    def tokens(self) -> list[int]:
        return [token for level in self.levels for token in level]

    def rows(self, tokens: Tensor, num_nodes: int) -> ExtraRows:
        """The window's rows behind a tree; its `tokens (m,)` are on the target's device."""
        depths, mask, max_depth = _geometry(tuple(map(len, self.levels)), tokens.device)
        visible = mask.new_zeros(len(tokens), num_nodes + len(tokens))
        visible[:, 0] = True
        visible[:, num_nodes:] = mask
        return ExtraRows(tokens, depths, visible, max_depth)

    def results(self, best: Sequence[int], num_nodes: int) -> list[int]:
        """The argmaxes at the newest level, from those of every row of the forward.

        While there is only one level, the root is its first column.
        """
        newest = best[num_nodes + self.num_rows - len(self.levels[-1]) :]
        return [best[0], *newest] if len(self.levels) == 1 else list(newest)

    def advance(self, root: int, results: Sequence[int]) -> list[tuple[int, ...]]:
        """Move on by one forward; return the n-grams of its columns, key token first.

        They are shorter while the window is being filled. `root` is that of the step that made the
        results.
        """
        levels = [*self.levels, list(results)]
        if len(levels) < self.ngram_size:
            self.levels = [level[1:] for level in levels]
        else:
            self.levels = [levels[1][1:], *levels[2:]]
        return list(zip([root, *levels[0]], *levels[1:], strict=True))


@functools.lru_cache(maxsize=64)
def _geometry(widths: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor, int]:
    """Depths `(m,)`, mask `(m, m)` and greatest depth of the rows of levels of these widths."""
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
    return upload(depths, device), upload(visible, device), int(depths.max())


class LookaheadSession(DraftSession["LookaheadDrafter"]):
    """Verifies the pool's guesses and fills the pool from the window.

    For a budget of width 1 it has a window of one column, and verifies one guess.
    """

    _window: JacobiWindow | None = None
    """The one in use; None before the first draft, which fills it from the text's draws."""

    def __init__(self, drafter: LookaheadDrafter, start: Start) -> None:
        super().__init__(drafter, start)
        self.config, self._num_read = drafter.config, 0
        self._pool = NGramPool(self.config.max_verification_set_size, self.config.max_ngram_size)

    def read(self) -> None:
        """Take in the n-grams that end with each new token."""
        size = self.config.max_ngram_size
        if self.config.pool_from_text:
            for end in range(max(size, self._num_read + 1), len(self.text) + 1):
                self._pool.add(tuple(self.text[end - size : end]))
        self._num_read = len(self.text)

    def _fill_window(self) -> JacobiWindow:
        size, width = self.config.max_ngram_size, self.config.max_window_size
        # Every pass that fills the window uses up one token; W - 1 remain.
        first = draw_from_prompt(self.log.prompt_ids, width + size - 3, self.start.draws)
        self._whole = self._narrow = JacobiWindow(first, ngram_size=size)
        if width > 1:
            self._narrow = JacobiWindow(first[: size - 2], ngram_size=size)
        return self._whole

    def propose(self, budget: Budget) -> Proposal:
        window = self._window or self._fill_window()
        self.read()
        if budget.depth < 1:
            return root_only(self.root, self.drafter.device)
        guesses, window = self._pool.get(self.root), self._whole
        if budget.width == 1:
            window, guesses = self._narrow, guesses[:1]
        self._window = window
        drafted, shape, _ = merge_prefixes(guesses)
        # The window is not cut to max_depth, because it serves later steps. Where it exceeds the
        # context there are none, and the loop drops it.
        tokens = torch.tensor([self.root, *drafted, *window.tokens])
        rows, n = upload(tokens, self.drafter.device), len(shape)
        extra = window.rows(rows[n:], n) if window.num_rows else None
        return Proposal(rows[:n], shape, extra=extra)

    def observe(self, outcome: Outcome) -> None:
        """Learn what the target predicts after the verified tree and the window's rows."""
        if self._window is None or not len(outcome.output.logits):
            return
        proposal, best, tokens = outcome.proposal, outcome.argmax(), outcome.tokens()
        for node, parent in enumerate(proposal.shape.parents):
            self._pool.add((tokens[node], best[node]))
            if node and self.config.max_ngram_size > 2:
                self._pool.add((tokens[parent], tokens[node], best[node]))
        if (proposal.extra is None) == (self._window.num_rows == 0):
            results = self._window.results(best, len(proposal.shape))
            for column in self._window.advance(tokens[0], results):
                for begin in range(len(column) - 1):
                    self._pool.add(column[begin:])
        self.read()


class LookaheadDrafter(Drafter):
    session = LookaheadSession

    def __init__(self, context: BuildContext, config: LookaheadConfig) -> None:
        self.config, self.device = config, context.target.device
        self.traits = Traits(branches=config.max_window_size > 1)


def draw_from_prompt(prompt_ids: Sequence[int], count: int, draws: SeededDraws) -> list[int]:
    """`count` tokens, each drawn uniformly from the prompt."""
    return [prompt_ids[int(draws.uniform() * len(prompt_ids))] for _ in range(count)]
