"""A draft model of another vocabulary: by shared tokens or by text, against transformers' own."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import GenerationConfig, PreTrainedTokenizerFast
from transformers.generation.candidate_generator import (
    AssistantToTargetTranslator,
    AssistedCandidateGenerator,
    AssistedCandidateGeneratorDifferentTokenizers,
    UniversalSpeculativeDecodingGenerator,
)

import presets
from engine.drafters import draft_target
from engine.errors import VocabularyError
from engine.model.target import Target
from engine.model.text import Retokenizer, SharedTokens
from tests.engine.drafters import judges
from tests.engine.drafters.test_draft_target import ENDLESS, drafter_of, target, with_tokens
from tests.engine.methods import moved
from tests.models import VOCAB, alike, plain_greedy, tiny_model, tiny_tokenizer

PROSE = "One two three, one two: the cat sat on the mat. "


def fast(model: BPE) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@functools.cache
def learned(size: int) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with words and parts of words, learned from prompts.

    With words of other texts transformers' drafts may lack their first token: it counts the
    target's tokens as its tokenizer would cut the text, where a model of random weights wrote
    others.
    """
    tokenizer = fast(BPE())
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    suites = presets.suites()
    prompts = [p for name in ("quick", "starter", "code", "tasks") for p in suites[name].prompts]
    texts = [turn for prompt in prompts for turn in prompt.turns][:200]
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def of_words(seed: int, size: int, name: str) -> Target:
    """A random model whose tokens are words and parts of words."""
    return Target(tiny_model(seed=seed, vocab_size=size, **ENDLESS), learned(size), name=name)


def of_prose(seed: int, size: int) -> Target:
    """It writes whole characters only: transformers hands over broken ones as U+FFFD."""
    model = of_words(seed, size, f"prose-{seed}")
    broken = [token for token in range(size) if "\ufffd" in learned(size).decode([token])]
    with torch.no_grad():
        model.model.lm_head.weight[broken] = 0.0
    return model


def of_letters() -> Target:
    """A target that writes printable ASCII, which is text in any vocabulary."""
    model = target()
    with torch.no_grad():
        model.model.lm_head.weight[94:] = 0.0
    return model


def renamed(order: list[int], **settings: Any) -> Target:
    """A target whose tokenizer has the same bytes under other ids: byte i is `order[i]`."""
    state = json.loads(tiny_tokenizer().backend_tokenizer.to_str())
    names = {index: token for token, index in state["model"]["vocab"].items()}
    vocab = {names[i]: their for i, their in enumerate(order) if i in names}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=fast(BPE(vocab=vocab, merges=[])))
    return Target(tiny_model(**{**ENDLESS, **settings}), tokenizer, name="renamed")


def translated(model: Target, *, keep: int = 256) -> Target:
    """The target itself, its first 256 tokens under other ids; so many of them have a name."""
    order = torch.randperm(256, generator=torch.Generator().manual_seed(2)).tolist()
    other = renamed(order[:keep])
    other.model.load_state_dict(model.model.state_dict())
    with torch.no_grad():
        for matrix in (other.model.model.embed_tokens.weight, other.model.lm_head.weight):
            matrix[torch.tensor(order)] = matrix[:256].clone()
    return other


# ---- equal to transformers


GENERATORS: dict[str, Any] = {
    "same": AssistedCandidateGenerator,
    "intersection": UniversalSpeculativeDecodingGenerator,
    "text": AssistedCandidateGeneratorDifferentTokenizers,
}


def candidates(model: Any, small: Any, vocabulary: str) -> judges.Reference:
    """What transformers' candidate generators draft with a model of such a vocabulary."""
    config = small.model.generation_config
    config.num_assistant_tokens, config.assistant_confidence_threshold = 4, 0.0
    config.num_assistant_tokens_schedule = "constant"
    limits = GenerationConfig(max_length=256, min_length=0)
    tokenizers = () if vocabulary == "same" else (model.tokenizer, small.tokenizer)
    shared: list[Any] = []
    if vocabulary == "intersection":
        shared = [AssistantToTargetTranslator(model.tokenizer, small.tokenizer, VOCAB)]

    def reference(text: list[int]) -> list[int]:
        ids: Any = torch.tensor([text])
        generator = GENERATORS[vocabulary](ids, small.model, *tokenizers, limits, {}, *shared, ids)
        drafted: list[int] = generator.get_candidates(ids)[0][0, len(text) :].tolist()
        return drafted

    return reference


@pytest.mark.parametrize(
    ("vocabulary", "sizes"),
    [
        ("same", None),
        ("intersection", None),
        *(("text", s) for s in (None, (400, 330), (330, 400))),
    ],
)
def test_drafts_are_those_of_transformers(vocabulary: str, sizes: tuple[int, int] | None) -> None:
    if sizes is not None:
        model, small = of_prose(0, sizes[0]), of_prose(1, sizes[1])
    else:
        model = of_letters()
        own = moved(alike(**ENDLESS), model.device)
        small = own if vocabulary == "same" else translated(model)
    drafter = drafter_of(model, small, vocabulary=vocabulary, max_draft_len=4)
    drafts = candidates(model, small, vocabulary)
    judges.assert_drafts_equal(drafts, model, drafter, prompts=[model.encode(PROSE)], tokens=24)


