"""Greedy output equals `transformers.generate`, token by token, for every method."""

from __future__ import annotations

import functools
import os
from typing import Any

import pytest

from engine.config import Limits
from engine.decode import decode
from engine.drafters import parse_method
from engine.drafters.base import Drafter
from engine.model.target import Target
from engine.steps import End, Step
from tests.engine.drafters.judges import slow
from tests.engine.prompts import ROOM, prompts
from tests.models import FAMILIES, alike, build_context, plain_greedy, tiny_target

NEW_TOKENS = 16
NGRAM: list[dict[str, Any]] = [
    {"lookup": "transformers"},
    {"lookup": "transformers", "max_matching_ngram_size": 1},
    *(
        {"is_keep_all": keep, "is_use_oldest": oldest, "is_public_pool": public}
        for keep in (True, False)
        for oldest in (True, False)
        for public in (True, False)
    ),
]
METHODS: dict[str, dict[str, Any]] = {
    "plain": {"decoding_type": "Autoregressive"},
    **{f"ngram-{i}": {"decoding_type": "NGram", **options} for i, options in enumerate(NGRAM)},
    "draft-itself": {"decoding_type": "Draft_Target", "speculative_model": "itself"},
    "draft-alike": {"decoding_type": "Draft_Target", "speculative_model": "alike"},
    "draft-other": {"decoding_type": "Draft_Target", "speculative_model": "other"},
    "draft-short": {"decoding_type": "Draft_Target", "speculative_model": "short"},
    "draft-sure": {
        "decoding_type": "Draft_Target",
        "speculative_model": "alike",
        "confidence_threshold": 0.6,
    },
}
FAST = [
    (family, method) if family == "llama" else slow(family, method)
    for family in FAMILIES
    for method in METHODS
    if family in ("llama", "gemma3_text")
    or method in ("plain", "ngram-0", "ngram-2", "draft-alike")
]
FAST_PROMPTS = ("chat-3", "code-1", "repetitive-0", "one-token-0", "near-limit-0")


@functools.cache
def target_of(family: str) -> Target:
    return tiny_target(family)


@functools.cache
def other() -> Target:
    return tiny_target("llama", seed=5, hidden_size=16, num_hidden_layers=1)


@functools.cache
def short() -> Target:
    """Its context ends long before the target's."""
    return tiny_target("llama", seed=6, num_hidden_layers=1, max_position_embeddings=32)


def drafter_of(family: str, method: str, draft_len: int | None) -> Drafter:
    settings = dict(METHODS[method])
    if draft_len is not None and method != "plain":
        settings["max_draft_len"] = draft_len
    target = target_of(family)
    bench = build_context(target, itself=target, alike=alike(family), other=other(), short=short())
    return parse_method(settings).build(bench)


@functools.cache
def reference(family: str, prompt: str) -> tuple[list[int], list[int]]:
    target = target_of(family)
    prompt_ids = prompts(target)[prompt]
    count = ROOM if prompt.startswith("near-limit") else NEW_TOKENS
    return prompt_ids, plain_greedy(target, prompt_ids, count)


def assert_lossless(family: str, method: str, prompt: str, drafter: Drafter) -> int:
    prompt_ids, expected = reference(family, prompt)
    limits = Limits(max_new_tokens=NEW_TOKENS)
    *records, end = decode(target_of(family), drafter, prompt_ids, limits=limits)
    assert isinstance(end, End)
    assert list(end.output_ids) == expected, (family, method, prompt)
    return sum(record.num_accepted for record in records if isinstance(record, Step))


def lengths_of(prompt: str) -> range:
    """Draft lengths for a prompt: four of the sixteen; the four prompts of a kind share them.

    `EVERY_LENGTH=1` takes all sixteen for every prompt.
    """
    number = int(prompt.rsplit("-", 1)[1])
    return range(1, 17) if "EVERY_LENGTH" in os.environ else range(1 + number % 4, 17, 4)


def test_there_are_twenty_prompts_of_five_kinds() -> None:
    found = prompts(target_of("llama"))
    assert len(found) == 20
    kinds: dict[str, set[int]] = {}
    for name in found:
        kinds.setdefault(name.rsplit("-", 1)[0], set()).update(lengths_of(name))
    assert len(kinds) == 5 and all(len(lengths) == 16 for lengths in kinds.values())


@pytest.mark.parametrize(("family", "method"), FAST)
def test_greedy_output_equals_transformers_generate(family: str, method: str) -> None:
    for draft_len, prompt in zip((1, 3, 5, 16, 7), FAST_PROMPTS, strict=True):
        assert_lossless(family, method, prompt, drafter_of(family, method, draft_len))


@pytest.mark.parametrize("method", ["ngram-0", "ngram-2", "draft-alike", "draft-itself"])
def test_one_drafter_writes_text_after_text(method: str) -> None:
    drafter = drafter_of("llama", method, None)
    accepted = [assert_lossless("llama", method, name, drafter) for name in FAST_PROMPTS * 2]
    assert sum(accepted) > 0


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "gpt_neox"])
@pytest.mark.parametrize("method", METHODS)
def test_greedy_output_equals_generate_for_all_prompts_and_draft_lengths(
    family: str, method: str
) -> None:
    for draft_len in range(1, 17) if method != "plain" else (1,):
        drafter = drafter_of(family, method, draft_len)
        for name in prompts(target_of(family)):
            if draft_len in lengths_of(name) or method == "plain":
                assert_lossless(family, method, name, drafter)
