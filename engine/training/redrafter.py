"""Trains a ReDrafter head by distillation: its guesses learn the target's distribution.

Row t is a context; the recurrence is fed the tokens t + 1 … t + d, and its guess of token t + 1 + d
learns what the target thinks at row t + d. Source: arXiv:2403.09919, section 3.4.
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
from torch.nn.functional import embedding, silu

from engine.drafters.redrafter import ReDrafterConfig
from engine.model.checkpoints import read_checkpoint
from engine.model.corpus import Corpus, Entry
from engine.model.target import Target
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


class ReDrafterTraining(TrainSettings):
    """Apple's recurrent head; a narrow exit keeps it small."""

    method: ClassVar[str] = "redrafter"
    paper: ClassVar[str] = "2403.09919"

    depths: int = Field(5, ge=1, le=16, description="tokens drafted ahead in training")
    layers: int = Field(2, ge=0, le=8, description="residual blocks")
    exit_dim: int = Field(
        64, ge=2, le=1 << 15, description="width before the output matrix (vocabulary × exit_dim)"
    )
    depth_decay: float = Field(
        0.9, gt=0.0, le=1.0, description="weight of a depth's loss relative to the one before it"
    )
    beam_width: int = Field(4, ge=1, le=50, description="beams when evaluating")
    beam_length: int = Field(5, ge=2, le=17, description="beam length when evaluating")

    def student(self, target: Target, corpus: Corpus, entries: Sequence[Entry]) -> Student:
        return ReDrafterStudent(self, target, self.vocabulary(target, corpus, entries))

    def decoding(self, folder: Path, rates: Sequence[Sequence[float]]) -> ReDrafterConfig:
        return ReDrafterConfig(
            speculative_model=str(folder),
            beam_width=self.beam_width,
            beam_length=self.beam_length,
        )


class ReDrafterStudent(Student):
    """The recurrence, the exit projection, residual blocks and an output matrix of its own.

    The output matrix begins as the best approximation of the target's `lm_head` at that width.
    """

    def __init__(self, settings: ReDrafterTraining, target: Target, vocabulary: Vocabulary) -> None:
        super().__init__()
        size, width = target.hidden_size, settings.exit_dim
        self.settings = settings
        self.rnn_w = nn.Linear(size, size, bias=False)
        self.rnn_u = nn.Linear(size, size)
        self.input_proj = nn.Linear(2 * size, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(settings.layers))
        self.output = nn.Linear(width, target.vocab_size, bias=False)
        self.to(target.device)
        self._target = target
        self.vocabulary = vocabulary
        self._embedding = _weight(target.embedding).float()
        self._begin(_weight(target.lm_head).float())

    @torch.no_grad()
    def _begin(self, lm_head: Tensor) -> None:
        size, width = self._target.hidden_size, self.settings.exit_dim
        main = principal_directions(lm_head, min(width, size))
        self.input_proj.weight.mul_(0.1)
        self.input_proj.weight[: main.shape[1], :size] = main.T
        self.input_proj.bias.zero_()
        self.output.weight.zero_()
        self.output.weight[:, : main.shape[1]] = lm_head @ main
        for parameter in self.blocks.parameters():
            parameter.zero_()

    def judge(self, pack: Pack, generator: torch.Generator | None) -> Judged:
        depths, loss = self.settings.depths, pack.hidden.new_zeros(())
        hits, rows = no_hits(depths, pack.hidden.device)
        ids = self.vocabulary.ids
        output = Output(self.output.weight if ids is None else self.output.weight[ids])
        sample = None if generator is None else HITS_SAMPLE
        state = torch.zeros_like(pack.hidden)
        for d in range(1, depths + 1):
            fed = embedding(pack.tokens.roll(-d), self._embedding)
            state = silu(self.rnn_w(fed) + self.rnn_u(state))
            found = pack.ahead(1 + d)
            at = fill_up(found)
            x = self.input_proj(torch.cat([pack.hidden[at], state[at]], dim=-1))
            for block in self.blocks:
                x = x + silu(block(x))
            wanted = self.vocabulary.place(pack.tokens[at + 1 + d])
            lesson = Lesson(x, output, pack.likely[at + d], wanted, len(found))
            one, hits[d - 1], rows[d - 1] = lesson.judge(sample=sample)
            share = self.settings.depth_decay ** (d - 1) / max(1, len(found))
            loss = loss + share * one
        return Judged(loss, hits, rows)

    def _named(self) -> dict[str, nn.Parameter]:
        """Parameters under the names that Apple's layout has for them.

        With `input_proj` only where exit_dim differs from twice the hidden size.
        """
        settings = self.settings
        named: dict[str, nn.Module] = {"rnn_w": self.rnn_w, "rnn_u": self.rnn_u}
        if settings.exit_dim != 2 * self._target.hidden_size:
            named["input_proj"] = self.input_proj
        named |= {f"lm_head.{i}.linear": block for i, block in enumerate(self.blocks)}
        named[f"lm_head.{settings.layers}"] = self.output
        return {
            f"{name}.{part}": value
            for name, module in named.items()
            for part, value in module.named_parameters()
        }

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        found = read_checkpoint(str(folder))
        for name, value in self._named().items():
            value.copy_(found.tensor(name, *value.shape))

    def save(self, folder: Path, dtype: torch.dtype) -> None:
        settings, size = self.settings, self._target.hidden_size
        tensors = {
            name: value.detach().to("cpu", dtype).contiguous()
            for name, value in self._named().items()
        }
        if self.vocabulary.ids is not None:
            # Nothing was learnt of the other tokens: a score of 0 keeps them out of every beam.
            others = torch.ones(self._target.vocab_size, dtype=torch.bool)
            others[self.vocabulary.ids.cpu()] = False
            tensors[f"lm_head.{settings.layers}.weight"][others] = 0
        config = {
            "model_type": "recurrent_drafting_drafter",
            "architectures": ["Drafter"],
            "vocab_size": self._target.vocab_size,
            "hidden_size": size,
            "exit_dim": settings.exit_dim,
            "num_draft_layers": settings.layers,
            "num_lookback_tokens": -1,
            "rnn": True,
        }
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")

    def describe(self) -> Mapping[str, Any]:
        return {"exit width": self.settings.exit_dim, "residual blocks": self.settings.layers}


def _weight(module: nn.Module) -> Tensor:
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight.detach()


def principal_directions(matrix: Tensor, count: int) -> Tensor:
    """`(columns, count)` orthonormal directions that keep most of a `(rows, columns)` matrix."""
    gram = matrix.double().T @ matrix.double()
    vectors: Tensor = torch.linalg.eigh(gram).eigenvectors
    return vectors[:, -count:].flip(-1).to(matrix.dtype)
