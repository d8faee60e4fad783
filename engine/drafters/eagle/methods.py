"""EAGLE-1 and EAGLE-2 draft from the target's last hidden state, EAGLE-3 from three of its layers.

All use one drafter: it keeps the head's base entries in step with the target, and a `StaticTree` or
`DynamicTree` drafts from them. Heads are loaded and checked against the target.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Literal, Self, TypeVar

import torch
from pydantic import Field, model_validator
from torch import Tensor

from engine.config import setting
from engine.drafters.base import (
    BuildContext,
    FeatureDrafter,
    FeatureSession,
    Start,
    chain,
    root_only,
)
from engine.drafters.eagle.head import DraftHead, Eagle1Head, Eagle3Head, Eagle3Spec, HeadEntries
from engine.drafters.eagle.trees import DynamicTree, StaticTree
from engine.drafters.heads.checkpoint import HeadCheckpoint
from engine.drafters.heads.layer import HeadCache
from engine.drafters.heads.vocabulary import DraftOutput, DraftVocab, Vocabulary
from engine.drafters.method import DraftShape, MethodConfig, draft_len, draft_nodes
from engine.drafters.texts import MAX_LOGIT_ROWS, TargetTrace
from engine.errors import DrafterError
from engine.proposal import Budget, Needs, Proposal
from engine.tree import ChoicePaths, ChoiceTree

MC_SIM_7B_63 = ChoiceTree.parse(
    "[[0],[1],[2],[3],[0,0],[0,1],[0,2],[1,0],[1,1],[2,0],[2,1],[3,0],[0,0,0],[0,0,1],[0,0,2],"
    "[0,1,0],[0,1,1],[0,2,0],[0,2,1],[1,0,0],[0,0,0,0],[0,0,0,1],[0,0,0,2],[0,0,0,0,0],[0,0,0,0,1]]",
    form="candidates",
)
"""The reference's default tree; 25 nodes in spite of its name."""
DYNAMIC = "dynamic_tree_max_topK max_total_draft_tokens max_non_leaves_per_layer"
"""Settings of a dynamic tree's size."""
CapturedLayers = Annotated[
    tuple[Annotated[int, Field(ge=0, le=1023)], ...] | None,
    Field(
        strict=False,
        min_length=1,
        max_length=16,
        title="Target layers",
        description="target layers whose outputs the head reads; None = as its checkpoint says",
    ),
]
_Eagle3 = TypeVar("_Eagle3", bound=Eagle3Head)


class _EagleMethod(MethodConfig):
    """The settings of all EAGLE generations: a head, and a tree that may be dynamic."""

    speculative_model: str | None = setting(
        None, "EAGLE head", "the EAGLE head of this target: folder, file or hub id"
    )
    use_dynamic_tree: bool = setting(
        False,
        "Dynamic tree",
        "grow the tree by confidence, as EAGLE-2 does, instead of a fixed draft",
    )
    max_draft_len: int = setting(
        6, "Draft depth", "dynamic tree: drafted levels (EAGLE's depth + 1)", ge=1, le=32
    )
    dynamic_tree_max_topK: int = setting(
        10, "Children per node", "dynamic tree: children of every expanded node", ge=1, le=64
    )
    max_total_draft_tokens: int = draft_nodes(59, " if it is dynamic (EAGLE's total_token - 1)")
    max_non_leaves_per_layer: int | None = setting(
        None,
        "Expanded nodes per level",
        "dynamic tree: nodes expanded per level; None = the top K",
        ge=1,
        le=64,
    )

    @model_validator(mode="after")
    def _keeps_what_is_drafted(self) -> Self:
        tree = self.dynamic_tree
        if self.use_dynamic_tree and tree.keep > tree.num_candidates:
            raise ValueError(
                f"max_total_draft_tokens must be at most {tree.num_candidates}, all that "
                f"{tree.levels} levels of top {tree.top_k} draft, got {tree.keep}"
            )
        return self

    @property
    def dynamic_tree(self) -> DynamicTree:
        return DynamicTree(
            top_k=self.dynamic_tree_max_topK,
            levels=self.max_draft_len,
            keep=self.max_total_draft_tokens,
            expanded=self.max_non_leaves_per_layer or self.dynamic_tree_max_topK,
        )

    def draft_shape(self) -> DraftShape:
        tree = self.dynamic_tree
        return DraftShape(min(tree.levels, tree.keep), tree.keep)

    def build(self, context: BuildContext) -> EagleDrafter:
        location = context.weights(self.speculative_model, "an EAGLE head")
        checkpoint = HeadCheckpoint.read(location, context.target, self.decoding_type)
        head, needs = self._load(checkpoint, context)
        head.use_kernels(context.target.kernels)
        drafter = EagleDrafter(head, self._tree_for(head, location), needs)
        drafter.notes = checkpoint.notes()
        return drafter

    @abstractmethod
    def _load(self, checkpoint: HeadCheckpoint, context: BuildContext) -> tuple[DraftHead, Needs]:
        """The head, and the features that it reads."""

    def _tree_for(self, head: DraftHead, what: str) -> StaticTree | DynamicTree:
        tree = self.dynamic_tree
        if tree.top_k > head.vocabulary.size:
            raise DrafterError(
                f"dynamic_tree_max_topK is {tree.top_k}, but the head drafts from "
                f"{head.vocabulary.size} tokens. Lower it."
            )
        return tree


