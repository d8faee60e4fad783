"""Drafting with a smaller model: vocabulary, cache reuse, context, early stop."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import GenerationConfig, PreTrainedTokenizerFast
from transformers.generation.candidate_generator import (
    AssistantToTargetTranslator,
    UniversalSpeculativeDecodingGenerator,
)

from engine.config import Sampling
from engine.drafters.base import Drafter
from engine.drafters.draft_target import DraftTargetConfig
from engine.errors import ConfigError, VocabularyError
from engine.model.cache import TreeCache
from engine.model.sources import TargetSpec
from engine.model.target import Target
from engine.model.text import SharedTokens, common_vocabulary
from engine.proposal import Needs
from engine.steps import Step
from playground.host.models import Models
from tests.engine.drafters import judges
from tests.models import (
    VOCAB,
    alike,
    build_context,
    plain_greedy,
    save_tiny,
    tiny_model,
    tiny_target,
    tiny_tokenizer,
)

PROMPT = [40, 41, 42, 43, 40, 41]
ENDLESS: dict[str, Any] = {"eos_token_id": None}


def target() -> Target:
    return tiny_target(**ENDLESS)


def drafter_of(target: Target, small: Target, **settings: Any) -> Drafter:
    config = DraftTargetConfig.parse({"speculative_model": "small", **settings})
    return config.build(build_context(target, small=small))


def write(target: Target, drafter: Drafter, count: int = 30, **how: Any) -> list[Step]:
    return judges.write(target, drafter, PROMPT, tokens=count, **how).steps


def test_sampled_drafts_of_the_target_itself_are_always_accepted() -> None:
    model = target()
    drafter, sampling = drafter_of(model, model), Sampling(temperature=0.9, top_k=20, top_p=0.9)
    steps = write(model, drafter, sampling=sampling)
    assert all(step.num_accepted == step.num_drafted for step in steps)


def test_the_draft_model_reads_every_committed_token_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One new token after a rejection, two after a fully accepted draft, the prompt only once."""
    model = target()
    small = alike(**ENDLESS)
    fed: list[list[int]] = []
    prefill = small.prefill

    def watched(tokens: Any, cache: TreeCache, needs: Any) -> Any:
        fed.append(torch.as_tensor(tokens).tolist())
        return prefill(tokens, cache, needs)

    monkeypatch.setattr(small, "prefill", watched)
    steps = write(model, drafter_of(model, small, max_draft_len=3), 40)
    assert {s.num_accepted for s in steps} >= {0, 3}
    firsts = fed[::3]
    assert firsts[0] == [*PROMPT, steps[0].tokens[0]]
    for before, first, step in zip(steps, firsts[1:], steps[1:], strict=False):
        full = before.num_accepted == before.num_drafted
        assert first == ([before.tokens[-1]] if full else []) + [step.tokens[0]]
    assert all(len(tokens) == 1 for i, tokens in enumerate(fed) if i % 3)


@pytest.mark.parametrize("family", ["llama", "qwen3_5_text"])
@pytest.mark.parametrize("threshold", [0.0, 0.1])
def test_drafts_equal_those_of_the_draft_model_without_a_cache(
    threshold: float, family: str
) -> None:
    model = target()
    small = alike(family, **ENDLESS)
    drafter = drafter_of(model, small, max_draft_len=4, confidence_threshold=threshold)
    text, lengths = list(PROMPT), set()
    for step in write(model, drafter, 40):
        text.append(step.tokens[0])
        expected, drafted = list(text), list[int]()
        while len(drafted) < 4:
            with torch.inference_mode():
                probs = small.model(torch.tensor([expected]), use_cache=False).logits[0, -1]
                probs = probs.softmax(-1)
            if float(probs.max()) < threshold:
                break
            drafted.append(int(probs.argmax()))
            expected.append(drafted[-1])
        assert list(step.tokens[1:]) == drafted
        lengths.add(len(drafted))
        text += [step.tokens[node] for node in step.accepted]
    assert lengths == {4} if threshold == 0 else len(lengths) > 1


def test_a_shorter_drafter_stops_drafting_where_its_context_ends() -> None:
    model = target()
    small = tiny_target("opt", max_position_embeddings=16, **ENDLESS)
    steps = write(model, drafter_of(model, small, max_draft_len=4), 30)
    for step in steps:
        fits = max(0, 16 - (step.context_len + 1) + 1)
        assert step.num_drafted == min(4, fits)
    assert steps[-1].num_drafted == 0


def test_the_draft_model_has_a_dtype_and_device_of_its_own() -> None:
    model = target()
    asked: list[dict[str, str]] = []

    def load(spec: Any, **where: str) -> Target:
        asked.append(where)
        return Target(tiny_model(**ENDLESS).bfloat16(), model.tokenizer, name="small")

    context = replace(build_context(model), load=load)
    settings = {"speculative_model": "a/b", "draft_dtype": "bfloat16", "draft_device": "cpu"}
    drafter = DraftTargetConfig.parse(settings).build(context)
    for temperature in (0.0, 1.0):
        steps = write(model, drafter, 12, temperature=temperature)
        assert any(step.num_accepted for step in steps)
    DraftTargetConfig(speculative_model="a/b").build(context)
    assert asked == [{"dtype": "bfloat16", "device": "cpu"}, {}]
    with pytest.raises(ConfigError, match="draft_device must match"):
        DraftTargetConfig.parse({"draft_device": "gpu"})


