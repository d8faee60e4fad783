"""Trains Medusa heads: residual blocks on the target's hidden state, which share its `lm_head`.

Head i reads row t and learns token t + 2 + i from the text and the target's distribution there.
Medusa-1: the target is frozen.
Source: arXiv:2401.10774, sections 2.2.1 and 2.3.3 (self-distillation).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from engine.config import PositiveUnitFloat, UnitFloat, setting
from engine.drafters.heads.medusa import MedusaConfig
from engine.drafters.heads.vocabulary import Vocabulary
from engine.drafters.lookup.paths import most_probable_tree
from engine.model.corpus import Entry
from engine.model.target import Target
from engine.training.losses import LMHead, Prediction, pad_rows
from engine.training.packs import Pack
from engine.training.recipe import Student, TrainSettings

TREE_NODES = 63
"""Size of the tree with which heads are evaluated."""


class MedusaTraining(TrainSettings):
    method: ClassVar[str] = "medusa"
    paper: ClassVar[str] = "2401.10774"

    heads: int = setting(
        5, "Heads", "number of heads: how many tokens ahead are guessed", ge=1, le=16
    )
    layers: int = setting(1, "Layers per head", "residual blocks per head", ge=1, le=8)
    depth_decay: PositiveUnitFloat = setting(
        0.8, "Loss decay", "weight of a head's loss relative to the head before it"
    )
    soft_weight: UnitFloat = setting(
        0.5,
        "Distillation weight",
        "weight of the target's distribution in the loss; the rest is the text's token",
    )

    def student(self, target: Target, entries: Sequence[Entry]) -> Student:
        return MedusaStudent(self, target, self.vocabulary(target, entries))

    def decoding(self, folder: Path, rates: Sequence[Sequence[float]]) -> MedusaConfig:
        tree = most_probable_tree(TREE_NODES, rates)
        return MedusaConfig(speculative_model=str(folder), medusa_choices=tree.paths)


class MedusaStudent(Student):
    """All heads' residual blocks; they start as the identity."""

    settings: MedusaTraining
    weights_file = "medusa_lm_head.safetensors"

    def __init__(self, settings: MedusaTraining, target: Target, vocabulary: Vocabulary) -> None:
        super().__init__(settings, target, vocabulary, settings.heads)
        size = target.hidden_size
        self.heads: Any = nn.ModuleList(
            nn.ModuleList(nn.Linear(size, size) for _ in range(settings.layers))
            for _ in range(settings.heads)
        )
        for parameter in self.parameters():
            nn.init.zeros_(parameter)
        self.to(target.device)
        self._lm_head = LMHead.of(target, vocabulary)

    def predictions(self, pack: Pack, generator: torch.Generator | None) -> Iterator[Prediction]:
        for ahead, blocks in enumerate(self.heads, start=2):
            rows = pack.rows_before(ahead)
            at = pad_rows(rows)
            x = pack.hidden[at]
            for block in blocks:
                x = x + silu(block(x))
            tokens = self.prediction(pack, at, ahead, x, self._lm_head, num_rows=len(rows))
            teacher = tokens.teacher.mixed(tokens.labels, 1 - self.settings.soft_weight)
            yield replace(tokens, teacher=teacher)

    def published(self) -> Mapping[str, Tensor]:
        """Layout 2 of the published heads: blocks only, `lm_head` is the target's."""
        return {
            f"{head}.{i}.linear.{name}": value
            for head, blocks in enumerate(self.heads)
            for i, block in enumerate(blocks)
            for name, value in block.named_parameters()
        }

    def config(self) -> dict[str, Any]:
        return {
            "medusa_num_heads": self.depths,
            "medusa_num_layers": self.settings.layers,
            "base_model_name_or_path": self.target.name,
            "version": "2",
        }
