"""Fits trees to a rank table and judges them, fitted and published ones alike, on other texts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from engine.drafters.method import MethodConfig
from engine.errors import ConfigError
from engine.tree import ChoiceTree
from engine.tuning.latency import Prediction, StepLatency
from engine.tuning.ranks import RankTable
from engine.tuning.replay import replay
from engine.tuning.search import CurvePoint, curve, fastest
from presets.choice_trees import Measured, TreePreset, tree_preset, tree_yaml


@dataclass(frozen=True, slots=True)
class Fit:
    """A tree and what it brings.

    Attributes:
        mat: replayed MAT on the texts that trees were fitted to; how many, and their positions.
        held_out_mat: on texts that they were not fitted to; None without any.
        prediction: speed on a machine, from the MAT on held-out texts where there are any.
    """

    title: str
    tree: ChoiceTree
    mat: float
    num_texts: int
    num_positions: int
    held_out_mat: float | None = None
    held_out_texts: int | None = None
    prediction: Prediction | None = None

    def row(self) -> dict[str, Any]:
        """Plain JSON."""
        return {
            "title": self.title,
            "nodes": len(self.tree),
            "mat": self.mat,
            "held_out_mat": self.held_out_mat,
            "predicted_tok_s": self.prediction.tok_s if self.prediction else None,
            "candidates": self.tree.as_lists(),
        }


def hold_out(table: RankTable, every: int) -> tuple[RankTable, RankTable | None]:
    """The texts to fit to, and every n-th text of each category, held out; 0 holds out none.

    Raises ConfigError: nothing would be left on one side.
    """
    if every == 0:
        return table, None
    if every < 2:
        raise ConfigError(f"--held-out must be 0 or at least 2, got {every}.")
    by_category: dict[str, list[int]] = defaultdict(list)
    for text, category in enumerate(table.categories):
        by_category[category].append(text)
    held = {text for texts in by_category.values() for text in texts[every - 1 :: every]}
    fitted = [text for text in range(table.num_texts) if text not in held]
    if not held or not fitted:
        raise ConfigError(
            f"Holding out one text in {every} leaves nothing to judge by, with {table.num_texts} "
            "texts. Measure the table on more runs, or hold out none (0)."
        )
    return table.pick(fitted), table.pick(sorted(held))


def best_trees(
    table: RankTable,
    config: MethodConfig,
    nodes: Sequence[int],
    latency: StepLatency | None,
    **bounds: Any,
) -> tuple[CurvePoint, ...]:
    """The best tree of every size: the highest MAT, or where depth costs time the most tok/s.

    Args:
        bounds: as `engine.tuning.search.curve` takes them.
    """
    if latency is None or latency.verify.trees is None:
        return curve(table, nodes, **bounds)

    def tok_s(point: CurvePoint) -> float:
        return latency.predict_config(config.with_tree(point.tree), point.mat).tok_s

    return fastest(table, nodes, tok_s, **bounds)


def fit_trees(
    table: RankTable,
    config: MethodConfig,
    nodes: Sequence[int],
    *,
    max_depth: int | None = None,
    max_width: int | None = None,
    category: str | None = None,
    held_out: int = 0,
    latency: StepLatency | None = None,
) -> list[Fit]:
    """The best tree of every size.

    Args:
        held_out: one text in this many is only for judging; 0 = none.

    Raises ConfigError: a constraint is out of range, or too few texts.
    """
    fitted, other = hold_out(table.only(category), held_out)
    points = best_trees(fitted, config, nodes, latency, max_depth=max_depth, max_width=max_width)
    return [
        _judged(f"fitted, {p.num_nodes}", p.tree, fitted, other, config, latency) for p in points
    ]


def stock_trees(
    table: RankTable,
    config: MethodConfig,
    published: Iterable[TreePreset],
    *,
    category: str | None = None,
    held_out: int = 0,
    latency: StepLatency | None = None,
) -> list[Fit]:
    """The method's published trees that the table can replay, judged on the same texts."""
    fitted, other = hold_out(table.only(category), held_out)
    fits = [
        preset
        for preset in published
        if config.decoding_type in preset.methods
        and preset.tree.depth <= table.depths
        and preset.tree.max_rank < table.num_ranks
    ]
    return [_judged(p.name, p.tree, fitted, other, config, latency) for p in fits]


def _judged(
    title: str,
    tree: ChoiceTree,
    fitted: RankTable,
    other: RankTable | None,
    config: MethodConfig,
    latency: StepLatency | None,
) -> Fit:
    mat = replay(fitted, tree).mat
    held_out_mat = None if other is None else replay(other, tree).mat
    prediction = None
    if latency is not None:
        expected = mat if held_out_mat is None else held_out_mat
        prediction = latency.predict_config(config.with_tree(tree), expected)
    return Fit(
        title,
        tree,
        mat,
        fitted.num_texts,
        fitted.num_positions,
        held_out_mat,
        None if other is None else other.num_texts,
        prediction,
    )


def fit_yaml(fit: Fit, name: str, table: RankTable, prompts: str) -> str:
    """A fitted tree as a preset file, with what it was measured on."""
    about = table.about
    method, target = str(about["decoding_type"]), str(about["target"])
    preset = tree_preset(
        {
            "name": name,
            "title": f"{target}, {method}, {len(fit.tree)} nodes",
            "methods": (method,),
            "candidates": fit.tree.as_lists(),
            "source": "fitted to measured ranks by app.py tune fit",
            "measured": Measured(
                target=target,
                dtype=str(about.get("dtype", "")),
                drafter=str(about.get("method", {}).get("speculative_model") or ""),
                texts=fit.num_texts,
                positions=fit.num_positions,
                mat=round(fit.mat, 4),
                prompts=prompts,
                held_out_mat=None if fit.held_out_mat is None else round(fit.held_out_mat, 4),
                held_out_texts=fit.held_out_texts,
            ),
        },
        where=name,
    )
    return tree_yaml(preset)
