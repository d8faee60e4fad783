"""Where a text ends: exactly, also in the middle of an accepted path, whatever was drafted."""

from __future__ import annotations

import copy
import functools
import random
from typing import Any

import pytest

from engine.config import Limits, Sampling
from engine.decode import decode
from engine.drafters.autoregressive import AutoregressiveConfig
from engine.errors import ConfigError, PromptError
from engine.model.target import Target
from engine.model.text import whole_text
from engine.steps import End, Prefill, Record, Step
from tests.engine.scripted import ScriptedDrafter
from tests.models import VOCAB, build_context, plain_greedy, tiny_model, tiny_target

PROMPT = [40, 41, 42, 40, 41]


@functools.cache
def endless() -> Target:
    """A target that no token ends."""
    target = tiny_target(eos_token_id=None)
    tokenizer: Any = copy.deepcopy(target.tokenizer)
    tokenizer.eos_token = None
    target.tokenizer = tokenizer
    return target


@functools.cache
def text() -> list[int]:
    """What the target writes."""
    return plain_greedy(endless(), PROMPT, 40)


def write(
    target: Target, limits: Limits, *, length: int, prompt: list[int] = PROMPT, truth: float = 1.0
) -> list[Record]:
    expected = text() if prompt == PROMPT else plain_greedy(endless(), prompt, 40)
    drafter = ScriptedDrafter(
        expected, vocab=VOCAB, shape=lambda rng: list(range(-1, length)), truth=truth
    )
    return list(decode(target, drafter, prompt, limits=limits))


def end_of(records: list[Record]) -> End:
    end = records[-1]
    assert isinstance(end, End)
    return end


def first_of(tokens: list[int]) -> list[int]:
    """Positions whose token did not occur before."""
    return [i for i, token in enumerate(tokens) if token not in tokens[:i]]


@pytest.mark.parametrize("length", [0, 1, 4, 16])
def test_the_text_ends_with_its_first_eos_token(length: int) -> None:
    for at in first_of(text())[:8]:
        target = endless()
        target.config.eos_token_id = text()[at]
        try:
            end = end_of(write(target, Limits(max_new_tokens=40), length=length))
            assert plain_greedy_of(target, at) == text()[: at + 1]
            assert list(end.output_ids) == text()[: at + 1]
            assert end.finish_reason == "eos"
            ignoring = Limits(max_new_tokens=20, ignore_eos=True)
            assert list(end_of(write(target, ignoring, length=length)).output_ids) == text()[:20]
        finally:
            target.config.eos_token_id = None


@pytest.mark.parametrize("length", [0, 4, 16])
def test_the_text_ends_with_its_first_stop_token_whatever_becomes_of_eos(length: int) -> None:
    tokenizer = endless().tokenizer
    for at in first_of(text())[1:8]:
        limits = Limits(max_new_tokens=40, stop_token_ids=(text()[at], 0), ignore_eos=True)
        end = end_of(write(endless(), limits, length=length))
        assert list(end.output_ids) == text()[: at + 1] and end.finish_reason == "stop"
        assert whole_text(tokenizer, end.output_ids, limits) == whole_text(tokenizer, text()[:at])


def plain_greedy_of(target: Target, at: int) -> list[int]:
    target.model.generation_config.eos_token_id = text()[at]
    try:
        return plain_greedy(target, PROMPT, 40)
    finally:
        target.model.generation_config.eos_token_id = None


@pytest.mark.parametrize("length", [0, 1, 4, 16])
@pytest.mark.parametrize("count", [1, 2, 3, 5, 6, 17, 18])
def test_max_new_tokens_is_exact(length: int, count: int) -> None:
    records = write(endless(), Limits(max_new_tokens=count), length=length)
    end = end_of(records)
    assert list(end.output_ids) == text()[:count]
    assert end.finish_reason == "length"
    kept = sum(r.num_committed for r in records if isinstance(r, Step))
    assert kept + 1 == count


def pieces_of(target: Target) -> list[str]:
    assert target.tokenizer is not None
    return [str(target.tokenizer.decode([i], skip_special_tokens=True)) for i in text()]


@pytest.mark.parametrize("length", [0, 1, 4, 16])
def test_the_text_ends_with_the_token_that_completes_a_stop_string(length: int) -> None:
    target = endless()
    pieces = pieces_of(target)
    readable = [i for i, piece in enumerate(pieces) if piece.isascii() and piece.isprintable()]
    tried = 0
    for at in readable:
        if pieces[at] == "" or pieces[at] in "".join(pieces[:at]):
            continue
        tried += 1
        limits = Limits(max_new_tokens=40, stop=("never in it", pieces[at]))
        end = end_of(write(target, limits, length=length))
        assert list(end.output_ids) == text()[: at + 1]
        assert end.finish_reason == "stop"
    assert tried >= 5


