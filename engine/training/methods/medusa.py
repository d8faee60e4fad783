"""Trains Medusa heads: residual blocks on the target's hidden state, which share its `lm_head`.

Head i reads row t and learns token t + 2 + i, from the text and from the target's distribution
there. Medusa-1: the target is frozen.
Source: arXiv:2401.10774, sections 2.2.1 and 2.3.3 (self-distillation).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import silu

from engine.drafters.heads.medusa import MedusaConfig
from engine.drafters.heads.vocabulary import Vocabulary
from engine.model.corpus import Entry
from engine.model.target import Target
from engine.training.losses import LMHead, Prediction, pad_rows
from engine.training.packs import Pack
from engine.training.recipe import Student, TrainSettings


class MedusaTraining(TrainSettings):
    method: ClassVar[str] = "medusa"
    paper: ClassVar[str] = "2401.10774"

    heads: int = Field(5, ge=1, le=16, description="heads: how far ahead is guessed")
    layers: int = Field(1, ge=1, le=8, description="residual blocks per head")
    depth_decay: float = Field(
        0.8, gt=0.0, le=1.0, description="weight of a head's loss relative to the head before it"
    )
    soft_weight: float = Field(
        0.5,
        ge=0.0,
        le=1.0,
        description="weight of the target's distribution in the loss; the rest is the text's token",
    )
    nodes: int = Field(63, ge=1, le=256, description="size of the tree used when evaluating")

    def student(self, target: Target, entries: Sequence[Entry]) -> Student:
        return MedusaStudent(self, target, self.vocabulary(target, entries))

    def decoding(self, folder: Path, rates: Sequence[Sequence[float]]) -> MedusaConfig:
        return MedusaConfig(
            speculative_model=str(folder), medusa_choices=choices_by_rates(rates, self.nodes)
        )


class MedusaStudent(Student):
    """All heads' residual blocks; they start as the identity."""

    settings: MedusaTraining
    weights_file = "medusa_lm_head.safetensors"
    drafts_vocabulary = True

    def __init__(self, settings: MedusaTraining, target: Target, vocabulary: Vocabulary) -> None:
        super().__init__(settings, target, vocabulary, settings.heads)
        size = target.hidden_size
        self.heads = nn.ModuleList(
            nn.ModuleList(nn.Linear(size, size) for _ in range(settings.layers))
            for _ in range(settings.heads)
        )
        for parameter in self.parameters():
            nn.init.zeros_(parameter)
        self.to(target.device)
        self._lm_head = LMHead.of(target, vocabulary)

    def predictions(self, pack: Pack, generator: torch.Generator | None) -> Iterator[Prediction]:
        for head in range(self.depths):
            rows = pack.rows_before(2 + head)
            at = pad_rows(rows)
            labels = self.vocabulary.index(pack.tokens[at + 2 + head])
            teacher = pack.teacher[at + 1 + head].mixed(labels, 1 - self.settings.soft_weight)
            x = pack.hidden[at]
            for block in self._blocks(head):
                x = x + silu(block(x))
            yield Prediction(x, self._lm_head, teacher, labels, len(rows))

    def _blocks(self, head: int) -> nn.ModuleList:
        blocks = self.heads[head]
        assert isinstance(blocks, nn.ModuleList)
        return blocks

    def published(self) -> Mapping[str, Tensor]:
        """Layout 2 of the published heads: blocks only, `lm_head` is the target's."""
        return {
            f"{head}.{i}.linear.{name}": value
            for head in range(self.depths)
            for i, block in enumerate(self._blocks(head))
            for name, value in block.named_parameters()
        }

    def config(self) -> dict[str, Any]:
        return {
            "medusa_num_heads": self.depths,
            "medusa_num_layers": self.settings.layers,
            "base_model_name_or_path": self.target.name,
            "version": "2",
        }

    def describe(self) -> Mapping[str, Any]:
        return {
            "heads": self.depths,
            "residual blocks per head": self.settings.layers,
            "output": "shares the target's lm_head (layout 2, no matrix per head)",
        }


def choices_by_rates(
    rates: Sequence[Sequence[float]], num_nodes: int
) -> tuple[tuple[int, ...], ...]:
    """The `num_nodes` paths of ranks most likely to be accepted, if depths were independent.

    A path's frequency is the product of its ranks' rates, so a child never beats its parent and
    taking the best path again and again keeps the tree closed.

    Example: rates [[0.6, 0.2], [0.5, 0.1]] give (0,) 0.6, (0, 0) 0.3, (1,) 0.2, (1, 0) 0.1, …
    """
    paths: list[tuple[int, ...]] = []
    waiting: list[tuple[float, tuple[int, ...]]]
    waiting = [(-rate, (rank,)) for rank, rate in enumerate(rates[0])]
    heapq.heapify(waiting)
    while waiting and len(paths) < num_nodes:
        minus, path = heapq.heappop(waiting)
        paths.append(path)
        if len(path) < len(rates):
            for rank, rate in enumerate(rates[len(path)]):
                heapq.heappush(waiting, (minus * rate, (*path, rank)))
    return tuple(sorted(paths, key=lambda path: (len(path), path)))
