"""Drafting with a smaller model: vocabulary, cache reuse, context, early stop."""

from __future__ import annotations

import copy
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import Sampling
from engine.drafters.base import Drafter
from engine.drafters.draft_target import DraftTargetConfig
from engine.errors import ConfigError, VocabularyError
from engine.model.cache import TreeCache
from engine.model.sources import TargetSpec
from engine.model.target import Target
from engine.model.text import common_vocabulary
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
def test_drafts_end_where_the_draft_model_is_unsure(family: str) -> None:
    """Attention, and recurrent layers, whose states go back to what was committed."""
    model, small, lengths = target(), alike(family, **ENDLESS), set[int]()

    @torch.inference_mode()
    def reference(text: list[int]) -> list[int]:
        drafted = list[int]()
        while len(drafted) < 4:
            logits = small.model(torch.tensor([text + drafted]), use_cache=False).logits[0, -1]
            probs = logits.softmax(-1)
            if float(probs.max()) < 0.1:
                break
            drafted.append(int(probs.argmax()))
        lengths.add(len(drafted))
        return drafted

    drafter = drafter_of(model, small, max_draft_len=4, confidence_threshold=0.1)
    judges.assert_drafts_equal(reference, model, drafter, prompts=[PROMPT], tokens=40)
    assert len(lengths) > 1


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


def test_without_tokenizers_the_sizes_must_be_equal() -> None:
    big = Target(tiny_model(), None, name="big")
    assert common_vocabulary(big, Target(tiny_model(), None, name="small")) == VOCAB
    other = Target(tiny_model(vocab_size=VOCAB + 1), None, name="small")
    with pytest.raises(VocabularyError, match=f"{VOCAB} logits.*{VOCAB + 1}"):
        common_vocabulary(big, other)


# ---- a part of the vocabulary


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_it_drafts_the_listed_tokens_only(tmp_path: Path, temperature: float) -> None:
    """The folder of the draft model lists the most frequent tokens."""
    model, small = target(), tiny_target(seed=1, num_hidden_layers=1, **ENDLESS)
    ids = random.Random(2).sample(range(VOCAB), 60)
    (tmp_path / "draft_vocab.json").write_text(json.dumps(ids))
    for settings, allowed in (({}, ids), ({"draft_vocab": 20}, ids[:20])):
        config = DraftTargetConfig.parse({"speculative_model": str(tmp_path), **settings})
        drafter = config.build(build_context(model, **{str(tmp_path): small}))
        steps = write(model, drafter, 20, temperature=temperature)
        drafted = {token for step in steps for token in step.tokens[1:]}
        assert drafted and drafted <= set(allowed)
        if not temperature:
            # The first draft is the draft model's likeliest among them.
            text = torch.tensor([*PROMPT, steps[0].tokens[0]])
            logits = small.prefill(text, small.new_cache(len(text)), Needs()).logits[-1]
            assert steps[0].tokens[1] == allowed[int(logits[allowed].argmax())]
            tokens = [t for step in steps for t in step.committed]
            assert tokens == plain_greedy(model, PROMPT, len(tokens) + 1)[1:]


@pytest.mark.parametrize("settings", [{}, {"vocabulary": "intersection"}, {"vocabulary": "text"}])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_model_that_computes_nan_costs_speed_and_nothing_else(
    temperature: float, settings: dict[str, Any]
) -> None:
    model, small = target(), target()
    with torch.no_grad():
        for parameter in small.model.parameters():
            parameter.fill_(torch.nan)
    text = judges.write(
        model, drafter_of(model, small, **settings), PROMPT, temperature=temperature
    )
    assert len(text.output) == 24
    if temperature == 0:
        assert text.output == plain_greedy(model, PROMPT, 24)
