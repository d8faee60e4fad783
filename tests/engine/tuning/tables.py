"""Made-up rank tables and trees, and the slow but plain way to replay them."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import numpy as np

from engine import metrics
from engine.tree import ChoiceTree
from engine.tuning.ranks import RankTable
from engine.tuning.replay import Replay, replay


def made_up(
    rng: np.random.Generator, lengths: list[int], *, depths: int = 4, num_ranks: int = 6
) -> RankTable:
    """Ranks as a drafter gives them: low ones often, some not kept, none beyond the context."""
    positions = sum(lengths)
    ranks = rng.geometric(0.45, size=(positions, depths)) - 1
    ranks[(ranks >= num_ranks) | (rng.random((positions, depths)) < 0.1)] = -1
    starts = np.cumsum([0, *lengths])[:-1]
    return RankTable(
        ranks=ranks.astype(np.int16),
        num_ranks=num_ranks,
        texts=tuple(starts.tolist()),
        categories=tuple("ab"[i % 2] for i in range(len(lengths))),
        about={"sources": [f"run {i}" for i in range(len(lengths))]},
    )


def made_up_table(
    *, positions: int = 10_000, depths: int = 5, texts: int = 40, ranks: int = 64, seed: int = 0
) -> RankTable:
    """Ranks of texts of equal length, of three categories in turn."""
    lengths = np.diff(np.linspace(0, positions, texts + 1).astype(int)).tolist()
    table = made_up(np.random.default_rng(seed), lengths, depths=depths, num_ranks=ranks)
    categories = tuple(("chat", "code", "math")[i % 3] for i in range(texts))
    about = {"target": "tiny", "dtype": "float32", **table.about}
    return replace(table, categories=categories, about=about)


def random_tree(n: int, *, depth: int, ranks: int, seed: int) -> ChoiceTree:
    """A tree of n nodes (fewer where no more fit), any ranks below `ranks`, gaps among them too."""
    draw = random.Random(seed)
    paths: list[tuple[int, ...]] = []
    for _ in range(50 * n):
        above = draw.choice([(), *paths])
        path = (*above, draw.randrange(ranks))
        if len(path) <= depth and path not in paths:
            paths.append(path)
        if len(paths) == n:
            break
    return ChoiceTree.parse(paths, form="candidates")


def slow_steps(table: RankTable, tree: ChoiceTree) -> list[tuple[int, tuple[int, ...]]]:
    """Every step as its row and the accepted path, by walking the texts token by token."""
    known = set(tree.paths)
    steps = []
    for text in range(table.num_texts):
        row, end = table.span(text)
        while row < end:
            path: tuple[int, ...] = ()
            for rank in table.ranks[row].tolist():
                if rank < 0 or (*path, rank) not in known:
                    break
                path = (*path, rank)
            steps.append((row, path))
            row += len(path) + 1
    return steps


def replay_chain(table: RankTable, length: int) -> Replay:
    """Every step of a greedy run that drafts chains of `length` tokens, as the page replays it."""
    if not table.chains:
        return replay(table, ChoiceTree.chain(length))
    roots, accepted, _ = table.chains[length]
    return Replay(roots, accepted.astype(np.int64))


def position_rates(result: Replay) -> tuple[float, ...]:
    """Position rates of a replayed run."""
    counts = metrics.at_least(Counter(result.accepted_lengths.tolist()))
    return metrics.position_rates(counts, result.num_steps)
