"""The interface of a trainable method: its settings, and a student with a loss on packs."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from engine.config import PositiveUnitFloat, Settings, UnitFloat, setting
from engine.drafters.heads.vocabulary import FILE, Vocabulary
from engine.drafters.method import MethodConfig
from engine.model.checkpoints import INT8_QUANTIZATION, quantize, read_checkpoint
from engine.model.corpus import Entry
from engine.model.target import Target
from engine.sampling import widest_float
from engine.training.losses import NUM_RANKS, LMHead, LossOutput, Prediction
from engine.training.packs import Pack, frequent_tokens

HITS_SAMPLE = 64
"""Rows per pack and depth whose ranks are counted during training."""


class TrainSettings(Settings):
    """Training settings that all methods have."""

    method: ClassVar[str]
    """Name on the command line."""
    paper: ClassVar[str]

    seed: int = setting(
        0, "Seed", "seed of data order, noise and initial weights", ge=0, le=2**31 - 1
    )
    epochs: float = setting(2.0, "Epochs", "number of passes over the corpus", gt=0.0, le=1000.0)
    pack_tokens: int = setting(
        1024, "Tokens per forward", "tokens per forward; more needs more memory", ge=16, le=1 << 17
    )
    packs_per_step: int = setting(
        2, "Forwards per step", "packs of that many tokens per optimizer step", ge=1, le=1024
    )
    learning_rate: PositiveUnitFloat = setting(
        1e-3, "Peak learning rate", "highest learning rate, reached after the warm-up"
    )
    weight_decay: UnitFloat = setting(0.01, "Weight decay", "AdamW's weight decay")
    ema: float = setting(
        0.0,
        "Weight averaging",
        "decay of the exponential moving average of the weights; 0 = no average",
        ge=0.0,
        lt=1.0,
    )
    loss_vocab: int | None = setting(
        None,
        "Loss vocabulary",
        "number of most frequent tokens that the loss covers; None = all",
        ge=16,
        le=1 << 20,
    )
    begin_with: str | None = setting(
        None,
        "Initial weights",
        "folder of a trained drafter of this method and target; None = random weights",
    )
    weights_dtype: Literal["float32", "bfloat16", "int8"] = setting(
        "bfloat16",
        "Stored weights",
        "dtype of the saved weights, which are trained in float32; int8 has a scale per matrix row",
    )

    @abstractmethod
    def student(self, target: Target, entries: Sequence[Entry]) -> Student:
        """A new drafter for the target; its initial weights are determined by the seed."""

    @abstractmethod
    def decoding(self, folder: Path, rates: Sequence[Sequence[float]]) -> MethodConfig:
        """The method's settings for decoding with the weights saved in a folder.

        Args:
            rates: per depth, the share of rows whose label has each rank.
        """

    def vocabulary(self, target: Target, entries: Sequence[Entry]) -> Vocabulary:
        """The tokens over which the loss is computed."""
        if self.loss_vocab is None or self.loss_vocab >= target.vocab_size:
            return Vocabulary(None, target.vocab_size)
        ids = frequent_tokens(entries, self.loss_vocab, target.vocab_size)
        return Vocabulary(ids.to(target.device), target.vocab_size)


class Student(nn.Module):
    """A drafter in training; saved in the layout of published ones.

    Attributes:
        target_layers: layers of the target whose inputs `predictions` reads.
        weights_file: name of the file of weights.
        drafts_vocabulary: whether it drafts only the tokens of its loss.
    """

    target_layers: tuple[int, ...] = ()
    weights_file = "model.safetensors"
    drafts_vocabulary = True

    def __init__(
        self, settings: TrainSettings, target: Target, vocabulary: Vocabulary, depths: int
    ) -> None:
        super().__init__()
        self.settings, self.target, self.vocabulary = settings, target, vocabulary
        self.depths = depths

    def compute_loss(self, pack: Pack, generator: torch.Generator | None) -> LossOutput:
        """Loss and hits on a pack.

        Args:
            pack: with the inputs of `target_layers`, over `vocabulary`.
            generator: source of training noise; None = evaluation, which counts all rows.
        """
        decay: float = getattr(self.settings, "depth_decay", 1.0)
        loss, device = pack.hidden.new_zeros(()), pack.hidden.device
        hits = torch.zeros(self.depths, NUM_RANKS, device=device)
        rows = torch.zeros(self.depths, device=device)
        for depth, prediction in enumerate(self.predictions(pack, generator)):
            count = prediction.num_rows
            sample = count if generator is None else min(HITS_SAMPLE, count)
            hits[depth], rows[depth] = prediction.rank_hits(sample), sample
            mean = prediction.loss() / max(1, count)
            depth_loss = prediction.weight * mean
            if prediction.auxiliary is not None:
                depth_loss = depth_loss + prediction.auxiliary
            loss = loss + decay**depth * depth_loss
        return LossOutput(loss, hits, rows)

    @abstractmethod
    def predictions(self, pack: Pack, generator: torch.Generator | None) -> Iterator[Prediction]:
        """The predictions for a pack, depth by depth."""

    def prediction(
        self, pack: Pack, at: Tensor, ahead: int, hidden: Tensor, head: LMHead, *, num_rows: int
    ) -> Prediction:
        """The prediction of the tokens `ahead` positions after the rows `at`."""
        labels = self.vocabulary.index(pack.tokens[at + ahead])
        return Prediction(hidden, head, pack.teacher[at + ahead - 1], labels, num_rows)

    @abstractmethod
    def published(self) -> Mapping[str, Tensor]:
        """Weights under their published names, not copied."""

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """The contents of `config.json`."""

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Load weights that `save` wrote.

        Raises DrafterError, SourceError: there are none, or they have other shapes.
        """
        checkpoint = read_checkpoint(str(folder))
        for name, value in self.published().items():
            value.copy_(checkpoint.tensor(name, *value.shape))

    def export_weights(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Copies of the weights on the CPU, in the dtype of the file."""
        return {
            name: value.detach().to("cpu", dtype).contiguous().clone()
            for name, value in self.published().items()
        }

    def save(self, folder: Path, dtype: str) -> None:
        """Write weights, config and vocabulary; `dtype`: as `TrainSettings.weights_dtype`."""
        if dtype == "int8":
            tensors = quantize(self.export_weights(torch.float32))
            config = {"torch_dtype": "bfloat16", "quantization_config": INT8_QUANTIZATION}
        else:
            tensors, config = self.export_weights(getattr(torch, dtype)), {"torch_dtype": dtype}
        save_file(tensors, folder / self.weights_file, metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(self.config() | config, indent=2) + "\n")
        self.save_vocabulary(folder)

    def save_vocabulary(self, folder: Path) -> None:
        """Write the list of tokens that it drafts beside its weights, unless it drafts all."""
        if self.drafts_vocabulary and self.vocabulary.ids is not None:
            ids = json.dumps(self.vocabulary.ids.tolist(), separators=(",", ":"))
            (folder / FILE).write_text(ids + "\n")


def principal_directions(matrix: Tensor, count: int) -> Tensor:
    """The first `count` right singular vectors `(columns, count)` of a `(rows, columns)` matrix."""
    wide = matrix.to(widest_float(matrix.device))
    vectors: Tensor = torch.linalg.eigh(wide.T @ wide).eigenvectors
    return vectors[:, -count:].flip(-1).to(matrix.dtype)
