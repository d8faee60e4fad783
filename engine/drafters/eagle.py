"""EAGLE-1 and EAGLE-2: a one-layer network drafts from the target's last hidden state."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Literal, Protocol

import torch
from pydantic import Field, model_validator
from torch import Tensor

from engine.config import Sampling
from engine.drafters.base import Drafter, Start, Workbench, root_only
from engine.drafters.dynamic_tree import DynamicPlan, TreeSize
from engine.drafters.eagle_checkpoint import EagleCheckpoint
from engine.drafters.eagle_head import DraftHead
from engine.drafters.eagle_recorded import sessions_for
from engine.drafters.eagle_session import HeadSession
from engine.drafters.eagle_weights import load_eagle1
from engine.drafters.method import MethodConfig
from engine.drafters.static_tree import StaticPlan
from engine.errors import ConfigError, DrafterError
from engine.kernels.cpu.modules import hasten
from engine.model.checkpoints import read_checkpoint
from engine.proposal import Needs, Outcome, Proposal, TargetOutput
from engine.sampling import SeededDraws
from engine.tree import ChoicePaths, ChoiceTree, upload

MC_SIM_7B_63 = ChoiceTree.parse(
    "[[0],[1],[2],[3],[0,0],[0,1],[0,2],[1,0],[1,1],[2,0],[2,1],[3,0],[0,0,0],[0,0,1],[0,0,2],"
    "[0,1,0],[0,1,1],[0,2,0],[0,2,1],[1,0,0],[0,0,0,0],[0,0,0,1],[0,0,0,2],[0,0,0,0,0],[0,0,0,0,1]]",
    form="candidates",
)
"""The reference's default tree; 25 nodes in spite of its name."""


class EagleConfig(MethodConfig):
    """EAGLE-1 drafts a static choice tree, EAGLE-2 a dynamic tree; the same heads serve both."""

    title: ClassVar[str] = "EAGLE"
    summary: ClassVar[str] = (
        "One small layer continues the target's last hidden state; EAGLE-1 fills a fixed tree, "
        "EAGLE-2 grows a tree where the draft is confident."
    )
    paper: ClassVar[str | None] = "2401.15077, 2406.16858"

    decoding_type: Literal["Eagle"] = "Eagle"
    speculative_model: str | None = Field(
        None, description="EAGLE-1/2 head of this target: folder, file or hub id"
    )
    eagle_choices: ChoicePaths = Field(
        MC_SIM_7B_63.paths, description="static tree of ranks (EAGLE-1), e.g. [[0], [0, 0], [1]]"
    )
    use_dynamic_tree: bool = Field(
        False, description="grow the tree by confidence (EAGLE-2) instead of eagle_choices"
    )
    max_draft_len: int = Field(
        6, ge=1, le=32, description="dynamic tree: drafted levels (EAGLE's depth + 1)"
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

    @model_validator(mode="after")
    def _fits(self) -> EagleConfig:
        if self.use_dynamic_tree:
            check_size(self.size)
        return self

    @property
    def size(self) -> TreeSize:
        """How the dynamic tree may grow."""
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
            DrafterError: no EAGLE-1/2 head, or one for another target.
            TreeError: the tree uses more ranks than there are tokens.
        """
        target = bench.target
        location = bench.locate(named_head(self.speculative_model))
        found = EagleCheckpoint(read_checkpoint(location))
        head = load_eagle1(found, target)
        hasten(head, target.kernels)
        plan: Plan
        if self.use_dynamic_tree:
            check_width(self.dynamic_tree_max_topK, head)
            plan = DynamicPlan(self.size)
        else:
            tree = ChoiceTree(self.eagle_choices)
            tree.check_fits(depth=tree.depth, ranks=head.draft_vocab_size, what=found.location)
            plan = StaticPlan(tree, target.device)
        notes = found.remarks(target)
        sessions = sessions_for(target)
        needs = Needs(hidden=True)
        return EagleDrafter(head, plan, needs, target.device, notes=notes, sessions=sessions)


def named_head(speculative_model: str | None) -> str:
    """Where the head is.

    Raises:
        ConfigError: none is named; EAGLE cannot draft without one.
    """
    if speculative_model is None:
        raise ConfigError("speculative_model must name an EAGLE head, got none. Set it.")
    return speculative_model


def check_size(size: TreeSize) -> None:
    """Refuse a dynamic tree that keeps more nodes than are ever drafted.

    Raises:
        ValueError: naming both numbers.
    """
    if size.keep > size.num_candidates:
        raise ValueError(
            f"max_total_draft_tokens must be at most {size.num_candidates}, all that "
            f"{size.levels} levels of top {size.top_k} draft, got {size.keep}"
        )


def check_width(top_k: int, head: DraftHead) -> None:
    """Refuse more children per node than the head has tokens.

    Raises:
        DrafterError: naming both numbers.
    """
    if top_k > head.draft_vocab_size:
        raise DrafterError(
            f"dynamic_tree_max_topK is {top_k}, but the head drafts from {head.draft_vocab_size} "
            "tokens. Lower it."
        )


class Plan(Protocol):
    """Shapes a draft: which nodes to expand, and which to propose."""

    def draft(
        self, session: HeadSession, max_depth: int, sampling: Sampling, draws: SeededDraws
    ) -> Proposal:
        """A draft tree below the session's root, at most `max_depth` deep."""


class EagleDrafter(Drafter):
    """Keeps a head's base entries in step with the target, and lets a plan draft from them.

    Attributes:
        notes: what a person should know about this pairing of head and target.
    """

    def __init__(
        self,
        head: DraftHead,
        plan: Plan,
        needs: Needs,
        device: torch.device,
        *,
        notes: tuple[str, ...] = (),
        sessions: Callable[[DraftHead], HeadSession] = HeadSession,
    ) -> None:
        self.head = head
        self.plan = plan
        self.needs = needs
        self.notes = notes
        self._device = device
        self._sessions = sessions
        self._session = sessions(head)
        self._pending: list[tuple[Tensor, Tensor]] = []

    def start(self, start: Start) -> None:
        tokens = torch.tensor([*start.prompt_ids[1:], start.root], device=self._device)
        self._session = self._sessions(self.head)
        self._pending = [(_features(start.output), tokens)]
        self._sampling, self._draws = start.sampling, start.draws

    def propose(self, max_depth: int) -> Proposal:
        if self._pending:
            # Several where steps went by without a draft: others drafted, or nobody did.
            features, tokens = zip(*self._pending, strict=True)
            self._session.feed_base(torch.cat(features), torch.cat(tokens))
            self._pending.clear()
        if max_depth < 1:
            return root_only(int(self._session.root), self._device)
        return self.plan.draft(self._session, max_depth, self._sampling, self._draws)

    def observe(self, outcome: Outcome) -> None:
        rows = upload(torch.tensor([outcome.path, outcome.committed]), self._device)
        self._pending.append((_features(outcome.output)[rows[0]], rows[1]))

    def finish(self) -> None:
        self._pending.clear()
        self._session = self._sessions(self.head)

    def close(self) -> None:
        self.finish()
        del self.head


def _features(output: TargetOutput) -> Tensor:
    features = output.hidden if output.layers is None else output.layers
    assert features is not None, "the target was asked for no features"
    return features
