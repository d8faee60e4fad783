"""The interface of a trainable method: its settings, and a student with a loss on packs."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from safetensors.torch import save_file
from torch import Tensor, nn

from engine.config import Settings
from engine.drafters.heads.vocabulary import FILE, Vocabulary
from engine.drafters.method import MethodConfig
from engine.model.checkpoints import EIGHT_BITS, quantize, read_checkpoint
from engine.model.corpus import Entry
from engine.model.target import Target
from engine.proposal import Needs
from engine.training.losses import NUM_RANKS, LMHead, LossOutput, Prediction
from engine.training.packs import Pack, frequent_tokens

HITS_SAMPLE = 64
"""Rows per pack and depth whose hits are counted while training."""


class TrainSettings(Settings):
    """Training settings that all methods have."""

    method: ClassVar[str]
    """Name on the command line."""
    paper: ClassVar[str]

    seed: int = Field(0, ge=0, le=2**31 - 1, description="seed of order, noise and first weights")
    epochs: float = Field(2.0, gt=0.0, le=1000.0, description="number of passes over the corpus")
    pack_tokens: int = Field(
        1024, ge=16, le=1 << 17, description="tokens per forward; more needs more memory"
    )
    packs_per_step: int = Field(2, ge=1, le=1024, description="packs per optimizer step")
    learning_rate: float = Field(1e-3, gt=0.0, le=1.0, description="its highest rate")
    warmup_share: float = Field(0.04, ge=0.0, le=0.9, description="share of steps of rising rate")
    final_rate_share: float = Field(
        0.05, ge=0.0, le=1.0, description="rate at the end of the cosine, relative to the peak"
    )
    weight_decay: float = Field(0.01, ge=0.0, le=1.0, description="weight decay")
    clip: float = Field(1.0, gt=0.0, le=1e6, description="longest gradient, by its norm")
    ema: float = Field(
        0.0, ge=0.0, lt=1.0, description="decay of the running mean of weights; 0 = none is kept"
    )
    answers_only: bool = Field(True, description="learn from the target's answers only")
    loss_vocab: int | None = Field(
        None, ge=16, le=1 << 20, description="compute the loss over the most used tokens; None: all"
    )
    begin_with: str | None = Field(
        None,
        description="a trained drafter of this method and target to go on from: its folder; "
        "None = fresh weights",
    )
    weights_dtype: Literal["float32", "bfloat16", "int8"] = Field(
        "bfloat16",
        description="of the weights as stored, which are trained in float32; int8 has a scale per "
        "row of a matrix",
    )

    @abstractmethod
    def student(self, target: Target, entries: Sequence[Entry]) -> Student:
        """A new drafter for the target; its initial weights follow from the seed."""

    @abstractmethod
    def decoding(self, folder: Path, rates: Sequence[Sequence[float]]) -> MethodConfig:
        """The method's settings for decoding with the weights saved in a folder.

        Args:
            rates: per depth, how often each rank was right.
        """

    def vocabulary(self, target: Target, entries: Sequence[Entry]) -> Vocabulary:
        """The tokens that the loss is computed over."""
        if self.loss_vocab is None or self.loss_vocab >= target.vocab_size:
            return Vocabulary(None, target.vocab_size)
        ids = frequent_tokens(entries, self.loss_vocab, target.vocab_size)
        return Vocabulary(ids.to(target.device), target.vocab_size)


class Student(nn.Module):
    """A drafter that can be trained; saved in the layout of published ones.

    Attributes:
        needs: features of the target that `predictions` reads.
        depth_decay: weight of a depth's loss relative to the one before it.
        weights_file: name of the file that `save` writes weights to.
        drafts_vocabulary: whether it drafts only the tokens of its loss.
    """

    needs = Needs()
    weights_file = "model.safetensors"
    drafts_vocabulary = False

    def __init__(
        self, settings: TrainSettings, target: Target, vocabulary: Vocabulary, depths: int
    ) -> None:
        super().__init__()
        self.settings, self.target, self.vocabulary = settings, target, vocabulary
        self.depths = depths
        self.depth_decay: float = getattr(settings, "depth_decay", 1.0)

    def compute_loss(self, pack: Pack, generator: torch.Generator | None) -> LossOutput:
        """Loss and hits on a pack.

        Args:
            pack: with the features of `needs`, over `vocabulary`.
            generator: source of training noise; None when evaluating, on all rows.
        """
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
            loss = loss + self.depth_decay**depth * depth_loss
        return LossOutput(loss, hits, rows)

    @abstractmethod
    def predictions(self, pack: Pack, generator: torch.Generator | None) -> Iterator[Prediction]:
        """The predictions for a pack, depth by depth."""

    def predicted(
        self, pack: Pack, at: Tensor, ahead: int, hidden: Tensor, head: LMHead, *, num_rows: int
    ) -> Prediction:
        """`hidden` predicts, for the rows `at`, the tokens `ahead` positions further."""
        labels = self.vocabulary.index(pack.tokens[at + ahead])
        return Prediction(hidden, head, pack.teacher[at + ahead - 1], labels, num_rows)

    @abstractmethod
    def published(self) -> Mapping[str, Tensor]:
        """Weights under their published names; writing to them changes the student."""

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """The contents of `config.json`."""

    @abstractmethod
    def describe(self) -> Mapping[str, Any]:
        """The network's description on the training card."""

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Load the weights that `save` wrote there.

        Raises DrafterError, SourceError: there are none, or they have another shape.
        """
        checkpoint = read_checkpoint(str(folder))
        for name, value in self.published().items():
            value.copy_(checkpoint.tensor(name, *value.shape))

    def stored(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Copies of the weights in the dtype of the file."""
        return {
            name: value.detach().to("cpu", dtype).contiguous().clone()
            for name, value in self.published().items()
        }

    def save(self, folder: Path, dtype: str) -> None:
        """Write weights, config and vocabulary; `dtype`: as `TrainSettings.weights_dtype`."""
        if dtype == "int8":
            tensors = quantize(self.stored(torch.float32))
            config = {"torch_dtype": "bfloat16", "quantization_config": EIGHT_BITS}
        else:
            tensors, config = self.stored(getattr(torch, dtype)), {"torch_dtype": dtype}
        save_file(tensors, folder / self.weights_file, metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(self.config() | config, indent=2) + "\n")
        self.save_vocabulary(folder)

    def save_vocabulary(self, folder: Path) -> None:
        """List the tokens that it drafts beside its weights, unless it drafts all."""
        if self.drafts_vocabulary and self.vocabulary.ids is not None:
            ids = json.dumps(self.vocabulary.ids.tolist(), separators=(",", ":"))
            (folder / FILE).write_text(ids + "\n")


def principal_directions(matrix: Tensor, count: int) -> Tensor:
    """`(columns, count)` orthonormal directions that keep most of a `(rows, columns)` matrix."""
    gram = matrix.double().T @ matrix.double()
    vectors: Tensor = torch.linalg.eigh(gram).eigenvectors
    return vectors[:, -count:].flip(-1).to(matrix.dtype)