def test_both_dtypes_of_one_model_are_kept(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "tiny")
    models = Models(cache_dir=tmp_path, device="cpu", resolve=TargetSpec.of_path_or_hub)
    models.target(TargetSpec.of_path_or_hub(str(folder)), "float32", lambda message, done: None)
    config = DraftTargetConfig(speculative_model=str(folder), drafting="as set")
    for dtype in ("target", "bfloat16", "target"):
        drafter: Any = models.drafter(config.replace(draft_dtype=dtype))
        assert drafter.model.dtype_name == dtype.replace("target", "float32")
    assert len(models._companions) == 2
    models.close()


# ---- vocabulary


def with_tokens(vocab_size: int, added: list[str], name: str) -> Target:
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.add_tokens(added, special_tokens=True)
    return Target(tiny_model(vocab_size=vocab_size, **ENDLESS), tokenizer, name=name)


@pytest.mark.parametrize(("ours", "theirs"), [(VOCAB, VOCAB + 32), (VOCAB + 32, VOCAB)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_padded_logits_are_no_mismatch(ours: int, theirs: int, temperature: float) -> None:
    big = with_tokens(ours, [], "big")
    small = with_tokens(theirs, ["<|tool|>"], "small")
    assert common_vocabulary(big, small) == VOCAB
    steps = write(big, drafter_of(big, small), 12, temperature=temperature)
    assert all(token < VOCAB for step in steps for token in step.tokens[1:])


def test_added_tokens_may_differ_only_where_the_other_has_none() -> None:
    big, small = with_tokens(VOCAB, ["<|a|>"], "big"), with_tokens(VOCAB, [], "small")
    assert common_vocabulary(big, small) == common_vocabulary(small, big) == VOCAB
    other = with_tokens(VOCAB, ["<|b|>"], "small")
    first = len(tiny_tokenizer())
    with pytest.raises(VocabularyError) as caught:
        common_vocabulary(big, other)
    for part in (f"token id {first}", "'<|a|>'", "'<|b|>'", "big", "small"):
        assert part in str(caught.value)


def test_the_first_id_that_differs_is_named_with_both_tokens() -> None:
    swapped = copy.deepcopy(tiny_tokenizer())
    state = swapped.backend_tokenizer.to_str()
    vocab = tiny_tokenizer().get_vocab()
    names = {index: token for token, index in vocab.items()}
    a, b = names[65], names[70]
    state = state.replace(f'"{a}":65', f'"{a}":70', 1).replace(f'"{b}":70', f'"{b}":65', 1)
    swapped._tokenizer = type(swapped.backend_tokenizer).from_str(state)
    small = Target(tiny_model(), swapped, name="small")
    with pytest.raises(VocabularyError) as caught:
        drafter_of(target(), small)
    assert "token id 65" in str(caught.value)
    assert repr(a) in str(caught.value) and repr(b) in str(caught.value)


def test_without_tokenizers_the_sizes_must_be_equal() -> None:
    big = Target(tiny_model(), None, name="big")
    assert common_vocabulary(big, Target(tiny_model(), None, name="small")) == VOCAB
    other = Target(tiny_model(vocab_size=VOCAB + 1), None, name="small")
    with pytest.raises(VocabularyError, match=f"{VOCAB} logits.*{VOCAB + 1}"):
        common_vocabulary(big, other)


# ---- another vocabulary


def renamed(order: list[int], **settings: Any) -> Target:
    """A target whose tokenizer has the same bytes under other ids: byte i is `order[i]`."""
    state = json.loads(tiny_tokenizer().backend_tokenizer.to_str())
    names = {index: token for token, index in state["model"]["vocab"].items()}
    vocab = {names[i]: their for i, their in enumerate(order) if i in names}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    return Target(tiny_model(**{**ENDLESS, **settings}), fast, name="renamed")


def shuffled(count: int) -> list[int]:
    return torch.randperm(count, generator=torch.Generator().manual_seed(2)).tolist()


def translated(model: Target) -> Target:
    """The target itself, its first 256 tokens under other ids."""
    order = shuffled(256)
    other = renamed(order)
    other.model.load_state_dict(model.model.state_dict())
    with torch.no_grad():
        for matrix in (other.model.model.embed_tokens.weight, other.model.lm_head.weight):
            matrix[torch.tensor(order)] = matrix[:256].clone()
    return other


def of_other_vocabulary(model: Target, small: Target, **settings: Any) -> Drafter:
    return drafter_of(model, small, vocabulary="intersection", **settings)


def test_a_drafter_of_another_vocabulary_is_refused_unless_tokens_are_shared() -> None:
    model = target()
    with pytest.raises(VocabularyError, match="vocabulary=intersection"):
        drafter_of(model, translated(model))
    without = Target(tiny_model(), None, name="without")
    with pytest.raises(VocabularyError, match="need a tokenizer each"):
        of_other_vocabulary(model, without)


def of_letters() -> Target:
    """A target that writes printable ASCII, which is text in any vocabulary."""
    model = target()
    with torch.no_grad():
        model.model.lm_head.weight[94:] = 0.0
    return model


def test_special_tokens_that_both_have_stay_and_others_go() -> None:
    model, small = target(), with_tokens(VOCAB, [], "small")
    shared = SharedTokens(model, small)
    chat = model.encode_chat([{"role": "user", "content": "Hi there"}])
    assert shared.translate(chat) == chat
    other = SharedTokens(model, translated(model))
    text = other.translate(model.encode("Hi there"))
    assert other.translate(chat) == text and len(text) == len("Hi there")
    assert other.translate(model.encode("<|user|>")) == []


@pytest.mark.parametrize("keep", [judges.slow(256), 80])
def test_greedy_output_is_the_target_s_whatever_is_shared(keep: int) -> None:
    model = of_letters()
    small = translated(model)
    order = shuffled(256)
    small.tokenizer = renamed([*order[:keep]]).tokenizer
    drafter = of_other_vocabulary(model, small)
    assert judges.assert_greedy_lossless(model, drafter, tokens=30) > 0


@pytest.mark.slow
def test_sampled_output_of_shared_tokens_follows_the_target() -> None:
    model = judges.sampled_target()
    order = [13, 4, 9, 1, 12, 0, 7, 3, 11, 5, 20, 21]  # the last two are beyond its 14 logits
    small = renamed(order, vocab_size=14, num_hidden_layers=1)
    with torch.no_grad():
        small.lm_head.get_parameter("weight").mul_(0.35)
    for settings in ({}, {"use_draft_probs": False}):
        drafter = of_other_vocabulary(model, small, **settings)
        assert judges.p_value(model, drafter, drawn=not settings) > 1e-3


def listing(folder: Path, ids: list[int]) -> str:
    """A draft model's folder, of which only the list of the most frequent tokens is read."""
    folder.mkdir(exist_ok=True)
    (folder / "draft_vocab.json").write_text(json.dumps(ids))
    return str(folder)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_it_drafts_the_listed_tokens_only(tmp_path: Path, temperature: float) -> None:
    model, small = target(), tiny_target(seed=1, num_hidden_layers=1, **ENDLESS)
    named = listing(tmp_path / "small", shuffled(VOCAB)[:60])
    ids = json.loads((tmp_path / "small" / "draft_vocab.json").read_text())
    for settings, allowed in (({}, ids), ({"draft_vocab": 20}, ids[:20])):
        config = DraftTargetConfig.parse({"speculative_model": named, **settings})
        drafter = config.build(build_context(model, **{named: small}))
        steps = write(model, drafter, 20, temperature=temperature)
        drafted = {token for step in steps for token in step.tokens[1:]}
        assert drafted and drafted <= set(allowed)
        if not temperature:
            # The first draft is the draft model's likeliest among them.
            text = torch.tensor([*PROMPT, steps[0].tokens[0]])
            cache = small.new_cache(len(text))
            logits = small.prefill(text, cache, Needs()).logits[-1]
            assert steps[0].tokens[1] == allowed[int(logits[allowed].argmax())]
            tokens = [t for step in steps for t in step.committed]
            assert tokens == plain_greedy(model, PROMPT, len(tokens) + 1)[1:]


def test_shared_tokens_and_drafts_are_those_of_transformers() -> None:
    model: Any = of_letters()
    small: Any = translated(model)
    translator = AssistantToTargetTranslator(model.tokenizer, small.tokenizer, VOCAB)
    shared = SharedTokens(model, small)
    pairs = dict(zip(shared.ours.tolist(), shared.theirs.tolist(), strict=True))
    assert pairs == translator.target_to_assistant_input_ids and len(pairs) == 256
    drafter = of_other_vocabulary(model, small, max_draft_len=4)
    prompt = model.encode("one two three, one two")
    steps = judges.write(model, drafter, prompt).steps
    config = small.model.generation_config
    config.num_assistant_tokens, config.assistant_confidence_threshold = 4, 0.0
    config.num_assistant_tokens_schedule = "constant"
    text = [*prompt, steps[0].tokens[0]]
    known: Any = torch.tensor([text])
    generator: Any = UniversalSpeculativeDecodingGenerator(
        known, small.model, model.tokenizer, small.tokenizer,
        GenerationConfig(max_length=256, min_length=0), {}, translator, known,
    )  # fmt: skip
    for step in steps[:-1]:
        theirs, _ = generator.get_candidates(torch.tensor([text]))
        assert theirs[0, len(text) :].tolist() == list(step.tokens[1:])
        text += step.committed
