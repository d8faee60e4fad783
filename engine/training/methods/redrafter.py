"""Trains a ReDrafter head by distillation from the target's distributions.

Row t is a context; the recurrence reads the tokens t + 1 … t + d, and its prediction of token
t + 1 + d learns the target's distribution at row t + d. Source: arXiv:2403.09919, section 3.4.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from engine.config import PositiveUnitFloat, setting
from engine.drafters.heads.checkpoint import published_tensors
from engine.drafters.heads.redrafter import ReDrafterConfig
from engine.drafters.heads.vocabulary import Vocabulary
from engine.model.corpus import Entry
from engine.model.logits import LogitTransform
from engine.model.packed import weight_of
from engine.model.target import Target
from engine.training.losses import LMHead, Prediction, pad_rows
from engine.training.packs import Pack
from engine.training.recipe import Student, TrainSettings, principal_directions


class ReDrafterTraining(TrainSettings):
    """Apple's recurrent head, kept small by a narrow projection before the output."""

    method: ClassVar[str] = "redrafter"
    paper: ClassVar[str] = "2403.09919"

    depths: int = setting(5, "Unrolled depths", "tokens drafted ahead in training", ge=1, le=16)
    layers: int = setting(2, "Residual blocks", "number of residual blocks", ge=0, le=8)
    exit_dim: int = setting(
        64,
        "Output width",
        "width before the output matrix (vocabulary × exit_dim)",
        ge=2,
        le=1 << 15,
    )
    depth_decay: PositiveUnitFloat = setting(
        0.9, "Loss decay", "weight of a depth's loss relative to the one before it"
    )

    def student(self, target: Target, entries: Sequence[Entry]) -> Student:
        return ReDrafterStudent(self, target, self.vocabulary(target, entries))

    def decoding(self, folder: Path, rates: Sequence[Sequence[float]]) -> ReDrafterConfig:
        return ReDrafterConfig(speculative_model=str(folder))


class ReDrafterStudent(Student):
    """The recurrence, the exit projection, residual blocks and an output matrix of its own.

    The output matrix is initialised to the target's `lm_head`, approximated at that width.
    """

    settings: ReDrafterTraining

    def __init__(self, settings: ReDrafterTraining, target: Target, vocabulary: Vocabulary) -> None:
        super().__init__(settings, target, vocabulary, settings.depths)
        size, width = target.hidden_size, settings.exit_dim
        self.rnn_w = nn.Linear(size, size, bias=False)
        self.rnn_u = nn.Linear(size, size)
        # Apple's layout has none where it would be square.
        self.input_proj = nn.Linear(2 * size, width) if width != 2 * size else nn.Identity()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(settings.layers))
        self.output = nn.Linear(width, target.vocab_size, bias=False)
        self.aliases = {f"blocks.{i}": f"lm_head.{i}.linear" for i in range(settings.layers)}
        self.aliases["output"] = f"lm_head.{settings.layers}"
        self.to(target.device)
        factor = LogitTransform.of(target.config).factor
        self._init_weights(factor * weight_of(target.lm_head).float())

    @torch.no_grad()
    def _init_weights(self, lm_head: Tensor) -> None:
        size, width = self.target.hidden_size, self.settings.exit_dim
        main = torch.eye(size, device=lm_head.device)
        if isinstance(self.input_proj, nn.Linear):
            main = principal_directions(lm_head, min(width, size))
            self.input_proj.weight.mul_(0.1)
            self.input_proj.weight[: main.shape[1], :size] = main.T
            self.input_proj.bias.zero_()
        self.output.weight.zero_()
        self.output.weight[:, : main.shape[1]] = lm_head @ main
        for parameter in self.blocks.parameters():
            parameter.zero_()

    def predictions(self, pack: Pack, generator: torch.Generator | None) -> Iterator[Prediction]:
        ids = self.vocabulary.ids
        head = LMHead(self.output.weight if ids is None else self.output.weight[ids])
        state = torch.zeros_like(pack.hidden)
        for depth in range(1, self.depths + 1):
            inputs = self.target.embedding(pack.tokens.roll(-depth)).detach().float()
            state = silu(self.rnn_w(inputs) + self.rnn_u(state))
            rows = pack.rows_before(1 + depth)
            at = pad_rows(rows)
            x = self.input_proj(torch.cat([pack.hidden[at], state[at]], dim=-1))
            for block in self.blocks:
                x = x + silu(block(x))
            yield self.prediction(pack, at, 1 + depth, x, head, num_rows=len(rows))

    def published(self) -> Mapping[str, Tensor]:
        """Apple's layout."""
        return published_tensors(self)

    def export_weights(self, dtype: torch.dtype) -> dict[str, Tensor]:
        tensors = super().export_weights(dtype)
        if self.vocabulary.ids is not None:
            # The mean of the trained tokens' logits keeps the others out of every beam, whatever
            # the sign of the logits, also in engines that do not read the list of tokens.
            weight = tensors[f"lm_head.{self.settings.layers}.weight"]
            trained = self.vocabulary.ids.cpu()
            rows = weight[trained]
            weight[:] = rows.float().mean(dim=0)
            weight[trained] = rows
        return tensors

    def config(self) -> dict[str, Any]:
        return {
            "model_type": "recurrent_drafting_drafter",
            "architectures": ["Drafter"],
            "vocab_size": self.target.vocab_size,
            "hidden_size": self.target.hidden_size,
            "exit_dim": self.settings.exit_dim,
            "num_draft_layers": self.settings.layers,
            "num_lookback_tokens": -1,
            "rnn": True,
        }