class EagleConfig(_EagleMethod):
    """EAGLE-1 drafts a static choice tree, EAGLE-2 a dynamic tree; the same heads serve both."""

    title = "EAGLE"
    summary = (
        "One small layer continues the target's last hidden state; EAGLE-1 fills a fixed tree, "
        "EAGLE-2 grows a tree where the draft is confident."
    )
    paper = "2401.15077, 2406.16858"
    main_settings = "drafting use_dynamic_tree eagle_choices max_total_draft_tokens"

    without_effect = (
        ({"use_dynamic_tree": True}, "eagle_choices"),
        ({"use_dynamic_tree": False}, f"max_draft_len {DYNAMIC}"),
    )

    decoding_type: Literal["Eagle"] = "Eagle"
    eagle_choices: ChoicePaths = setting(
        MC_SIM_7B_63.paths, "Choice tree", "static tree of ranks (EAGLE-1), e.g. [[0], [0, 0], [1]]"
    )

    draft_vocab: DraftVocab = None
    speculative_token_map: str | None = setting(
        None,
        "Token map",
        "file with the ids of the tokens that are drafted, the most frequent first "
        "(FR-Spec, .pt or .json): a path, or owner/repository/file on the hub; None = the one "
        "beside the head",
    )

    def draft_shape(self) -> DraftShape:
        if self.use_dynamic_tree:
            return super().draft_shape()
        return DraftShape.of(ChoiceTree(self.eagle_choices))

    def with_tree(self, tree: ChoiceTree) -> Self:
        return self.replace(eagle_choices=tree.paths, use_dynamic_tree=False)

    def _load(self, checkpoint: HeadCheckpoint, context: BuildContext) -> tuple[DraftHead, Needs]:
        target, token_map = context.target, self.speculative_token_map
        checkpoint.check_vocabulary()
        (spec,) = checkpoint.layer_specs(target.hidden_size, most=1)
        file = None if token_map is None else context.locate(token_map)
        vocabulary = Vocabulary.beside(checkpoint.location, target, self.draft_vocab, file)
        output, bias = DraftOutput(target, vocabulary), checkpoint.config.bias
        head = checkpoint.load(lambda: Eagle1Head(spec, output, bias=bias))
        head.embedding = checkpoint.embedding(spec.hidden)
        checkpoint.config.check_read()
        return head, Needs(hidden=True)

    def _tree_for(self, head: DraftHead, what: str) -> StaticTree | DynamicTree:
        if self.use_dynamic_tree:
            return super()._tree_for(head, what)
        tree = ChoiceTree(self.eagle_choices)
        tree.check_fits(depth=tree.depth, ranks=head.vocabulary.size, what=what)
        return StaticTree(tree, head.embedding.device)


class Eagle3Config(_EagleMethod):
    """EAGLE-3 drafts a chain, or with `use_dynamic_tree` EAGLE-2's dynamic tree."""

    title = "EAGLE-3"
    summary = (
        "One small layer drafts from three layers of the target, in a vocabulary of its own; "
        "a chain, or a tree grown where the draft is confident."
    )
    paper = "2503.01840"
    main_settings = "drafting use_dynamic_tree max_draft_len"

    without_effect = (({"use_dynamic_tree": False}, DYNAMIC),)

    decoding_type: Literal["Eagle3"] = "Eagle3"
    max_draft_len: int = draft_len(5, "; levels of a dynamic tree (EAGLE's depth + 1)", most=32)
    eagle3_layers_to_capture: CapturedLayers = None

    @property
    def dynamic_tree(self) -> DynamicTree:
        """The draft's limits; a chain is a tree of one child per node."""
        if self.use_dynamic_tree:
            return super().dynamic_tree
        return DynamicTree(top_k=1, levels=self.max_draft_len, keep=self.max_draft_len, expanded=1)

    def with_chain(self, length: int) -> Self:
        return self.replace(max_draft_len=length, use_dynamic_tree=False)

    def _load(self, checkpoint: HeadCheckpoint, context: BuildContext) -> tuple[DraftHead, Needs]:
        return load_eagle3(Eagle3Head, checkpoint, self.eagle3_layers_to_capture)