def test_the_earliest_reason_wins() -> None:
    target = endless()
    at = first_of(text())[5]
    target.config.eos_token_id = text()[at]
    try:
        reasons = [
            end_of(write(target, Limits(max_new_tokens=n), length=16)).finish_reason
            for n in (at, at + 1, at + 2)
        ]
    finally:
        target.config.eos_token_id = None
    assert reasons == ["length", "eos", "eos"]


@pytest.mark.parametrize("family", ["llama", "opt", "gemma3_text"])
@pytest.mark.parametrize("length", [0, 1, 16])
@pytest.mark.parametrize("room", [1, 2, 3, 9])
def test_a_full_context_ends_the_text(family: str, length: int, room: int) -> None:
    target = tiny_target(family, max_position_embeddings=48, eos_token_id=None)
    target.model.generation_config.eos_token_id = None
    rng = random.Random(room)
    prompt = [rng.randrange(250) for _ in range(48 - room)]
    expected = plain_greedy(target, prompt, room)
    drafter = ScriptedDrafter(
        [*expected, *([7] * 20)], vocab=VOCAB, shape=lambda rng: list(range(-1, length))
    )
    limits = Limits(max_new_tokens=100, ignore_eos=True)
    records = list(decode(target, drafter, prompt, limits=limits))
    assert list(end_of(records).output_ids) == expected
    assert end_of(records).finish_reason == "context"
    last_rows = [r.context_len + max(depths(r)) for r in records if isinstance(r, Step)]
    assert all(row < 48 for row in last_rows)
    assert all(r.num_committed > 0 for r in records if isinstance(r, Step)), "a step for nothing"


def depths(step: Step) -> list[int]:
    found = [0]
    for parent in step.parents[1:]:
        found.append(found[parent] + 1)
    return found


def test_cancelling_ends_the_text_before_the_next_step() -> None:
    drafter = AutoregressiveConfig().build(build_context(endless()))
    asked = iter([False, False, True])
    records = list(decode(endless(), drafter, PROMPT, cancelled=lambda: next(asked)))
    assert [type(r) for r in records] == [Prefill, Step, Step, End]
    assert end_of(records).finish_reason == "cancelled"
    assert list(end_of(records).output_ids) == text()[:3]


def test_a_long_prompt_is_read_in_parts_and_can_be_cancelled_between_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("engine.decode.PREFILL_ROWS", 2)
    target, drafter = endless(), AutoregressiveConfig().build(build_context(endless()))
    target.prefixes.clear()
    read: list[int] = []

    def records(**how: Any) -> list[Record]:
        limits = Limits(max_new_tokens=8)
        return list(decode(target, drafter, PROMPT, limits=limits, prefix_caching=True, **how))

    asked = iter([False, True])
    (end,) = records(cancelled=lambda: next(asked), prefilled=read.append)
    assert end == End((), "cancelled", 0) and read == [2, 4]
    assert len(target.prefixes._texts) == 0, "half a prompt is kept"
    assert list(end_of(records(prefilled=read.append)).output_ids) == text()[:8]
    assert read == [2, 4, 2, 4, 5]


def test_closing_the_iterator_early_frees_cache_and_drafter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = tiny_target()
    caches: list[Any] = []
    new_cache = target.new_cache
    monkeypatch.setattr(
        target, "new_cache", lambda rows: caches.append(new_cache(rows)) or caches[-1]
    )
    drafter = ScriptedDrafter(text(), vocab=VOCAB, shape=lambda rng: [-1, 0, 0])
    records = decode(target, drafter, PROMPT)
    next(records), next(records)
    assert caches[0].buffers and not drafter.finished
    records.close()
    assert not caches[0].buffers and drafter.finished


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ([], "at least one token"),
        ([1] * 256, "256 tokens"),
        ([1, VOCAB], f"got {VOCAB}"),
        ([1, -1], "got -1"),
    ],
)
def test_a_bad_prompt_is_refused_with_the_number(prompt: list[int], says: str) -> None:
    drafter = AutoregressiveConfig().build(build_context(endless()))
    with pytest.raises(PromptError, match=says):
        next(decode(endless(), drafter, prompt))


def test_stop_strings_need_a_tokenizer() -> None:
    target = Target(tiny_model(), None, name="mute")
    drafter = AutoregressiveConfig().build(build_context(target))
    with pytest.raises(ConfigError, match="no tokenizer"):
        next(decode(target, drafter, PROMPT, limits=Limits(stop=("x",))))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_seed_decides_the_text(temperature: float) -> None:
    def output(seed: int) -> tuple[int, ...]:
        drafter = AutoregressiveConfig().build(build_context(endless()))
        sampling = Sampling(temperature=temperature, seed=seed)
        limits = Limits(max_new_tokens=20, ignore_eos=True)
        return end_of(
            list(decode(endless(), drafter, PROMPT, sampling=sampling, limits=limits))
        ).output_ids

    assert output(1) == output(1)
    assert (output(1) == output(2)) == (temperature == 0.0)
