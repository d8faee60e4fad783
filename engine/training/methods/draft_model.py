"""Trains a small language model to draft: distilled from the target, with its tokenizer.

The embedding is initialised to the target's, projected onto its principal directions, and tied to
the output. Every row of a text learns the target's distribution (arXiv:2211.17192 leaves open where
the draft model comes from; the recipe is plain distillation, arXiv:1503.02531).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from pydantic import model_validator
from torch import Tensor

from engine.config import setting
from engine.drafters.draft_target import DraftTargetConfig
from engine.drafters.heads.vocabulary import Vocabulary
from engine.model.corpus import Entry
from engine.model.forward import block_causal
from engine.model.packed import weight_of
from engine.model.target import Target
from engine.training.losses import LMHead, Prediction, pad_rows
from engine.training.packs import Pack
from engine.training.recipe import Student, TrainSettings, principal_directions

NUM_OTHERS = 2048
"""Tokens sampled per pack in addition to the loss's vocabulary."""
DRAFT_LEN = 5
"""Tokens drafted per step when a model is evaluated."""


class DraftModelTraining(TrainSettings):
    """A small Llama."""

    method: ClassVar[str] = "draft_target"
    paper: ClassVar[str] = "2211.17192, 1503.02531"

    hidden_size: int = setting(96, "Hidden size", "width of the model", ge=8, le=8192)
    layers: int = setting(4, "Layers", "decoder layers", ge=1, le=64)
    heads: int = setting(
        4, "Attention heads", "number of attention heads; it divides the hidden size", ge=1, le=128
    )
    intermediate_size: int = setting(384, "MLP size", "width of the MLP", ge=8, le=1 << 16)

    @model_validator(mode="after")
    def _fits(self) -> DraftModelTraining:
        if self.hidden_size % (2 * self.heads):
            raise ValueError(
                f"hidden_size must be a multiple of twice the {self.heads} heads, "
                f"got {self.hidden_size}"
            )
        if self.weights_dtype == "int8":
            raise ValueError("weights_dtype must be float32 or bfloat16, which any loader reads")
        return self

    def student(self, target: Target, entries: Sequence[Entry]) -> Student:
        return DraftModelStudent(self, target, self.vocabulary(target, entries))

    def decoding(self, folder: Path, rates: Sequence[Sequence[float]]) -> DraftTargetConfig:
        return DraftTargetConfig(speculative_model=str(folder.resolve()), max_draft_len=DRAFT_LEN)


class DraftModelStudent(Student):
    """A small Llama with tied embedding, in float32 during training."""

    settings: DraftModelTraining

    def __init__(
        self, settings: DraftModelTraining, target: Target, vocabulary: Vocabulary
    ) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM  # takes seconds: not at import

        super().__init__(settings, target, vocabulary, depths=1)
        eos = sorted(target.eos_ids)
        rope = getattr(target.config, "rope_parameters", None) or {}
        config = LlamaConfig(
            vocab_size=target.vocab_size,
            hidden_size=settings.hidden_size,
            intermediate_size=settings.intermediate_size,
            num_hidden_layers=settings.layers,
            num_attention_heads=settings.heads,
            num_key_value_heads=settings.heads,
            max_position_embeddings=target.context_len,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": float(rope.get("rope_theta") or 10000.0),
            },
            tie_word_embeddings=True,
            bos_token_id=getattr(target.config, "bos_token_id", None),
            eos_token_id=eos[0] if len(eos) == 1 else eos or None,
            pad_token_id=None,
        )
        config._attn_implementation = "sdpa"
        self.model = LlamaForCausalLM(config)
        self.to(target.device)
        self.model.tie_weights()  # moving to some devices unties them
        self._init_weights()

    @torch.no_grad()
    def _init_weights(self) -> None:
        own, source = self._embedding, weight_of(self.target.embedding).float()
        source = source[: len(own)]  # Inkling 2 embeds more tokens than it has logits
        width = min(own.shape[1], source.shape[1])
        own.zero_()
        own[:, :width] = source @ principal_directions(source, width)

    @property
    def _embedding(self) -> Tensor:
        """The tied matrix of embedding and output."""
        weight = self.model.get_output_embeddings().weight
        assert isinstance(weight, Tensor)
        return weight

    def predictions(self, pack: Pack, generator: torch.Generator | None) -> Iterator[Prediction]:
        ids = self.vocabulary.ids
        if ids is not None and generator is not None:
            # The matrix is tied: some tokens outside the vocabulary must learn to be improbable.
            others = torch.randint(self.target.vocab_size, (NUM_OTHERS,), generator=generator)
            others = others.to(ids.device)
            ids = torch.cat([ids, others[self.vocabulary.index(others) < 0].unique()])
        out: Tensor = self.model.model(
            input_ids=pack.tokens[None],
            position_ids=pack.positions[None],
            attention_mask=block_causal(pack.positions, pack.segments)[None, None],
            use_cache=False,
        ).last_hidden_state[0]
        rows = pack.rows_before(1)
        at = pad_rows(rows)
        head = LMHead(self._embedding if ids is None else self._embedding[ids])
        yield self.prediction(pack, at, 1, out[at], head, num_rows=len(rows))

    def published(self) -> Mapping[str, Tensor]:
        return dict(self.model.named_parameters())

    def config(self) -> dict[str, Any]:
        return dict(self.model.config.to_dict())

    def save(self, folder: Path, dtype: str) -> None:
        """transformers' own layout, with the target's tokenizer."""
        stored = copy.deepcopy(self.model).to(getattr(torch, dtype))
        stored.config.dtype = getattr(torch, dtype)
        stored.save_pretrained(folder)
        if self.target.tokenizer is not None:
            self.target.tokenizer.save_pretrained(folder)
        self.save_vocabulary(folder)
