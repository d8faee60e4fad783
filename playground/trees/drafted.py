"""Trees that a drafter grew by itself, counted for the Tree page: recorded ones and re-drafted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from engine.drafters import parse_method
from engine.drafters.method import MethodConfig
from engine.tuning.redraft import DraftedTrees
from engine.tuning.shape import draft_shape
from playground.trees.methods import DYNAMIC_FIELDS
from playground.trees.sources import is_greedy
from storage import RunLog

MOST_PATHS = 64
"""Paths drawn: those drafted most."""
MOST_RUNS = 100


def drafted_row(
    config: MethodConfig,
    trees: DraftedTrees,
    accepted: Sequence[int],
    nodes: Sequence[int],
) -> dict[str, Any]:
    """Figures and shapes as the page's `DynamicCard` reads them; plain JSON."""
    steps, total = len(accepted), sum(accepted)
    mat = 1 + total / steps
    at_least = np.bincount(np.array(accepted))[::-1].cumsum()[::-1][1:]
    return {
        "settings": {name: getattr(config, name) for name in DYNAMIC_FIELDS},
        "steps": steps,
        "tokens": steps + total,
        "mat": mat,
        "rates": (at_least / steps).tolist(),
        "nodes": sum(nodes) / steps,
        "levels": list(draft_shape(config).levels),
        "counts": {
            "nodes": _sorted(trees.num_nodes),
            "depths": _sorted(trees.depths),
            "widths": _sorted(trees.widths),
        },
        "paths": _most_drafted(trees),
        "redrafted": False,
    }


def _sorted(counts: Counter[int]) -> list[list[int]]:
    return [[value, counts[value]] for value in sorted(counts)]


def _most_drafted(trees: DraftedTrees) -> list[list[Any]]:
    """Path, steps that drafted it, steps that accepted it; every parent comes with its child."""
    order = sorted(trees.drafted.items(), key=lambda item: (-item[1], len(item[0]), item[0]))
    return [[list(path), count, trees.accepted[path]] for path, count in order[:MOST_PATHS]]


def recorded(log: RunLog, run_ids: Sequence[str], config: MethodConfig) -> dict[str, Any] | None:
    """What these runs drafted themselves, of those made with the same settings as the first one.

    None where none of them grew a dynamic tree of this method.
    """
    trees, accepted, nodes = DraftedTrees(), list[int](), list[int]()
    used: MethodConfig | None = None
    num_runs = 0
    for run_id in run_ids[:MOST_RUNS]:
        run = log.get(run_id)
        if run is None or not run.method.get("use_dynamic_tree") or not is_greedy(run):
            continue
        if run.decoding_type != config.decoding_type:
            continue
        made = parse_method(run.method, where=f"run {run_id}")
        if used is not None and made != used:
            continue
        used = made
        num_runs += 1
        for step in log.steps(run_id):
            trees.add(step.parents, step.ranks, step.accepted)
            accepted.append(len(step.accepted))
            nodes.append(len(step.tokens) - 1)
    if used is None or not accepted:
        return None
    row = drafted_row(used, trees, accepted, nodes)
    runs = f"{num_runs} runs" if num_runs != 1 else "one run"
    return {**row, "words": f"Drafted by {runs} in {row['steps']} steps."}
