"""Where a text ends: exactly, also in the middle of an accepted path, whatever was drafted."""

from __future__ import annotations

import copy
import functools
import gc
import random
from typing import Any

import pytest

from engine.config import Limits
from engine.decode import decode
from engine.drafters.autoregressive import AutoregressiveConfig
from engine.errors import ConfigError, PromptError
from engine.model.target import Target
from engine.model.text import whole_text
from engine.steps import End, Record
from tests.engine.drafters import judges
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


def write(limits: Limits, length: int) -> judges.Text:
    """With drafts of this length, all of them right."""
    drafter = ScriptedDrafter(text(), vocab=VOCAB, shape=lambda rng: list(range(-1, length)))
    return judges.write(endless(), drafter, PROMPT, limits=limits)


def first_of(tokens: list[int]) -> list[int]:
    """Positions whose token did not occur before."""
    return [i for i, token in enumerate(tokens) if token not in tokens[:i]]


@pytest.mark.parametrize("length", [0, 1, 4, 16])
@pytest.mark.parametrize("kind", ["eos", "stop"])
def test_the_text_ends_with_its_first_eos_or_stop_token(
    kind: str, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for at in first_of(text())[:8]:
        limits, ignoring = (
            Limits(max_new_tokens=40, ignore_eos=ignored) for ignored in (False, True)
        )
        if kind == "eos":
            monkeypatch.setattr(endless().config, "eos_token_id", text()[at])
            assert write(ignoring, length).output == text()
        else:
            limits = ignoring.replace(stop_token_ids=(text()[at], 0))
        end = write(limits, length).end
        assert list(end.output_ids) == text()[: at + 1] and end.finish_reason == kind
        if kind == "stop":
            whole = whole_text(endless().tokenizer, end.output_ids, limits)
            assert whole == whole_text(endless().tokenizer, text()[:at])


@pytest.mark.parametrize("length", [0, 1, 4, 16])
def test_the_text_ends_with_the_token_that_completes_a_stop_string(length: int) -> None:
    tokenizer: Any = endless().tokenizer
    pieces = [str(tokenizer.decode([i], skip_special_tokens=True)) for i in text()]
    tried = 0
    for at, piece in enumerate(pieces):
        if not (piece.isascii() and piece.isprintable()) or piece in "".join(pieces[:at]):
            continue
        tried += 1
        end = write(Limits(max_new_tokens=40, stop=("never in it", piece)), length).end
        assert list(end.output_ids) == text()[: at + 1] and end.finish_reason == "stop"
    assert tried >= 5


@pytest.mark.parametrize("length", [0, 1, 4, 16])
@pytest.mark.parametrize("count", [1, 2, 3, 5, 6, 17, 18])
def test_max_new_tokens_is_exact(length: int, count: int) -> None:
    ours = write(Limits(max_new_tokens=count), length)
    assert ours.output == text()[:count] and ours.end.finish_reason == "length"
    assert 1 + sum(step.num_committed for step in ours.steps) == count


def test_the_earliest_reason_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    at = first_of(text())[5]
    monkeypatch.setattr(endless().config, "eos_token_id", text()[at])
    limits = (Limits(max_new_tokens=n) for n in (at, at + 1, at + 2))
    reasons = [write(each, 16).end.finish_reason for each in limits]
    assert reasons == ["length", "eos", "eos"]


@pytest.mark.parametrize("family", ["llama", "opt", "gemma3_text"])
@pytest.mark.parametrize("length", [0, 1, 16])
@pytest.mark.parametrize("room", [1, 2, 3, 9])
def test_a_full_context_ends_the_text(family: str, length: int, room: int) -> None:
    target = tiny_target(family, max_position_embeddings=48, eos_token_id=None)
    rng = random.Random(room)
    prompt = [rng.randrange(250) for _ in range(48 - room)]
    expected = plain_greedy(target, prompt, room)
    drafter = ScriptedDrafter(
        [*expected, *([7] * 20)], vocab=VOCAB, shape=lambda rng: list(range(-1, length))
    )
    ours = judges.write(target, drafter, prompt, tokens=100)
    assert ours.output == expected and ours.end.finish_reason == "context"
    assert all(step.context_len + step.num_drafted < 48 for step in ours.steps)
    assert all(step.num_committed > 0 for step in ours.steps), "a step for nothing"


def test_cancelling_ends_the_text_before_the_next_step() -> None:
    drafter = AutoregressiveConfig().build(build_context(endless()))
    asked = iter([False, False, True])
    ours = judges.write(endless(), drafter, PROMPT, cancelled=lambda: next(asked))
    assert len(ours.steps) == 2 and ours.end.finish_reason == "cancelled"
    assert ours.output == text()[:3]


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
    *_, whole = records(prefilled=read.append)
    assert isinstance(whole, End) and list(whole.output_ids) == text()[:8]
    assert read == [2, 4, 2, 4, 5]


def test_closing_the_iterator_early_frees_cache_and_drafter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = tiny_target()
    caches: list[Any] = []
    new_cache = target.new_cache
    monkeypatch.setattr(
        target, "new_cache", lambda rows, **_: caches.append(new_cache(rows)) or caches[-1]
    )
    drafter = ScriptedDrafter(text(), vocab=VOCAB, shape=lambda rng: [-1, 0, 0])
    records = decode(target, drafter, PROMPT)
    next(records), next(records)
    assert caches[0].kv.tensors and not drafter.finished
    records.close()
    assert not caches[0].kv.tensors and drafter.finished


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


def test_garbage_is_not_collected_in_the_middle_of_a_text() -> None:
    """A full collection holds up a step for as long as many; two texts may overlap."""
    drafter = AutoregressiveConfig().build(build_context(endless()))
    texts = [decode(endless(), drafter, PROMPT, limits=Limits(max_new_tokens=5)) for _ in range(2)]
    assert gc.isenabled()
    next(texts[0])
    assert not gc.isenabled()
    next(texts[1])
    texts[0].close()
    assert not gc.isenabled(), "the second goes on"
    assert all(not gc.isenabled() for record in texts[1] if not isinstance(record, End))
    assert gc.isenabled()
    gc.disable()
    try:
        write(Limits(max_new_tokens=5), 1)
        assert not gc.isenabled(), "it was off before"
    finally:
        gc.enable()
