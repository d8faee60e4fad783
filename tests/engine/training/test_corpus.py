"""Corpora: what is written is the target's own text, and nothing finished is ever lost."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

import presets
from engine.errors import ConfigError, PromptError
from engine.model.corpus import Corpus
from engine.model.random_weights import ROLES
from engine.model.target import Target
from engine.training.corpus.dialogues import (
    ChatFormat,
    CorpusSettings,
    DialogueTemplates,
    GivenPrompt,
    dialogue_specs,
)
from tests.engine.drafters.judges import FAMILIES, slow
from tests.engine.training.conftest import (
    SETTINGS,
    check_writes_as_alone,
    dialogues,
    grow,
    grown,
    learnable_target,
)
from tests.models import tiny_target


@pytest.fixture(scope="module")
def target() -> Target:
    """As shallow as what is asked of a text allows: only those who learn from it need layers."""
    return learnable_target(num_layers=2)


@pytest.fixture(scope="module")
def corpus(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return grown(target, tmp_path_factory.mktemp("corpus"), num_tokens=400)


def finish(made: Iterator[Corpus]) -> None:
    for _ in made:
        pass


@pytest.mark.parametrize("family", [*FAMILIES, slow("qwen3_5_text")])
def test_a_row_of_the_batch_writes_what_the_target_writes_alone(family: str) -> None:
    check_writes_as_alone(tiny_target(family))


def test_going_on_after_any_cut_makes_the_same_files(target: Target, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    finish(grow(target, whole, SETTINGS, num_tokens=900, rows=4))
    stored = 0
    for num_dialogues, rows in ((3, 4), (1, 8)):
        with closing(grow(target, cut, SETTINGS, num_tokens=900, rows=rows)) as made:
            stored += num_dialogues
            while len(next(made).entries) < stored:
                pass
        before = dialogues(cut)
        assert len(before) == stored
        with (cut / "dialogues.jsonl").open("ab") as stored_lines:
            stored_lines.write(b'{"n": 99, "cat')  # what a kill leaves behind
        assert dialogues(cut) == before
    finish(grow(target, cut, SETTINGS, num_tokens=900, rows=4))
    name = "dialogues.jsonl"
    assert (cut / name).read_bytes() == (whole / name).read_bytes()


def test_prompts_of_a_file_are_asked_word_for_word(target: Target, tmp_path: Path) -> None:
    prompts = [GivenPrompt("mine", ("How old is the moon?", "And the sun?"))]
    settings = SETTINGS.replace(given_share=1.0, answer_tokens=8)
    finish(grow(target, tmp_path, settings, num_tokens=200, rows=2, prompts=prompts))
    corpus = Corpus.open(tmp_path)
    start, _ = corpus.entries[0].spans[0]
    prompt = corpus.entries[0].token_ids[:start].tolist()
    assert prompt == target.encode_chat([{"role": "user", "content": "How old is the moon?"}])
    assert corpus.entries[0].category == "mine"


def test_prompts_that_leave_no_room_for_an_answer_are_left_out(
    target: Target, tmp_path: Path
) -> None:
    settings = SETTINGS.replace(given_share=1.0, answer_tokens=8)
    long, short = GivenPrompt("long", ("moon " * 200,)), GivenPrompt("short", ("How old?",))
    finish(grow(target, tmp_path, settings, num_tokens=100, rows=1, prompts=[long, short]))
    entries = Corpus.open(tmp_path).entries
    assert [entry.number for entry in entries] == list(range(len(entries)))
    with pytest.raises(ConfigError, match="shorter than 128 tokens"):
        finish(islice(grow(target, tmp_path, settings, num_tokens=900, rows=1, prompts=[long]), 50))


def test_a_seed_stands_for_the_same_dialogues_for_ever() -> None:
    """Corpora go on where they were cut: code and presets/dialogues.yaml must not change them."""
    settings = CorpusSettings(seed=7, given_share=0.025)
    prompts = [GivenPrompt("mine", ("How old?", "And the sun?"))]
    chat = ChatFormat("<u>", "<a>", "<e>")
    digest = hashlib.sha256()
    specs = dialogue_specs(chat, settings, presets.dialogues(), prompts, frozenset())
    for spec in islice(specs, 2000):
        segments = [
            s if isinstance(s, str) else [s.kind, s.max_tokens, s.temperature]
            for s in spec.segments
        ]
        digest.update(json.dumps([spec.number, spec.category, spec.seed, segments]).encode())
    assert digest.hexdigest() == "644bbdf86587b84e1801fa74646c8e8d1155c619292587e0e8532ad2c5a490bf"


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("openings", {"chat": ["About {dogs}"]}, "slots must have dogs"),
        ("shares", {"chat": 0.5, "qa": 0.5}, "openings must have qa"),
        ("follow_ups", [], "follow_ups must"),
    ],
)
def test_templates_that_cannot_be_filled_are_refused(key: str, value: Any, message: str) -> None:
    values = {
        "shares": {"chat": 1.0},
        "openings": {"chat": ["About {topic_c} and {name2} [line]"]},
        "follow_up_shares": {},
        "follow_ups": ["Why?"],
        "slots": {"topic": ["tea"], "name": ["Ann"]},
    }
    DialogueTemplates.parse(values)
    with pytest.raises(ConfigError) as error:
        DialogueTemplates.parse({**values, key: value})
    assert message in str(error.value)


def test_two_processes_never_write_to_one_corpus(target: Target, tmp_path: Path) -> None:
    made = grow(target, tmp_path, SETTINGS, num_tokens=500, rows=2)
    next(made)
    with pytest.raises(ConfigError, match="is being written by another process"):
        finish(grow(target, tmp_path, SETTINGS, num_tokens=500, rows=2))
    finish(made)
    finish(grow(target, tmp_path, SETTINGS, num_tokens=600, rows=2))
    assert Corpus.open(tmp_path).num_tokens >= 600


def test_a_corpus_that_is_large_enough_is_not_touched(target: Target, corpus: Corpus) -> None:
    before = {file.name: file.stat().st_mtime_ns for file in corpus.folder.iterdir()}
    finish(grow(target, corpus.folder, SETTINGS, num_tokens=100, rows=2))
    assert {file.name: file.stat().st_mtime_ns for file in corpus.folder.iterdir()} == before


def test_what_cannot_extend_a_corpus_is_refused(
    target: Target, corpus: Corpus, tmp_path: Path
) -> None:
    mute, other = learnable_target(num_layers=2), tiny_target(num_hidden_layers=3)
    mute.tokenizer = None
    reseeded, long = SETTINGS.replace(seed=5), CorpusSettings(max_len=512)
    for model, folder, settings, message in (
        (other, corpus.folder, SETTINGS, "was written by tiny-llama, but the target is"),
        (target, corpus.folder, reseeded, "was made with .*'seed': 0.* but the settings are"),
        (target, tmp_path / "long", long, "max_len must be at most 256.*got 512"),
        (mute, tmp_path / "mute", SETTINGS, "has no tokenizer"),
    ):
        with pytest.raises((ConfigError, PromptError), match=message):
            finish(grow(model, folder, settings, num_tokens=10**6, rows=2))


@pytest.mark.parametrize("has_begin", [True, False])
def test_dialogues_of_a_base_model_begin_as_its_raw_prompts_do(
    has_begin: bool, tmp_path: Path
) -> None:
    """By Llama's and Gemma's first token; others may begin with what the model writes."""
    target = tiny_target()
    tokenizer: Any = copy.deepcopy(target.tokenizer)
    tokenizer.chat_template, begin = None, tokenizer.convert_tokens_to_ids(ROLES[0])
    if has_begin:
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"{ROLES[0]} $A", special_tokens=[(ROLES[0], begin)]
        )
    target.tokenizer = tokenizer
    assert (target.encode("ab")[0] == begin) == has_begin
    entries = grown(target, tmp_path, num_tokens=400).entries
    assert all((entry.token_ids[0] == begin) == has_begin for entry in entries)
