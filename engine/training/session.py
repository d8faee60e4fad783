"""A training session: train on a corpus, measure now and then, publish."""

from __future__ import annotations

import sys
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from engine.config import Settings
from engine.model.corpus import Corpus
from engine.model.target import Target
from engine.training.corpus.dialogues import GivenPrompt
from engine.training.evaluation import Score, evaluate, given_questions, held_out_questions
from engine.training.optimization import keep_freed_memory
from engine.training.packs import FeatureStore
from engine.training.recipe import TrainSettings
from engine.training.trainer import Trainer, TrainMetrics

EVAL_PROMPTS = 4
"""Held-out prompts per category to measure MAT on."""
EVAL_TOKENS = 128
"""New tokens per prompt then."""


class SessionSettings(Settings):
    """What a session does besides training itself."""

    feature_gib: float = Field(
        0.0, ge=0.0, le=1e5, description="disk for the target's features, computed once; 0 = none"
    )
    evals: int = Field(
        1, ge=1, le=100, description="how often MAT is measured, evenly over the run"
    )


@dataclass(frozen=True, slots=True)
class Evaluation:
    """MAT on held-out prompts; weights and card are in the output folder."""

    step: int
    scores: dict[str, Score]


def train(
    target: Target,
    corpus: Corpus,
    output: Path,
    recipe: TrainSettings,
    settings: SessionSettings,
    *,
    cache_dir: Path,
    eval_prompts: Sequence[GivenPrompt] = (),
) -> Generator[TrainMetrics | Evaluation]:
    """Train one drafter into `output`, or go on with the run that is there.

    Raises:
        ConfigError: the corpus does not fit, or the run in `output` has other settings.
    """
    if target.device.type == "cpu" and sys.platform == "linux":
        keep_freed_memory()
    room = int(settings.feature_gib * 2**30)
    store = FeatureStore(corpus.folder / "features", room) if room else None
    trainer = Trainer(target, corpus, recipe, output / "training", store=store)
    questions = given_questions(target, eval_prompts) or held_out_questions(
        corpus, trainer.held_out, EVAL_PROMPTS, EVAL_TOKENS
    )
    marks = {round(trainer.num_steps * (i + 1) / settings.evals) for i in range(settings.evals)}
    how: dict[str, Any] = {"cache_dir": cache_dir, "max_new_tokens": EVAL_TOKENS}
    steps = trainer.steps(stops=marks)
    # Closed at once when this is: that is when a run that is broken off is saved.
    with closing(trainer), closing(steps):
        for metrics in steps:
            yield metrics
            if metrics.step in marks and metrics.step < trainer.num_steps:
                yield Evaluation(trainer.step, evaluate(trainer, output, questions, **how))
        yield Evaluation(trainer.step, evaluate(trainer, output, questions, **how))
