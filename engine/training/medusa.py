"""Trains Medusa heads: residual blocks on the target's hidden state, which share its `lm_head`.

Head i reads row t and learns token t + 2 + i, from the text and from the distribution that the
target had there. Medusa-1: the target is frozen.
Source: arXiv:2401.10774, sections 2.2.1 and 2.3.3 (self-distillation).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from pydantic import Field
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from engine.checkpoints import read_checkpoint
from engine.corpus import Corpus, Entry
from engine.drafters.medusa import MedusaConfig
from engine.target import Target
from engine.training.growth import grow_by_rates
from engine.training.packs import Pack, Teacher, project
from engine.training.recipe import TrainSettings
from engine.training.student import (
    Judged,
    Student,
    Vocabulary,
    count_hits,
    hard_loss,
    no_hits,
    soft_loss,
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
        size, count, layers = target.hidden_size, settings.heads, settings.layers
        self.settings = settings
        self.weight = nn.Parameter(torch.zeros(count, layers, size, size, device=target.device))
        self.bias = nn.Parameter(torch.zeros(count, layers, size, device=target.device))
        self._target = target
        self._vocabulary = vocabulary

    def judge(self, pack: Pack, teacher: Teacher, generator: torch.Generator | None) -> Judged:
        count, loss = self.settings.heads, pack.hidden.new_zeros(())
        hits, rows = no_hits(count, pack.hidden.device)
        ids, soft = self._vocabulary.ids, self.settings.soft_weight
        known, places = pack.ahead(1), torch.zeros_like(pack.tokens)
        places[known] = torch.arange(len(known), device=known.device)
        theirs = teacher.logits(pack.hidden[known], ids).softmax(dim=-1) if soft else None
        for head in range(count):
            at = pack.ahead(2 + head)
            wanted = self._vocabulary.place(pack.tokens[at + 2 + head])
            x = self._blocks(pack.hidden[at], head)
            logits = project(self._target, x, ids)
            one = (1 - soft) * hard_loss(logits, wanted)
            if theirs is not None:
                one = one + soft * soft_loss(logits, theirs[places[at + 1 + head]])
            loss = loss + self.settings.depth_decay**head / max(1, len(at)) * one
            hits[head], rows[head] = count_hits(logits, wanted), len(at)
        return Judged(loss, hits, rows)

    def _blocks(self, x: Tensor, head: int) -> Tensor:
        for weight, bias in zip(self.weight[head], self.bias[head], strict=True):
            x = x + silu(linear(x, weight, bias))
        return x

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        found, size = read_checkpoint(str(folder)), self.weight.shape[-1]
        for head, layer in itertools.product(*map(range, self.weight.shape[:2])):
            name = f"{head}.{layer}.linear"
            self.weight[head, layer] = found.tensor(f"{name}.weight", size, size).float()
            self.bias[head, layer] = found.tensor(f"{name}.bias", size).float()

    def save(self, folder: Path, dtype: torch.dtype) -> None:
        """Layout 2 of the published heads: blocks only, `lm_head` is the target's."""
        tensors = {
            f"{head}.{layer}.linear.{name}": value[head, layer].detach().to("cpu", dtype).clone()
            for head in range(self.settings.heads)
            for layer in range(self.settings.layers)
            for name, value in (("weight", self.weight), ("bias", self.bias))
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
