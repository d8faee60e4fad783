"""EAGLE-3: a one-layer network drafts from a low, a middle and a high layer of the target."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from engine.drafters.base import Workbench
from engine.drafters.dynamic_tree import DynamicPlan, TreeSize
from engine.drafters.eagle import EagleDrafter, check_size, check_width, named_head
from engine.drafters.eagle_checkpoint import EagleCheckpoint
from engine.drafters.eagle_recorded import sessions_for
from engine.drafters.eagle_weights import load_eagle3
from engine.drafters.method import MethodConfig
from engine.kernels.cpu.modules import hasten
from engine.model.checkpoints import read_checkpoint
from engine.proposal import Needs


class Eagle3Config(MethodConfig):
    """EAGLE-3 drafts a chain, or with `use_dynamic_tree` EAGLE-2's dynamic tree."""

    title: ClassVar[str] = "EAGLE-3"
    summary: ClassVar[str] = (
        "One small layer drafts from three layers of the target, in a vocabulary of its own; "
        "a chain, or a tree grown where the draft is confident."
    )
    paper: ClassVar[str | None] = "2503.01840"

    decoding_type: Literal["Eagle3"] = "Eagle3"
    speculative_model: str | None = Field(
        None, description="EAGLE-3 head of this target: folder, file or hub id"
    )
    max_draft_len: int = Field(
        5, ge=1, le=32, description="length of the chain, or levels of the tree (EAGLE's depth + 1)"
    )
    use_dynamic_tree: bool = Field(
        False, description="grow a tree by confidence instead of a chain"
    )
    dynamic_tree_max_topK: int = Field(
        10, ge=1, le=64, description="dynamic tree: children of every expanded node"
    )
    max_total_draft_tokens: int = Field(
        59, ge=1, le=1024, description="dynamic tree: drafted nodes kept (EAGLE's total_token - 1)"
    )
    max_non_leaves_per_layer: int | None = Field(
        None, ge=1, le=64, description="dynamic tree: nodes expanded per level; None = the top K"
    )
    eagle3_layers_to_capture: tuple[Annotated[int, Field(ge=0, le=1023)], ...] | None = Field(
        None,
        strict=False,
        min_length=1,
        max_length=16,
        description="target layers whose outputs the head reads; None = as its checkpoint says",
    )

    @model_validator(mode="after")
    def _fits(self) -> Eagle3Config:
        if self.use_dynamic_tree:
            check_size(self.size)
        return self

    @property
    def size(self) -> TreeSize:
        """How the draft may grow; a chain is a tree of one child per node."""
        if not self.use_dynamic_tree:
            return TreeSize(top_k=1, levels=self.max_draft_len, keep=self.max_draft_len, expanded=1)
        return TreeSize(
            top_k=self.dynamic_tree_max_topK,
            levels=self.max_draft_len,
            keep=self.max_total_draft_tokens,
            expanded=self.max_non_leaves_per_layer or self.dynamic_tree_max_topK,
        )

    def build(self, bench: Workbench) -> EagleDrafter:
        """Read the head and check it against the target and the tree.

        Raises:
            ConfigError: no `speculative_model`.
            SourceError: it cannot be found or read safely.
            DrafterError: no EAGLE-3 head, one for another target, or layers the target lacks.
        """
        target = bench.target
        location = bench.locate(named_head(self.speculative_model))
        found = EagleCheckpoint(read_checkpoint(location))
        named = self.eagle3_layers_to_capture
        inputs = None if named is None else tuple(i + 1 for i in named)
        head, layers = load_eagle3(found, target, inputs)
        hasten(head, target.kernels)
        check_width(self.size.top_k, head)
        plan, notes = DynamicPlan(self.size), found.remarks(target)
        sessions, needs = sessions_for(target), Needs(layers=layers)
        return EagleDrafter(head, plan, needs, target.device, notes=notes, sessions=sessions)