def load_eagle3(
    kind: type[_Eagle3], checkpoint: HeadCheckpoint, captured: Sequence[int] | None = None
) -> tuple[_Eagle3, Needs]:
    """A head with EAGLE-3's parts on the target's device, in its dtype, and the features it reads.

    Args:
        captured: layers of the target whose outputs it reads; None = as its config says.
    """
    target = checkpoint.target
    vocabulary, own_output = checkpoint.vocabulary()
    spec = _eagle3_spec(checkpoint, vocabulary.size, kind.max_layers)
    is_narrow = spec.layer.hidden != target.hidden_size
    if not own_output and (vocabulary.ids is not None or is_narrow):
        raise DrafterError(
            f"{checkpoint.location} drafts tokens of its own (d2t), or has another hidden size "
            f"than {target.name}, but lacks lm_head.weight. It is damaged; copy it again."
        )
    needs = Needs(hidden=True)
    if spec.num_features:
        needs = Needs(layers=_captured_inputs(checkpoint, captured, spec.num_features))
    elif captured:
        raise DrafterError(
            f"{checkpoint.location} reads the target's last hidden state only "
            "(use_aux_hidden_state is false). Leave eagle3_layers_to_capture out."
        )
    lm_head = None if own_output else DraftOutput(target)
    head = checkpoint.load(lambda: kind(spec, lm_head))
    head.vocabulary = vocabulary
    head.embedding = checkpoint.embedding(spec.layer.hidden)
    checkpoint.config.check_read()
    return head, needs


