"""Finds the best choice tree of every size for a rank table.

A node's path frequency is the share of positions whose true path leads through it, counted jointly
over all depths (never multiplied from independent ones). A tree's mean accepted length over a set
of positions is the sum of its nodes' frequencies there, so the n most frequent paths are the best
tree of n nodes *for these positions*; a child is never more frequent than its parent, so they are
a tree.

Which positions, though? A run's steps begin only at some of them, and which ones depends on the
tree: after a long step the next root is a harder place than average. So the search starts from all
positions, grows the best tree for those that its steps visited, and so on; it also extends the best
smaller tree by what its steps missed most. The tree whose *replayed* MAT was highest is returned.
That is exact for every tree compared; it is no proof that no other tree of n nodes is better.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from engine.errors import ConfigError
from engine.tree import MAX_NODES, ChoiceTree, Path
from engine.tuning.ranks import RankTable
from engine.tuning.replay import replay

SIZES = (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 28, 32, 40, 48, 56, 63, 80, 96, 112, 127)
"""Drafted nodes that are tried; one more row is verified, the root."""
ROUNDS = 3
"""How often a tree is grown again for the positions that it visited itself."""


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """The best tree found of at most n nodes, and its replayed MAT."""

    num_nodes: int
    tree: ChoiceTree
    mat: float


def curve(
    table: RankTable,
    ns: Sequence[int],
    *,
    max_depth: int | None = None,
    max_width: int | None = None,
    category: str | None = None,
) -> tuple[CurvePoint, ...]:
    """The best tree for every size, in the order given; a larger one is never worse.

    A tree has fewer nodes where no further path was ever true.

    Args:
        max_depth: longest path; None = as deep as the table.
        max_width: ranks that may be used, 0 … max_width − 1; None = all of the table's.

    Raises ConfigError: a constraint is out of range, no text is of this category, or the drafter
    was never right.
    """
    if not table.depths:
        raise ConfigError("This drafter looks up chains; there is no tree to choose.")
    for n in ns:
        _check("Nodes", n, MAX_NODES)
    _check("max_depth", max_depth)
    _check("max_width", max_width)
    table = table.only(category).narrowed(max_depth, max_width)
    everywhere = grow(table, np.arange(table.num_positions), max(ns))
    if not everywhere:
        raise ConfigError(
            "No tree helps: the drafter never ranked the true token among those that may be used. "
            "Allow more ranks, or choose another drafter."
        )
    points: dict[int, CurvePoint] = {}
    best: CurvePoint | None = None
    # Halved again and again: smaller trees to extend.
    for n in sorted({*ns, *(max(ns) >> i for i in range(max(ns).bit_length()))}):
        point = _best_of_size(table, everywhere, n, best)
        # Adding nodes never hurts a step, but it can shift the steps behind it.
        best = point if best is None or point.mat >= best.mat else best
        points[n] = CurvePoint(n, best.tree, best.mat)
    return tuple(points[n] for n in ns)


def fastest(
    table: RankTable,
    ns: Sequence[int],
    tok_s: Callable[[CurvePoint], float],
    *,
    max_depth: int | None = None,
    max_width: int | None = None,
    category: str | None = None,
) -> tuple[CurvePoint, ...]:
    """Like `curve`, but of every size the tree that is predicted to be the fastest.

    For targets where a level costs time beside its rows: the best trees of every depth compete,
    and the best chains.

    Args:
        tok_s: the prediction.
    """
    curves = [curve(table, ns, max_depth=max_depth, max_width=max_width, category=category)]
    deepest = max(point.tree.depth for point in curves[0])
    others = [(depth, max_width) for depth in range(1, deepest)] + [(max_depth, 1)]
    for depth, width in others:
        curves.append(curve(table, ns, max_depth=depth, max_width=width, category=category))
    return tuple(max(same, key=tok_s) for same in zip(*curves, strict=True))


def _check(name: str, value: int | None, most: int | None = None) -> None:
    if value is not None and (value < 1 or value > (most or value)):
        rule = f"in [1, {most}]" if most else "at least 1"
        raise ConfigError(f"{name} must be {rule}, got {value}.")


def _best_of_size(
    table: RankTable, everywhere: Sequence[Path], n: int, smaller: CurvePoint | None
) -> CurvePoint:
    seeds = [_tree(everywhere[:n])]
    if smaller is not None:
        seeds.append(_extended(table, smaller.tree, n))
    best: tuple[float, ChoiceTree] | None = None
    seen_trees = set[ChoiceTree]()
    for seed in seeds:
        tree = seed
        for _ in range(ROUNDS):
            if tree in seen_trees:
                break
            seen_trees.add(tree)
            result = replay(table, tree)
            if best is None or result.mat > best[0]:
                best = result.mat, tree
            tree = _tree(grow(table, result.roots, n) or tree.paths)
    assert best is not None
    return CurvePoint(n, best[1], best[0])


def _extended(table: RankTable, tree: ChoiceTree, n: int) -> ChoiceTree:
    """The tree with the paths that its own steps would take most often, up to n nodes."""
    steps = replay(table, tree).roots
    paths = set(tree.paths)
    missing = [path for path in grow(table, steps, n + len(tree)) if path not in paths]
    return _tree([*tree.paths, *missing[: max(0, n - len(tree))]])


def _tree(paths: Sequence[Path]) -> ChoiceTree:
    return ChoiceTree(tuple(sorted(paths, key=lambda path: (len(path), path))))


def grow(table: RankTable, rows: np.ndarray, n: int) -> tuple[Path, ...]:
    """The n most frequent paths among these rows, most frequent first; equals: shorter, lower rank.

    The first k of them are the k most frequent: one growth serves all sizes. Paths that none of
    the rows takes are left out.

    Example: ranks (0, 0), (0, 1), (1, 0), (0, 0): paths [0] 3, [0, 0] 2, [1] 1, [0, 1] 1, [1, 0] 1.
    """
    ranks = table.ranks
    grown: list[Path] = []
    waiting: list[tuple[int, int, Path, np.ndarray]] = []

    def offer(path: Path, through: np.ndarray) -> None:
        """Put the children of a path, which these rows take, on the heap."""
        column = ranks[through, len(path)]
        inside = column >= 0
        through, column = through[inside], column[inside]
        order = np.argsort(column, kind="stable")
        through, column = through[order], column[order]
        used, begins = np.unique(column, return_index=True)
        takings = np.split(through, begins[1:]) if len(used) else []
        for rank, taking in zip(used.tolist(), takings, strict=True):
            child = (*path, rank)
            heapq.heappush(waiting, (-len(taking), len(child), child, taking))

    if table.depths and len(rows):
        offer((), rows)
    while waiting and len(grown) < n:
        _, depth, path, taking = heapq.heappop(waiting)
        grown.append(path)
        if depth < table.depths:
            offer(path, taking)
    return tuple(grown)
