"""A draft model of another vocabulary that hands over text, against transformers' own."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import GenerationConfig, PreTrainedTokenizerFast
from transformers.generation.candidate_generator import (
    AssistedCandidateGeneratorDifferentTokenizers,
)

import presets
from engine.drafters import draft_target
from engine.drafters.base import Drafter
from engine.drafters.draft_target import DraftTargetConfig
from engine.errors import VocabularyError
from engine.model.target import Target
from engine.model.text import Retokenizer
from tests.engine.drafters import judges
from tests.engine.drafters.test_draft_target import ENDLESS, drafter_of, of_letters, translated
from tests.models import plain_greedy, tiny_model

PROSE = "One two three, one two: the cat sat on the mat. "


@functools.cache
def learned(size: int) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with words and parts of words, learned from the starter's prompts."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    texts = [turn for suite in presets.suites().values() for p in suite.prompts for turn in p.turns]
    tokenizer.train_from_iterator(texts[:200], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def of_words(seed: int, size: int, name: str) -> Target:
    """A random model whose tokens are words and parts of words."""
    return Target(tiny_model(seed=seed, vocab_size=size, **ENDLESS), learned(size), name=name)


def by_text(model: Target, small: Target, **settings: Any) -> Drafter:
    return drafter_of(model, small, vocabulary="text", **settings)


@pytest.mark.parametrize(("window", "threshold"), [(4, 0.0), (64, 0.02)])
def test_greedy_output_is_the_target_s(
    monkeypatch: pytest.MonkeyPatch, window: int, threshold: float
) -> None:
    monkeypatch.setattr(draft_target, "WINDOW", window)
    model, small = of_words(0, 400, "target"), of_words(1, 330, "small")
    drafter = by_text(model, small, confidence_threshold=threshold)
    prompts = (model.encode(PROSE), model.encode("Zwölf Käse für 3 €, 日本"), [5])
    texts = [judges.write(model, drafter, prompt, tokens=40) for prompt in prompts]
    assert [t.output for t in texts] == [plain_greedy(model, prompt, 40) for prompt in prompts]
    assert any(step.num_drafted for text in texts for step in text.steps)


@pytest.mark.slow
def test_sampled_output_follows_the_target() -> None:
    model: Any = judges.sampled_target()
    small: Any = of_words(1, 330, "small")
    few = model.tokenizer.convert_ids_to_tokens(range(12))
    same = small.tokenizer.convert_tokens_to_ids(few)
    others = sorted(set(range(330)) - {*same})
    with torch.no_grad():  # it writes what the target's few tokens say
        small.model.lm_head.weight[others] = 0.0
        small.model.lm_head.weight[same] += 0.3
    assert judges.p_value(model, by_text(model, small)) > 1e-3


def test_its_cache_reads_no_token_of_the_text_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    model = of_letters()
    small = translated(model)
    fed: list[int] = []
    prefill = small.prefill
    monkeypatch.setattr(
        small, "prefill", lambda ids, *rest: fed.append(len(ids)) or prefill(ids, *rest)
    )
    prompt = model.encode(PROSE)
    text = judges.write(model, by_text(model, small, max_draft_len=3), prompt, tokens=29)
    assert fed[::3] == [len(prompt) + 1] + [2] * (len(text.steps) - 1)


def of_prose(seed: int, size: int) -> Target:
    """It writes whole characters only: transformers hands over broken ones as U+FFFD."""
    model = of_words(seed, size, f"prose-{seed}")
    broken = [token for token in range(size) if "\ufffd" in learned(size).decode([token])]
    with torch.no_grad():
        model.model.lm_head.weight[broken] = 0.0
    return model


@pytest.mark.parametrize("sizes", [None, (400, 330), (330, 400)])
def test_drafts_are_those_of_transformers(sizes: tuple[int, int] | None) -> None:
    model, small = (
        (of_letters(), translated(of_letters()))
        if sizes is None
        else (of_prose(0, sizes[0]), of_prose(1, sizes[1]))
    )
    prompt = model.encode(PROSE)
    drafter = by_text(model, small, max_draft_len=4)
    steps = judges.write(model, drafter, prompt).steps
    config = small.model.generation_config
    config.num_assistant_tokens, config.assistant_confidence_threshold = 4, 0.0
    config.num_assistant_tokens_schedule = "constant"
    ours: Any = model.tokenizer
    other: Any = small.tokenizer
    text, same = [*prompt, steps[0].tokens[0]], list[bool]()
    for step in steps[:-1]:
        known: Any = torch.tensor([text])
        generator: Any = AssistedCandidateGeneratorDifferentTokenizers(
            known, small.model, ours, other,
            GenerationConfig(max_length=256, min_length=0), {}, known,
        )  # fmt: skip
        theirs, _ = generator.get_candidates(torch.tensor([text]))
        same.append(theirs[0, len(text) :].tolist() == list(step.tokens[1:]))
        text += step.committed
    assert all(same), same


# ---- text between tokenizers


def test_a_token_forms_as_it_would_have_in_one_text() -> None:
    model, small = of_words(0, 400, "target"), of_words(1, 330, "small")
    hand_over = Retokenizer(small, model)
    whole = model.encode(PROSE)
    for cut in range(1, len(PROSE)):
        before, after = PROSE[:cut], PROSE[cut:]
        context = model.encode(before)[-10:]
        found = hand_over.continued(small.encode(before)[-10:], small.encode(after), context)
        assert model.tokenizer is not None and model.tokenizer.decode(found) == after
        if model.encode(before) == whole[: len(model.encode(before))]:
            assert model.encode(before) + found == whole


def test_half_a_character_is_not_handed_over() -> None:
    model, small = of_words(0, 400, "target"), of_words(1, 330, "small")
    cheese = small.encode("Kä")
    assert Retokenizer(small, model).continued([], cheese[:-1], []) == model.encode("K")


def test_a_model_without_a_tokenizer_is_refused() -> None:
    model = of_letters()
    with pytest.raises(VocabularyError, match="need a tokenizer each"):
        by_text(model, Target(tiny_model(), None, name="without"))


def test_only_likeliest_tokens_are_drafted() -> None:
    live = DraftTargetConfig(vocabulary="text").live_settings()
    assert "use_draft_probs" not in live and "confidence_threshold" in live
