"""A whole training session: make the corpus, train, measure now and then, publish."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import Field

from engine.config import Settings
from engine.model.corpus import Corpus
from engine.model.loading import free_bytes
from engine.model.target import Target
from engine.training.corpus import CorpusSettings, grow
from engine.training.dialogue import GivenPrompt
from engine.training.evaluation import Question, Score, given_questions, held_out_questions
from engine.training.memory import keep_freed_memory
from engine.training.packs import FeatureStore
from engine.training.publish import evaluate
from engine.training.recipe import TrainSettings
from engine.training.trainer import Progress, Trainer


class SessionSettings(Settings):
    """What a session does besides training itself."""

    num_tokens: int = Field(
        1_000_000, ge=1, le=10**11, description="tokens of corpus to train on, prompts included"
    )
    rows: int | None = Field(
        None, ge=1, le=4096, description="dialogues written at a time; None = as memory allows"
    )
    feature_gib: float = Field(
        0.0, ge=0.0, le=1e5, description="disk for the target's features, computed once; 0 = none"
    )
    eval_prompts: int = Field(
        4, ge=1, le=1000, description="held-out prompts per category to measure MAT on"
    )
    eval_tokens: int = Field(128, ge=2, le=8192, description="new tokens per prompt then")
    evals: int = Field(
        1, ge=1, le=100, description="how often MAT is measured, evenly over the run"
    )
    report_every: int = Field(20, ge=1, le=10**6, description="optimizer steps between reports")


@dataclass(frozen=True, slots=True)
class CorpusGrew:
    """The corpus has so many tokens by now."""

    num_tokens: int
    goal: int


@dataclass(frozen=True, slots=True)
class Trained:
    """Another report of the training loop."""

    progress: Progress


@dataclass(frozen=True, slots=True)
class Evaluated:
    """MAT was measured on held-out prompts; weights and card are in the output folder."""

    step: int
    scores: dict[str, Score]


Event = CorpusGrew | Trained | Evaluated


def make_corpus(
    target: Target,
    folder: Path,
    corpus: CorpusSettings,
    settings: SessionSettings,
    prompts: Sequence[GivenPrompt] = (),
) -> Iterator[CorpusGrew]:
    """Grow the corpus to its size.

    Raises:
        ConfigError, PromptError: it is another target's, or the target cannot be asked.
    """
    rows = settings.rows or default_rows(target, corpus.max_len)
    grown = grow(
        target, folder, corpus, num_tokens=settings.num_tokens, rows=rows, prompts=list(prompts)
    )
    for known in grown:
        yield CorpusGrew(known.num_tokens, settings.num_tokens)


def default_rows(target: Target, max_len: int) -> int:
    """Dialogues to write at a time: many on CUDA, as far as half of the free memory goes."""
    most = 512 if target.device.type == "cuda" else 64
    free, config = free_bytes(target.device), target.config
    if free is None:
        return most
    heads = int(config.num_attention_heads)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    head_dim = int(getattr(config, "head_dim", None) or target.hidden_size // heads)
    row = 2 * target.num_layers * kv_heads * head_dim * max_len * target.dtype.itemsize
    return max(1, min(most, free // 2 // row))


def train(
    target: Target,
    corpus: Corpus,
    output: Path,
    recipe: TrainSettings,
    settings: SessionSettings,
    *,
    cache_dir: Path,
    eval_prompts: Sequence[GivenPrompt] = (),
    evaluating: Callable[[int, int], None] = lambda done, total: None,
) -> Generator[Trained | Evaluated]:
    """Train one drafter into `output`, or go on with the run that is there.

    Raises:
        ConfigError: the corpus does not fit, or the run in `output` has other settings.
    """
    if target.device.type == "cpu" and sys.platform == "linux":
        keep_freed_memory()
    store = None
    if settings.feature_gib:
        store = FeatureStore(corpus.folder / "features", int(settings.feature_gib * 2**30))
    trainer = Trainer(target, corpus, recipe, output / "training", store=store)
    questions: list[Question] = given_questions(target, eval_prompts) or held_out_questions(
        corpus, trainer.held_out, settings.eval_prompts, settings.eval_tokens
    )
    marks = {round(trainer.num_steps * (i + 1) / settings.evals) for i in range(settings.evals)}

    def measured() -> Evaluated:
        scores = evaluate(
            trainer,
            output,
            questions,
            dtype=torch.bfloat16 if recipe.half_weights else torch.float32,
            cache_dir=cache_dir,
            max_new_tokens=settings.eval_tokens,
            progress=lambda done: evaluating(done, len(questions)),
        )
        return Evaluated(trainer.step, scores)

    steps = trainer.steps(report_every=settings.report_every, stops=marks)
    # Closed at once when this is: that is when a run that is broken off is saved.
    with closing(trainer), closing(steps):
        for progress in steps:
            yield Trained(progress)
            if progress.step in marks and progress.step < trainer.num_steps:
                yield measured()
        yield measured()
