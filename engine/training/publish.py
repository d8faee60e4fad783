"""Finishes a training run: weights in the public layout, measured, with their card."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from engine.training.card import card, write_card
from engine.training.evaluation import Question, Score, score
from engine.training.trainer import Trainer, held_out_rates


def save_weights(trainer: Trainer, folder: Path, dtype: torch.dtype) -> None:
    """Write config and weights; each file replaces its predecessor whole."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix="partial-") as partial:
        with trainer.averaged() as student:
            student.save(Path(partial), dtype)
        for file in sorted(Path(partial).iterdir()):
            os.replace(file, folder / file.name)


def evaluate(
    trainer: Trainer,
    folder: Path,
    questions: Sequence[Question],
    *,
    dtype: torch.dtype,
    cache_dir: Path,
    max_new_tokens: int = 128,
    progress: Callable[[int], None] = lambda done: None,
) -> dict[str, Score]:
    """Save the weights as they are now, decode the questions with them, and write the card."""
    save_weights(trainer, folder, dtype)
    with trainer.averaged():
        rates = held_out_rates(trainer)
    config = trainer.settings.decoding(folder, rates)
    scores = score(
        trainer.target,
        config,
        questions,
        max_new_tokens=max_new_tokens,
        cache_dir=cache_dir,
        progress=progress,
    )
    write_card(folder, card(trainer, rates, scores, config, dtype=dtype), scores)
    return scores
