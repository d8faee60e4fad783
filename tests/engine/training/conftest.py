"""A tiny target whose next token hangs on the last one mostly, so that heads learn it quickly."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from pathlib import Path

import pytest
import torch

import presets
from engine.model.corpus import Corpus
from engine.model.target import Target
from engine.proposal import Needs
from engine.training.corpus import writer
from engine.training.corpus.dialogues import (
    Completion,
    CorpusSettings,
    DialogueSpec,
    GivenPrompt,
)
from engine.training.corpus.generation import BatchGenerator
from tests.models import tiny_target

SETTINGS = CorpusSettings(max_len=128, answer_tokens=32)


COMMON = range(60, 84)
"""Tokens that it writes almost only."""


def learnable_target(*, num_layers: int = 8) -> Target:
    """Random weights, but few tokens are likely, and layers add little to the embedding."""
    target = tiny_target(num_hidden_layers=num_layers)
    with torch.no_grad():
        target.lm_head.get_parameter("weight")[list(COMMON)] *= 6.0
        for name, parameter in target.model.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                parameter.mul_(0.1)
    return target


def grow(
    target: Target,
    folder: Path,
    settings: CorpusSettings = SETTINGS,
    *,
    num_tokens: int,
    rows: int,
    prompts: Sequence[GivenPrompt] = (),
) -> Generator[Corpus, None, None]:
    """A corpus of the shipped templates, as it grows."""
    return writer.extend_corpus(
        target,
        folder,
        settings,
        presets.dialogues(),
        num_tokens=num_tokens,
        rows=rows,
        prompts=prompts,
    )


@pytest.fixture(scope="session")
def target() -> Target:
    return learnable_target()


@pytest.fixture(scope="session")
def corpus(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return grown(target, tmp_path_factory.mktemp("corpus"), num_tokens=5000)


def grown(target: Target, folder: Path, *, num_tokens: int) -> Corpus:
    """A corpus that is done."""
    for _ in grow(target, folder, SETTINGS, num_tokens=num_tokens, rows=16):
        pass
    return Corpus.open(folder)


def dialogues(folder: Path) -> dict[int, list[int]]:
    """Tokens by number; none is there twice."""
    stored = Corpus.open(folder)
    numbers = [entry.number for entry in stored.entries]
    assert len(numbers) == len(set(numbers))
    return {entry.number: entry.token_ids.tolist() for entry in stored.entries}


def check_writes_as_alone(target: Target) -> None:
    """Answers of a batch are the target's own, fixed texts read in the place of what was cut off.

    A text of the user's ends after its last sentence: tokens behind it, which were read, are cut.
    """
    opening, fixed, longest = "Tell me: ", " -- that is all there was to it, was it not -- ", 24
    parts = Completion("turn", longest, 1.0), fixed, Completion("answer", 9, 0.0)
    specs = [DialogueSpec(i, "", i, (opening + "x" * (i % 7), *parts)) for i in range(40)]
    num_cut = 0
    for dialogue in filter(None, BatchGenerator(target, rows=5, max_len=128).run(iter(specs))):
        (start, end), tokens = dialogue.spans[0], dialogue.token_ids.tolist()
        for at in range(start, end):
            logits = target.prefill(tokens[:at], target.new_cache(at), Needs()).logits
            assert tokens[at] == int(logits.argmax())
        infilled = start - len(opening + fixed) - dialogue.number % 7
        num_cut += longest // 2 <= infilled < longest
    assert num_cut > 1