def _captured_inputs(
    checkpoint: HeadCheckpoint, captured: Sequence[int] | None, count: int
) -> tuple[int, ...]:
    """Decoder layers of the target whose *inputs* the head reads: as set, or by its config.

    Configs count in two ways: outputs of layers (NVIDIA's, first one 1) or inputs (vLLM's and
    speculators', first one 2 or later); input i is output i - 1.
    """
    target, layers = checkpoint.target, checkpoint.config.eagle_aux_hidden_state_layer_ids
    if captured:
        layers = tuple(i + 1 for i in captured)
    elif layers:
        layers = tuple(i + 1 for i in layers) if layers[0] == 1 else layers
    elif target.num_layers < 7:
        raise DrafterError(
            "EAGLE-3 reads three different layers, for which its default needs a target of at "
            f"least 7 layers, but {target.name} has {target.num_layers}. Name the layers in "
            "eagle3_layers_to_capture."
        )
    else:
        layers = (2, target.num_layers // 2, target.num_layers - 3)
    if len(layers) != count or not all(0 <= layer <= target.num_layers for layer in layers):
        raise DrafterError(
            f"{checkpoint.location} reads the outputs of {count} layers, and {target.name} has "
            f"layers 0 to {target.num_layers - 1}, but {', '.join(str(i - 1) for i in layers)} "
            "are captured. Correct eagle3_layers_to_capture."
        )
    return layers


def _eagle3_spec(checkpoint: HeadCheckpoint, draft_vocab_size: int, max_layers: int) -> Eagle3Spec:
    config, location, target = checkpoint.config, checkpoint.location, checkpoint.target
    reads_layers = config.use_aux_hidden_state
    width = target.layer_width if reads_layers else target.hidden_size
    if checkpoint.has("fc.weight") and not reads_layers:
        raise DrafterError(
            f"{location}'s config.json says that use_aux_hidden_state is false, but fc.weight "
            "fuses several layers. It is damaged; copy it again."
        )
    hidden, inputs = checkpoint.take("fc.weight", None, None).shape if reads_layers else (width, 0)
    if inputs % width:
        raise DrafterError(
            f"{location}: fc reads {inputs} numbers, no multiple of the hidden size {width} of "
            f"{target.name}. This drafter was made for another model."
        )
    layer, *others = checkpoint.layer_specs(hidden, most=max_layers)
    before_residual = config.norm_before_residual
    if before_residual is None:
        before_residual = checkpoint.is_speculators
    return Eagle3Spec(
        layer=layer,
        num_features=inputs // width,
        feature_width=width,
        draft_vocab_size=draft_vocab_size,
        norm_before_residual=before_residual,
        norm_before_fc=checkpoint.option("norm_before_fc", "input_norm.weight"),
        norm_each_feature=checkpoint.option("fc_norm", "fc_norm.0.weight"),
        norm_output=config.norm_output,
        others=tuple(others),
    )


class EagleSession(FeatureSession["EagleDrafter"]):
    """Keeps the head's base entries in step with the target, and drafts from them."""

    cache: HeadCache

    def __init__(self, drafter: EagleDrafter, start: Start) -> None:
        super().__init__(drafter, start)
        self._entries = HeadEntries(drafter.head, self.cache)

    def propose(self, budget: Budget) -> Proposal:
        tree = self.drafter.chain if budget.width == 1 else self.drafter.tree
        levels = min(budget.depth, tree.chain_len(self.start.sampling))
        unread, root, entries = self.unread(), self.root, self._entries
        self.cursor.row = len(self.text) - 1
        drafts = entries.chain(*unread, levels, budget.min_prob) if levels > 0 else None
        if drafts is not None:
            return chain(root, drafts[0], drafts[1].exp())
        entries.feed_base(*unread)
        if budget.depth < 1:
            return root_only(root, self.drafter.device)
        if isinstance(tree, DynamicTree):
            return tree.expand(entries, root, budget)
        return tree.draft(entries, root, budget, self.start.sampling, self.start.draws)


class EagleDrafter(FeatureDrafter):
    session = EagleSession

    def __init__(self, head: DraftHead, tree: StaticTree | DynamicTree, needs: Needs) -> None:
        self.head, self.tree, self.needs = head, tree, needs
        self.chain = tree.chain()
        self.traits = replace(self.traits, branches=self.chain is not tree)
        self.device = head.embedding.device

    def new_cache(self) -> HeadCache:
        return HeadCache(1)

    def ranks(self, trace: TargetTrace, depths: int) -> Tensor:
        """All roots draft along their true paths at once, depth by depth: exact for static trees.

        The root at position p has the base entries 0 … p-1. Its entry of depth d carries the d-th
        true token behind it, sits at position p + d - 1 and sees those base entries, its own
        earlier entries and itself; entries of other roots are hidden from it.
        """
        features = trace.features
        tokens = trace.tokens.to(self.device)
        labels = trace.true_tokens(depths).to(self.device)
        first, end = trace.first - 1, trace.first - 1 + len(labels)
        cache = HeadCache(1)
        ranks = []
        for begin in range(0, end, MAX_LOGIT_ROWS):
            entries = torch.arange(begin, min(begin + MAX_LOGIT_ROWS, end), device=self.device)
            fused = self.head.fuse(features[entries.cpu()].to(self.device))
            visible = torch.arange(len(entries) + begin, device=self.device) <= entries[:, None]
            roots = entries >= first
            inputs, unused = tokens[entries + 1], not bool(roots.any())
            out, logits = self.head.predict(
                fused, inputs, entries, cache, visible, last_only=unused
            )
            cache.length += len(entries)
            if not unused:
                own = labels[entries[roots] - first]
                ranks.append(
                    self._ranks_along(out[roots], logits[roots], entries[roots], own, cache)
                )
        return torch.cat(ranks).cpu()

    def _ranks_along(
        self, hidden: Tensor, logits: Tensor, entries: Tensor, labels: Tensor, cache: HeadCache
    ) -> Tensor:
        """Ranks `(m, depths)` of the roots whose last base entries these m are."""
        base = cache.length
        mask = torch.arange(base, device=self.device) <= entries[:, None]
        itself = torch.eye(len(entries), dtype=torch.bool, device=self.device)
        columns = []
        for depth, true in enumerate(labels.clamp_min(0).unbind(dim=1), start=1):
            columns.append(self.head.vocabulary.rank_of(logits, true))
            if depth < labels.shape[1]:
                mask = torch.cat([mask, itself], dim=1)
                hidden, logits = self.head.predict(hidden, true, entries + depth, cache, mask)
                cache.length += len(entries)
        cache.truncate(base)
        return torch.stack(columns, dim=1)
