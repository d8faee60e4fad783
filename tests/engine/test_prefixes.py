"""A chat's next turn reads only what is new, and says what it would have said anyway."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from engine.drafters.base import Drafter
from engine.model.prefixes import MAX_TEXTS, PrefixCache
from engine.model.target import Target
from engine.proposal import Needs
from tests.engine.drafters.judges import Text, write
from tests.engine.methods import METHODS, drafter_for, moved, target_of
from tests.engine.scripted import ScriptedDrafter
from tests.engine.test_verify_tree import SHAPES
from tests.models import VOCAB, alike, plain_greedy, tiny_target

FIRST = [3, 4, 5, 6, 7, 8, 9, 3, 4, 5, 6, 7, 8, 9, 3, 4, 5, 6, 2, 1]
OTHER = [9, 8, 7, 9, 8, 7, 9, 8]
QUESTION = [10, 11, 3, 4, 5, 6, 7, 10, 11]
TOKENS = 14


turn = functools.partial(write, tokens=TOKENS, prefix_caching=True)
anew = functools.partial(write, tokens=TOKENS)


def scripted(target: Target, prompt: list[int], shape: str = "any") -> ScriptedDrafter:
    """Right now and then, in trees; its last draft goes on behind the end of the text."""
    output = plain_greedy(target, prompt, TOKENS + 8)
    return ScriptedDrafter(output, vocab=VOCAB, shape=SHAPES[shape], truth=0.8)


@pytest.mark.parametrize(
    "family", ["llama", "mistral", "gemma3_text", "qwen3_5_text", "lfm2", "jamba"]
)
def test_the_next_turn_reads_only_what_is_new(family: str) -> None:
    """Full and sliding attention, delta rule, convolution and state space; also a long way back."""
    target = tiny_target(family, eos_token_id=None)
    recurrent = len(target.recurrent) > 0

    def ask(prompt: list[int], **how: Any) -> tuple[int, list[int]]:
        answer = turn(target, scripted(target, prompt), prompt, **how)
        assert answer.output == plain_greedy(target, prompt, len(answer.output))
        assert answer.prefill.num_prompt_tokens == len(prompt)
        return answer.prefill.num_cached, answer.output

    cached, text = ask(FIRST)
    assert cached == 0
    second = [*FIRST, *text, *QUESTION]
    assert ask(OTHER)[0] == 0  # another chat in between
    cached, text = ask(second)
    assert cached - len(FIRST) - TOKENS in (-1, 0)
    # Stopped after two steps: what it said until then is the beginning of the next prompt.
    third = [*second, *text, 5]
    steps = iter(range(99))
    cached, text = ask(third, cancelled=lambda: next(steps) >= 2)
    assert cached - len(second) - TOKENS in (-1, 0) and len(text) < TOKENS
    assert ask([*third, *text, 4])[0] >= len(third) + len(text) - 1
    # The last question asked otherwise, then the first: states are kept of a few ends only.
    assert ask([*third[:-1], 6, 6])[0] - len(third) in (-2, -1)
    assert ask([*FIRST[:-3], 12])[0] == (0 if recurrent else len(FIRST) - 3)


ONE_OF_EACH = list({METHODS[n]["decoding_type"]: n for n in reversed(METHODS)}.values())
NAMES = sorted([*ONE_OF_EACH, "draft-model-text"])
PRIVATE: dict[str, dict[str, Any]] = {
    "ngram": {"is_public_pool": False},
    "combined": {"model": {"decoding_type": "Draft_Target", "speculative_model": "small"}},
}
"""What keeps a drafter from knowing the texts of another."""
NEVER = ("plain", "user")
"""No pair occurs twice, from which the latter would draft."""


class Case:
    """A method on a tiny target that has not read anything yet."""

    def __init__(self, name: str) -> None:
        self.name, self.target = name, target_of(name)
        self.small = moved(alike(eos_token_id=None), self.target.device)
        self.target.prefixes.clear()

    def drafter(self) -> Drafter:
        changes = PRIVATE.get(self.name, {})
        return drafter_for(self.target, self.name, small=self.small, **changes)


def drafts(answer: Text) -> bool:
    return any(len(step.tokens) > 1 for step in answer.steps)


@pytest.mark.parametrize("name", NAMES)
def test_a_method_answers_twice_what_plain_decoding_has_answered(name: str) -> None:
    """Texts of two needs are kept of one prompt, and the second run replaces its own."""
    case = Case(name)
    drafter = case.drafter()
    plain = drafter_for(case.target, "plain")
    answers = [turn(case.target, each, FIRST) for each in (plain, drafter, drafter)]
    assert [answer.output for answer in answers] == 3 * [plain_greedy(case.target, FIRST, TOKENS)]
    assert answers[2].prefill.num_cached == len(FIRST) - 1
    assert len(case.target.prefixes._texts) == (1 if drafter.needs == Needs() else 2)
    assert drafts(answers[1]) == drafts(answers[2]) == (name not in NEVER)


@pytest.mark.parametrize("name", NAMES)
def test_a_drafter_goes_on_too_and_drafts_what_it_would_have(name: str) -> None:
    """Of the same text a drafter that read it from its beginning drafts the same tokens."""
    case = Case(name)
    target, small, warm, cold = case.target, case.small, case.drafter(), case.drafter()
    first = turn(target, warm, FIRST)
    prompt = [*FIRST, *first.output, *QUESTION]
    goes_on = turn(target, warm, prompt)
    assert goes_on.prefill.num_cached >= len(FIRST) + TOKENS - 1
    if name in ("draft-model", "draft-model-text", "pard", "combined"):
        assert 0 < len(small.prefixes._texts) <= 2  # text may be tokenized anew at its end
    whole = anew(target, cold, prompt)
    assert goes_on.output == whole.output == plain_greedy(target, prompt, TOKENS)
    if not warm.traits.remembers:
        assert [s.tokens for s in goes_on.steps] == [s.tokens for s in whole.steps]
    assert drafts(goes_on) == (name not in NEVER)


@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_read_in_parts_shows_a_drafter_the_same(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(name)
    whole = anew(case.target, case.drafter(), FIRST)
    monkeypatch.setattr("engine.decode.PREFILL_ROWS", 7)
    parts = anew(case.target, case.drafter(), FIRST)
    assert parts.output == whole.output
    assert [s.tokens for s in parts.steps] == [s.tokens for s in whole.steps]


def test_the_texts_used_last_are_kept_within_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target(eos_token_id=None)

    def kept(prefixes: PrefixCache, text: list[int]) -> int:
        cache = target.new_cache(4)
        prefixes.restore([*text, 0], cache)
        return cache.length

    def read(prefixes: PrefixCache, text: list[int]) -> None:
        cache = target.new_cache(4)
        target.prefill(text, cache, Needs())
        prefixes.keep(text, cache)

    texts = [[number, *FIRST] for number in range(20, 20 + MAX_TEXTS + 1)]
    many = PrefixCache()
    for text in texts:
        read(many, text)
        assert kept(many, texts[0]) == len(text)
    assert len(many._texts) == MAX_TEXTS
    assert kept(many, texts[0]) == len(texts[0])  # used again and again
    assert kept(many, texts[1]) == 0
    each = many.num_bytes // MAX_TEXTS
    monkeypatch.setattr("engine.model.prefixes.MAX_BYTES", 4 * each - 1)
    few = PrefixCache()
    for text in texts:
        read(few, text)
    assert (len(few._texts), few.num_bytes) == (3, 3 * each)
    read(few, texts[0] * 4)  # larger than all that is allowed
    assert [kept(few, text) > 0 for text in texts[-4:]] == [False, True, True, True]
    longer = [*texts[-1], 5, 6]
    read(few, longer)  # holds the shorter one
    assert kept(few, [*texts[-1], 5, 6]) == len(longer) and len(few._texts) == 3