def test_shared_tokens_are_those_of_transformers() -> None:
    model: Any = of_letters()
    small: Any = translated(model)
    translator = AssistantToTargetTranslator(model.tokenizer, small.tokenizer, VOCAB)
    shared = SharedTokens(model, small)
    pairs = dict(zip(shared.ours.tolist(), shared.theirs.tolist(), strict=True))
    assert pairs == translator.target_to_assistant_input_ids and len(pairs) == 256


# ---- lossless


def test_greedy_output_is_the_target_s_though_few_tokens_are_shared() -> None:
    model = of_letters()
    drafter = drafter_of(model, translated(model, keep=80), vocabulary="intersection")
    assert judges.assert_greedy_lossless(model, drafter, tokens=30) > 0


@pytest.mark.parametrize(("window", "threshold"), [(4, 0.0), (64, 0.02)])
def test_greedy_output_is_the_target_s_by_text(
    monkeypatch: pytest.MonkeyPatch, window: int, threshold: float
) -> None:
    monkeypatch.setattr(draft_target, "WINDOW", window)
    model, small = of_words(0, 400, "target"), of_words(1, 330, "small")
    drafter = drafter_of(model, small, vocabulary="text", confidence_threshold=threshold)
    prompts = (model.encode(PROSE), model.encode("Zwölf Käse für 3 €, 日本"), [5])
    texts = [judges.write(model, drafter, prompt, tokens=40) for prompt in prompts]
    assert [t.output for t in texts] == [plain_greedy(model, prompt, 40) for prompt in prompts]
    assert any(step.num_drafted for text in texts for step in text.steps)


@pytest.mark.slow
@pytest.mark.parametrize("use_draft_probs", [True, False])
def test_sampled_output_of_shared_tokens_follows_the_target(use_draft_probs: bool) -> None:
    model = judges.sampled_target()
    order = [13, 4, 9, 1, 12, 0, 7, 3, 11, 5, 20, 21]  # the last two are beyond its 14 logits
    small = renamed(order, vocab_size=14, num_hidden_layers=1)
    with torch.no_grad():
        small.lm_head.get_parameter("weight").mul_(0.35)
    settings = {"vocabulary": "intersection", "use_draft_probs": use_draft_probs}
    drafter = drafter_of(model, small, **settings)
    assert judges.p_value(model, drafter, drawn=use_draft_probs) > 1e-3


@pytest.mark.slow
def test_sampled_output_by_text_follows_the_target() -> None:
    model: Any = judges.sampled_target()
    small: Any = of_words(1, 330, "small")
    few = model.tokenizer.convert_ids_to_tokens(range(12))
    same = small.tokenizer.convert_tokens_to_ids(few)
    others = sorted(set(range(330)) - {*same})
    with torch.no_grad():  # it writes what the target's few tokens say
        small.model.lm_head.weight[others] = 0.0
        small.model.lm_head.weight[same] += 0.3
    assert judges.p_value(model, drafter_of(model, small, vocabulary="text")) > 1e-3


# ---- text between tokenizers


def test_special_tokens_that_both_have_stay_and_others_go() -> None:
    model, small = target(), with_tokens(VOCAB, [], "small")
    shared = SharedTokens(model, small)
    chat = model.encode_chat([{"role": "user", "content": "Hi there"}])
    assert shared.translate(chat) == chat
    other = SharedTokens(model, translated(model))
    text = other.translate(model.encode("Hi there"))
    assert other.translate(chat) == text and len(text) == len("Hi there")
    assert other.translate(model.encode("<|user|>")) == []


def test_its_cache_reads_no_token_of_the_text_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    model = of_letters()
    small = translated(model)
    fed: list[int] = []
    prefill = small.prefill
    monkeypatch.setattr(
        small, "prefill", lambda ids, *rest: fed.append(len(ids)) or prefill(ids, *rest)
    )
    prompt = model.encode(PROSE)
    drafter = drafter_of(model, small, vocabulary="text", max_draft_len=3)
    text = judges.write(model, drafter, prompt, tokens=29)
    assert fed[::3] == [len(prompt) + 1] + [2] * (len(text.steps) - 1)


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
    half = small.encode("Kä")[:-1]
    assert hand_over.continued([], half, []) == model.encode("K"), "half a character is left out"


def test_a_model_whose_tokens_cannot_be_told_is_refused() -> None:
    model = target()
    with pytest.raises(VocabularyError, match="vocabulary=intersection"):
        drafter_of(model, translated(model))
    without = Target(tiny_model(), None, name="without")
    for vocabulary in ("intersection", "text"):
        with pytest.raises(VocabularyError, match="need a tokenizer each"):
            drafter_of(model, without, vocabulary=vocabulary)
