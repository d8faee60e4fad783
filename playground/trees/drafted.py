"""Recorded dynamic trees, and how many tokens fewer of their nodes would have accepted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from engine.drafters import parse_method
from engine.drafters.method import MethodConfig
from engine.metrics import at_least, mat, position_rates
from engine.tree import Path
from playground.trees.methods import DYNAMIC_FIELDS
from playground.trees.sources import is_greedy
from storage import RunLog, StepRow

MAX_PATHS = 64
"""Paths of dynamic trees that are shown: the most frequent ones."""
MAX_RUNS = 100


class DraftedTrees:
    """Counts over the trees of a method's steps.

    Attributes:
        sizes, depths: number of trees by number of nodes below the root, and by depth.
        drafted, accepted: number of trees that had a node at a path of ranks, and accepted it.
        lengths: number of steps by number of accepted draft tokens.
        places: number of accepted nodes by probability rank in their tree: a tree cut to n nodes
            would keep ranks 0 to n - 1.
    """

    def __init__(self) -> None:
        self.sizes, self.depths, self.lengths = Counter[int](), Counter[int](), Counter[int]()
        self.places = Counter[int]()
        self.drafted, self.accepted = Counter[Path](), Counter[Path]()

    def add(self, step: StepRow) -> None:
        paths, probs = list[Path]([()]), [1.0]
        nodes = zip(step.parents[1:], step.ranks[1:], step.draft_probs[1:], strict=True)
        for parent, rank, prob in nodes:
            paths.append((*paths[parent], rank))
            probs.append(probs[parent] * (prob or 0.0))
        order = sorted(range(1, len(paths)), key=lambda node: -probs[node])
        place = {node: i for i, node in enumerate(order)}
        self.sizes[len(order)] += 1
        self.depths[max(map(len, paths))] += 1
        self.lengths[len(step.accepted)] += 1
        self.places.update(place[node] for node in step.accepted)
        self.drafted.update(paths[1:])
        self.accepted.update(paths[node] for node in step.accepted)

    def row(self, config: MethodConfig) -> dict[str, Any]:
        """Figures and shapes as the page's `DynamicCard` reads them; plain JSON.

        A path has the numbers of steps that drafted and accepted it, and follows its parent;
        `smaller` has the MAT of these steps with only the n most probable nodes, by n.
        """
        steps, accepted = self.lengths.total(), self.places.total()
        most = sorted(self.drafted.items(), key=lambda item: (-item[1], len(item[0]), item[0]))
        kept = accumulate(self.places[place] for place in range(max(self.sizes)))
        return {
            "settings": {name: getattr(config, name) for name in DYNAMIC_FIELDS},
            "steps": steps,
            "tokens": steps + accepted,
            "mat": mat(accepted, steps),
            "rates": position_rates(at_least(self.lengths), steps),
            "nodes": sum(n * count for n, count in self.sizes.items()) / steps,
            "counts": {
                "nodes": list(map(list, sorted(self.sizes.items()))),
                "depths": list(map(list, sorted(self.depths.items()))),
            },
            "smaller": [[n, mat(count, steps)] for n, count in enumerate(kept, start=1)],
            "paths": [[list(path), n, self.accepted[path]] for path, n in most[:MAX_PATHS]],
        }


def drafts_of(log: RunLog, run_ids: Sequence[str], config: MethodConfig) -> dict[str, Any] | None:
    """The dynamic trees of those runs that share the settings of the first; None without any.

    Runs that drafted as set come first: under the controller, only what paid off was drafted.
    """
    configs = {
        run_id: parse_method(run.method, where=f"run {run_id}")
        for run_id in run_ids[:MAX_RUNS]
        if (run := log.get(run_id)) is not None
        and run.method.get("use_dynamic_tree")
        and run.decoding_type == config.decoding_type
        and is_greedy(run)
    }
    settings = next(iter(sorted(configs.values(), key=lambda own: own.drafting != "as set")), None)
    mine = [run_id for run_id, own in configs.items() if own == settings]
    trees = DraftedTrees()
    for run_id in mine:
        for step in log.steps(run_id):
            trees.add(step)
    if settings is None or not trees.lengths:
        return None
    row = trees.row(settings)
    runs = f"{len(mine)} runs" if len(mine) != 1 else "one run"
    how = " as set" if settings.drafting == "as set" else ", as much as paid (drafting: auto)"
    return {**row, "text": f"Drafted{how} by {runs} in {row['steps']} steps."}
