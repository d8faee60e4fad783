"""Trees that a drafter grew by itself, counted for the Tree page: recorded ones and re-drafted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from engine import metrics
from engine.drafters import parse_method
from engine.drafters.method import MethodConfig
from engine.tuning.redraft import DraftedTrees
from playground.trees.methods import DYNAMIC_FIELDS
from playground.trees.sources import is_greedy
from storage import RunLog

MOST_PATHS = 64
"""Paths drawn: those drafted most."""
MOST_RUNS = 100


def drafted_row(
    config: MethodConfig, trees: DraftedTrees, accepted: Sequence[int], nodes: Sequence[int]
) -> dict[str, Any]:
    """Figures and shapes as the page's `DynamicCard` reads them; plain JSON.

    A path comes with the steps that drafted it and those that accepted it, its parent before it.
    """
    steps, counts = len(accepted), metrics.at_least(Counter(accepted))
    most = sorted(trees.drafted.items(), key=lambda item: (-item[1], len(item[0]), item[0]))
    return {
        "settings": {name: getattr(config, name) for name in DYNAMIC_FIELDS},
        "steps": steps,
        "tokens": steps + sum(accepted),
        "mat": metrics.mat(sum(accepted), steps),
        "rates": metrics.position_rates(counts, steps),
        "nodes": sum(nodes) / steps,
        "levels": list(config.draft_shape().levels),
        "counts": {
            "nodes": list(map(list, sorted(trees.num_nodes.items()))),
            "depths": list(map(list, sorted(trees.depths.items()))),
        },
        "paths": [[list(path), n, trees.accepted[path]] for path, n in most[:MOST_PATHS]],
        "redrafted": False,
    }


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
    return {**row, "text": f"Drafted by {runs} in {row['steps']} steps."}
