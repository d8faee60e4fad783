"""Trains Medusa heads: residual blocks on the target's hidden state, which share its `lm_head`.

Head i reads row t and learns token t + 2 + i, from the text and from the distribution that the
target had there. Medusa-1: the target is frozen.
Source: arXiv:2401.10774, sections 2.2.1 and 2.3.3 (self-distillation).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from pydantic import Field
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import silu

from engine.drafters.medusa import MedusaConfig
from engine.model.checkpoints import read_checkpoint
from engine.model.corpus import Corpus, Entry
from engine.model.target import Target
from engine.training.growth import grow_by_rates
from engine.training.packs import Pack
from engine.training.recipe import TrainSettings
from engine.training.student import (
    HITS_SAMPLE,
    Judged,
    Lesson,
    Output,
    Student,
    Vocabulary,
    fill_up,
    no_hits,
)


class MedusaTraining(TrainSettings):
    """Medusa-1 heads."""

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

    def student(self, target: Target, corpus: Corpus, entries: Sequence[Entry]) -> Student:
        return MedusaStudent(self, target, self.vocabulary(target, corpus, entries))

    def decoding(self, folder: Path, rates: Sequence[Sequence[float]]) -> MedusaConfig:
        return MedusaConfig(
            speculative_model=str(folder), medusa_choices=grow_by_rates(rates, self.nodes)
        )


class MedusaStudent(Student):
    """All heads' residual blocks; they start as the identity."""

    def __init__(self, settings: MedusaTraining, target: Target, vocabulary: Vocabulary) -> None:
        super().__init__()
        size = target.hidden_size
        self.settings = settings
        self.heads = nn.ModuleList(
            nn.ModuleList(nn.Linear(size, size) for _ in range(settings.layers))
            for _ in range(settings.heads)
        )
        for parameter in self.parameters():
            nn.init.zeros_(parameter)
        self.to(target.device)
        self._target = target
        self.vocabulary = vocabulary
        self._output = Output.of(target, vocabulary.ids)

    def judge(self, pack: Pack, generator: torch.Generator | None) -> Judged:
        count, loss = self.settings.heads, pack.hidden.new_zeros(())
        hits, rows = no_hits(count, pack.hidden.device)
        sample = None if generator is None else HITS_SAMPLE
        for head in range(count):
            found = pack.ahead(2 + head)
            at = fill_up(found)
            wanted = self.vocabulary.place(pack.tokens[at + 2 + head])
            theirs = pack.likely[at + 1 + head].mixed(wanted, 1 - self.settings.soft_weight)
            x = self._blocks(pack.hidden[at], head)
            lesson = Lesson(x, self._output, theirs, wanted, len(found))
            one, hits[head], rows[head] = lesson.judge(sample=sample)
            loss = loss + self.settings.depth_decay**head / max(1, len(found)) * one
        return Judged(loss, hits, rows)

    def _blocks(self, x: Tensor, head: int) -> Tensor:
        for block in self._of(head):
            x = x + silu(block(x))
        return x

    def _of(self, head: int) -> nn.ModuleList:
        blocks = self.heads[head]
        assert isinstance(blocks, nn.ModuleList)
        return blocks

    def _named(self) -> dict[str, Tensor]:
        """Parameters under their published names."""
        return {
            f"{head}.{i}.linear.{name}": value
            for head in range(self.settings.heads)
            for i, block in enumerate(self._of(head))
            for name, value in block.named_parameters()
        }

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        found = read_checkpoint(str(folder))
        for name, value in self._named().items():
            value.copy_(found.tensor(name, *value.shape))

    def save(self, folder: Path, dtype: torch.dtype) -> None:
        """Layout 2 of the published heads: blocks only, `lm_head` is the target's."""
        tensors = {
            name: value.detach().to("cpu", dtype).clone() for name, value in self._named().items()
        }
        config = {
            "medusa_num_heads": self.settings.heads,
            "medusa_num_layers": self.settings.layers,
            "base_model_name_or_path": self._target.name,
            "version": "2",
        }
        save_file(tensors, folder / "medusa_lm_head.safetensors")
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")

    def describe(self) -> Mapping[str, Any]:
        return {
            "heads": self.settings.heads,
            "residual blocks per head": self.settings.layers,
            "output": "shares the target's lm_head (layout 2, no matrix per head)",
        }
