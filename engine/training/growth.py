"""Grows a choice tree from how often each rank is right at each depth."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def grow_by_rates(rates: Sequence[Sequence[float]], num_nodes: int) -> tuple[tuple[int, ...], ...]:
    """The `num_nodes` paths of ranks most likely to be accepted, if depths were independent.

    A path's frequency is the product of its ranks' rates, so a child never beats its parent and
    taking the best path again and again keeps the tree closed.

    Example: rates [[0.6, 0.2], [0.5, 0.1]] give (0,) 0.6, (0, 0) 0.3, (1,) 0.2, (1, 0) 0.1, …
    """
    grown: list[tuple[int, ...]] = []
    waiting: list[tuple[float, tuple[int, ...]]]
    waiting = [(-rate, (rank,)) for rank, rate in enumerate(rates[0])]
    heapq.heapify(waiting)
    while waiting and len(grown) < num_nodes:
        minus, path = heapq.heappop(waiting)
        grown.append(path)
        if len(path) < len(rates):
            for rank, rate in enumerate(rates[len(path)]):
                heapq.heappush(waiting, (minus * rate, (*path, rank)))
    return tuple(sorted(grown, key=lambda path: (len(path), path)))
