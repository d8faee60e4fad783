"""Settings of a training run: what all methods have in common; each method's own are beside it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from pydantic import Field
from torch import Tensor

from engine.config import Settings
from engine.drafters.method import MethodConfig
from engine.model.corpus import Corpus, Entry
from engine.model.target import Target
from engine.training import optimizers
from engine.training.packs import frequent_tokens
from engine.training.student import Student, Vocabulary


class TrainSettings(Settings):
    """How a drafter is trained."""

    method: ClassVar[str]
    """Name on the command line."""
    paper: ClassVar[str]

    seed: int = Field(0, ge=0, le=2**31 - 1, description="seed of order, noise and first weights")
    epochs: float = Field(2.0, gt=0.0, le=1000.0, description="how often the corpus is read")
    pack_tokens: int = Field(
        1024, ge=16, le=1 << 17, description="tokens per forward; more needs more memory"
    )
    packs_per_step: int = Field(2, ge=1, le=1024, description="packs per optimizer step")
    optimizer: optimizers.Name = Field(
        "adamw", description="adamw, or muon for the matrices between hidden vectors"
    )
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
    half_weights: bool = Field(True, description="store bfloat16 weights; off = float32")

    @abstractmethod
    def student(self, target: Target, corpus: Corpus, entries: Sequence[Entry]) -> Student:
        """A fresh drafter for the target; its first weights follow from the seed."""

    @abstractmethod
    def decoding(self, folder: Path, rates: Sequence[Sequence[float]]) -> MethodConfig:
        """The method's settings that decode with what was saved in a folder.

        Args:
            rates: per depth, how often each rank was right (`Judged.rates`).
        """

    def vocabulary(self, target: Target, corpus: Corpus, entries: Sequence[Entry]) -> Vocabulary:
        """The tokens that the loss is computed over."""
        if self.loss_vocab is None or self.loss_vocab >= target.vocab_size:
            return Vocabulary(None, target.vocab_size)
        ids: Tensor = frequent_tokens(corpus, entries, self.loss_vocab, target.vocab_size)
        return Vocabulary(ids.to(target.device), target.vocab_size)
