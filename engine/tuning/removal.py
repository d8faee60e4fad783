"""What each node of a choice tree is worth: the MAT that is lost without it, replayed exactly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.tree import ChoiceTree
from engine.tuning.ranks import RankTable
from engine.tuning.replay import reach, walk


def removal_costs(table: RankTable, tree: ChoiceTree, *, category: str | None = None) -> np.ndarray:
    """MAT lost by removing each node with all below it `(n,)`; negative where MAT would grow.

    Every smaller tree is replayed exactly, but only where its steps part from those of the whole
    tree: after a step that loses tokens, until both are at the same row again. The root's entry is
    what drafting gains at all, MAT − 1.

    Raises:
        TreeError, ConfigError: as `replay`.
    """
    table = table.only(category)
    reached = reach(table, tree)
    shape = tree.shape
    lengths = shape.depths.numpy()[reached]
    roots = walk(lengths, table)
    ends = np.array([table.span(text)[1] for text in range(table.num_texts)])
    end_of = ends[np.searchsorted(ends, roots, side="right")].tolist()
    whole = Counts(len(roots), int(lengths[roots].sum()))
    walked = _Walked(
        lengths.tolist(), reached.tolist(), roots.tolist(), end_of, set(roots.tolist())
    )
    passing = _steps_through(reached[roots], shape.parents)
    costs = np.zeros(len(tree) + 1)
    costs[0] = whole.mat - 1
    for node in range(1, len(tree) + 1):
        below = shape.ancestors[:, node].tolist()
        kept = int(shape.depths[node]) - 1
        costs[node] = whole.mat - _without(walked, whole, passing[node], below, kept).mat
    return costs


@dataclass(frozen=True, slots=True)
class Counts:
    """Steps, and draft tokens that they accepted."""

    steps: int
    accepted: int

    @property
    def mat(self) -> float:
        return 1 + self.accepted / self.steps


@dataclass(frozen=True, slots=True)
class _Walked:
    """The whole tree's walk: length and node reached per row, row and end per step."""

    lengths: list[int]
    reached: list[int]
    roots: list[int]
    end_of: list[int]
    visited: set[int]


def _steps_through(reached: np.ndarray, parents: Sequence[int]) -> list[list[int]]:
    """Per node, the steps whose accepted path leads through it, ascending."""
    through: list[list[int]] = [[] for _ in parents]
    for step, node in enumerate(reached.tolist()):
        while node > 0:
            through[node].append(step)
            node = parents[node]
    return through


def _without(
    walked: _Walked, whole: Counts, passing: Sequence[int], below: Sequence[bool], kept: int
) -> Counts:
    """Steps and accepted tokens where paths through a node end at its parent, `kept` deep."""
    steps, accepted = whole.steps, whole.accepted
    joined = 0
    for step in passing:
        if step < joined:
            continue
        row, end = walked.roots[step], walked.end_of[step]
        at = step
        while True:
            length = kept if below[walked.reached[row]] else walked.lengths[row]
            steps, accepted = steps + 1, accepted + length
            row += length + 1
            # Steps of the whole tree that are behind this row are replaced by the ones walked.
            while at < len(walked.roots) and walked.end_of[at] == end and walked.roots[at] < row:
                steps, accepted = steps - 1, accepted - walked.lengths[walked.roots[at]]
                at += 1
            if row >= end or row in walked.visited:
                break
        joined = at
    return Counts(steps, accepted)
