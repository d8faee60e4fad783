"""What a method's settings make it draft: rows that its network runs per level, depth, nodes."""

from __future__ import annotations

from dataclasses import dataclass

from engine.drafters.draft_target import DraftTargetConfig
from engine.drafters.dynamic_tree import TreeSize
from engine.drafters.eagle import EagleConfig
from engine.drafters.eagle3 import Eagle3Config
from engine.drafters.medusa import MedusaConfig
from engine.drafters.method import MethodConfig
from engine.drafters.ngram import NGramConfig
from engine.drafters.redrafter import ReDrafterConfig
from engine.drafters.suffix import SuffixConfig
from engine.errors import ConfigError
from engine.tree import ChoiceTree


@dataclass(frozen=True, slots=True)
class DraftShape:
    """The most that one step drafts.

    Attributes:
        levels: rows that the drafting network is run on, forward after forward; empty without one.
        depth: longest path, in drafted tokens.
        num_nodes: drafted nodes; an upper bound where the method merges or looks up.
    """

    levels: tuple[int, ...]
    depth: int
    num_nodes: int


def draft_shape(config: MethodConfig) -> DraftShape:
    """The draft that these settings ask for.

    Example: EAGLE with the tree [0], [1], [0, 0] runs its head on 1 row (the root), then on 1 (the
    node [0]); Medusa's heads are run once per depth.

    Raises:
        ConfigError: not a method that can be tuned offline.
    """
    if isinstance(config, MedusaConfig):
        tree = ChoiceTree(config.medusa_choices)
        return DraftShape((1,) * tree.depth, tree.depth, len(tree))
    if isinstance(config, EagleConfig) and not config.use_dynamic_tree:
        tree = ChoiceTree(config.eagle_choices)
        return DraftShape(expanded_rows(tree), tree.depth, len(tree))
    if isinstance(config, EagleConfig | Eagle3Config):
        return _dynamic(config.size)
    if isinstance(config, DraftTargetConfig):
        return DraftShape((1,) * config.max_draft_len, config.max_draft_len, config.max_draft_len)
    if isinstance(config, ReDrafterConfig):
        depth, width = config.beam_length - 1, config.beam_width
        return DraftShape((1, *(width,) * (depth - 1)), depth, width * depth)
    if isinstance(config, NGramConfig):
        return DraftShape((), config.max_draft_len, config.max_draft_len)
    if isinstance(config, SuffixConfig):
        nodes = config.max_total_draft_tokens if config.use_tree_spec else config.max_draft_len
        return DraftShape((), config.max_draft_len, nodes)
    raise ConfigError(
        f"{config.decoding_type} cannot be tuned offline: it learns more from the target than a "
        "text's features. Measure it by running it."
    )


def with_tree(config: MethodConfig, tree: ChoiceTree) -> MethodConfig:
    """The method's settings with this tree; methods without choice trees take chains.

    Raises:
        ConfigError: a tree that branches for a method that drafts chains, or a method with neither.
    """
    if isinstance(config, MedusaConfig):
        return config.replace(medusa_choices=tree.paths)
    if isinstance(config, EagleConfig):
        return config.replace(eagle_choices=tree.paths, use_dynamic_tree=False)
    if not tree.shape.is_chain or tree.max_rank:
        raise ConfigError(
            f"{config.decoding_type} drafts chains, but the tree has {len(tree.leaves)} leaves. "
            "Use Medusa or Eagle for trees."
        )
    if isinstance(config, ReDrafterConfig):
        return config.replace(beam_width=1, beam_length=tree.depth + 1)
    if isinstance(config, Eagle3Config):
        return config.replace(max_draft_len=tree.depth, use_dynamic_tree=False)
    if isinstance(config, DraftTargetConfig | NGramConfig | SuffixConfig):
        return config.replace(max_draft_len=tree.depth)
    raise ConfigError(f"{config.decoding_type} takes no tree and no draft length.")


def expanded_rows(tree: ChoiceTree) -> tuple[int, ...]:
    """Nodes with children per depth, the root first: what a network of one pass per level runs."""
    rows = [0] * tree.depth
    depths = tree.shape.depths.tolist()
    for node, children in enumerate(tree.shape.children):
        if children:
            rows[depths[node]] += 1
    return tuple(rows)


def _dynamic(size: TreeSize) -> DraftShape:
    levels = [1]
    offered = size.top_k
    for _ in range(1, min(size.levels, size.keep)):
        levels.append(min(size.expanded, offered))
        offered = levels[-1] * size.top_k
    return DraftShape(tuple(levels), len(levels), size.keep)
