"""Specifications of dialogues: fixed text, completions of the user's text, answers.

A dialogue is determined by a seed and its number, so a corpus can be interrupted and resumed.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from engine.config import Settings, UnitFloat
from engine.errors import PromptError

if TYPE_CHECKING:
    from engine.model.target import Target

Kind = Literal["line", "question", "turn", "passage", "article", "answer"]
_INFILL_TOKENS: dict[Kind, int]
_INFILL_TOKENS = {"line": 40, "question": 32, "turn": 72, "passage": 110, "article": 200}
_LONG_TOKENS: dict[Kind, int] = {**_INFILL_TOKENS, "passage": 220, "article": 640}
_LONG_BLOCK, _LONG_EVERY = 128, 5
"""Every fifth block of 128 dialogues has long texts, which are then generated together."""
_ANSWER_TEMPERATURES = (0.0, 0.0, 0.0, 0.0, 0.3, 0.7)
"""Mostly greedy, as drafters are mostly used; some sampled, for variety."""
_USER_TEMPERATURES = (0.7, 0.8, 0.9, 1.0)
_SLOT = re.compile(r"\{(\w+)\}")
_INFILL = re.compile(r" ?\[(line|question|turn|passage|article)\]")
_MARKS = ("USERTURNONE", "ANSWERONE", "USERTURNTWO")
_Texts = Annotated[tuple[str, ...], Field(strict=False, min_length=1)]


@dataclass(frozen=True, slots=True)
class Completion:
    """Text that the target generates: an answer, or part of a user's turn."""

    kind: Kind
    max_tokens: int
    temperature: float

    @property
    def min_tokens(self) -> int:
        """Articles and passages must reach half of their length."""
        return self.max_tokens // 2 if self.kind in ("article", "passage") else 0


Segment = str | Completion


@dataclass(frozen=True, slots=True)
class DialogueSpec:
    """One dialogue; `seed` determines all of its random choices."""

    number: int
    category: str
    seed: int
    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class GivenPrompt:
    """A prompt from a file: its category and the user's turns."""

    category: str
    turns: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """The chat template's texts between turns: head USER to_answer ANSWER to_user USER …"""

    head: str
    to_answer: str
    to_user: str

    @classmethod
    def of(cls, target: Target) -> ChatFormat:
        """The target's format; without a chat template, what a raw prompt begins with.

        Raises PromptError: it has no tokenizer, or its template alters the turns' text.
        """
        from engine.model.tokenizer import decode  # imports transformers: not at the page's start

        if target.tokenizer is None:
            raise PromptError(
                f"{target.name} has no tokenizer. Training needs one to make prompts."
            )
        if not target.has_chat_template:
            return cls(decode(target.tokenizer, target.encode("")), "", "")
        user, answer, again = _MARKS
        roles = zip(("user", "assistant", "user"), _MARKS, strict=True)
        turns = [{"role": role, "content": mark} for role, mark in roles]
        first, text = target.chat_text(turns[:1]), target.chat_text(turns)
        if not all(mark in text for mark in _MARKS) or user not in first:
            raise PromptError(f"{target.name}'s chat template does not show the turns as given.")
        head, to_answer = first.split(user)
        return cls(head, to_answer, text.split(answer)[1].split(again)[0])


class CorpusSettings(Settings):
    """Settings of dialogues, stored with the corpus, which is extended only with the same."""

    seed: int = Field(0, ge=0, le=2**31 - 1, description="seed of all dialogues")
    max_len: int = Field(
        1024, ge=32, le=1 << 17, description="maximum number of tokens per dialogue"
    )
    answer_tokens: int = Field(
        160, ge=8, le=8192, description="maximum number of tokens per answer"
    )
    given_share: UnitFloat = Field(
        0.5, description="share of dialogues from --prompts, where there are any"
    )


class DialogueTemplates(Settings):
    """Templates of generated dialogues.

    In openings and follow-ups, `{slot}` is replaced by a text of that slot and `[kind]` by the
    target's completion.
    """

    shares: dict[str, Annotated[float, Field(gt=0.0)]] = Field(
        description="share of each category", min_length=1
    )
    openings: dict[str, _Texts] = Field(description="user turns of each category")
    follow_up_shares: dict[str, UnitFloat] = Field(
        description="share of a category's dialogues that have a second turn"
    )
    follow_ups: _Texts = Field(description="second user turns")
    slots: dict[str, _Texts] = Field(description="texts that {slot} stands for")

    @model_validator(mode="after")
    def _complete(self) -> DialogueTemplates:
        turns = chain(self.follow_ups, *self.openings.values(), *self.slots.values())
        used = {_slot(name) for text in turns for name in _SLOT.findall(text)}
        for kind, names in (
            ("openings", self.shares.keys() - self.openings.keys()),
            ("slots", used - self.slots.keys()),
        ):
            if names:
                raise ValueError(f"{kind} must have {', '.join(sorted(names))}")
        return self

    def dialogue(self, chat: ChatFormat, number: int, settings: CorpusSettings) -> DialogueSpec:
        """Dialogue `number` of an endless stream."""
        seed = seed_of(settings.seed, "dialogue", number)
        draw = random.Random(seed)
        category = draw.choices(list(self.shares), list(self.shares.values()))[0]
        long = number // _LONG_BLOCK % _LONG_EVERY == _LONG_EVERY - 1
        opening = self._fill_slots(draw.choice(self.openings[category]), draw)
        answer = Completion("answer", settings.answer_tokens, draw.choice(_ANSWER_TEMPERATURES))
        segments = [chat.head, *_user_segments(opening, draw, long), chat.to_answer, answer]
        share = self.follow_up_shares.get(category, 0.0)
        if share and chat.to_user and draw.random() < share:
            text = self._fill_slots(draw.choice(self.follow_ups), draw)
            follow_up = _user_segments(text, draw, long)
            segments += [chat.to_user, *follow_up, chat.to_answer, answer]
        return DialogueSpec(number, category, seed, tuple(segments))

    def _fill_slots(self, text: str, draw: random.Random) -> str:
        """Fill slots, and slots in their texts, until none is left."""

        def slot_text(match: re.Match[str]) -> str:
            value = draw.choice(self.slots[_slot(match[1])])
            return value[0].upper() + value[1:] if match[1].endswith("_c") else value

        while _SLOT.search(text):
            text = _SLOT.sub(slot_text, text)
        return text


def _slot(name: str) -> str:
    """The slot that `topic_c` (capitalised) or `name2` (a second one) refers to."""
    return {"name2": "name", "name3": "name"}.get(name, name.removesuffix("_c"))


def _user_segments(text: str, draw: random.Random, long: bool) -> list[Segment]:
    """The fixed texts and completions of a user's turn."""
    segments: list[Segment] = []
    temperature = draw.choice(_USER_TEMPERATURES)
    at = 0
    for match in _INFILL.finditer(text):
        if match.start() > at:
            segments.append(text[at : match.start()])
        kind: Kind = match[1]  # type: ignore[assignment]
        limit = (_LONG_TOKENS if long else _INFILL_TOKENS)[kind]
        segments.append(Completion(kind, int(limit * draw.uniform(0.6, 1.0)), temperature))
        at = match.end()
    return [*segments, text[at:]] if at < len(text) else segments


def given_dialogue(
    chat: ChatFormat, prompt: GivenPrompt, number: int, settings: CorpusSettings
) -> DialogueSpec:
    """A dialogue whose user turns come from a file."""
    seed = seed_of(settings.seed, "given", number)
    temperature = random.Random(seed).choice(_ANSWER_TEMPERATURES)
    answer = Completion("answer", settings.answer_tokens, temperature)
    segments: list[Segment] = []
    for i, turn in enumerate(prompt.turns if chat.to_user else prompt.turns[:1]):
        segments += [(chat.to_user if i else chat.head) + turn + chat.to_answer, answer]
    return DialogueSpec(number, prompt.category, seed, tuple(segments))


def dialogue_specs(
    chat: ChatFormat,
    settings: CorpusSettings,
    templates: DialogueTemplates,
    prompts: Sequence[GivenPrompt],
    done: frozenset[int],
) -> Iterator[DialogueSpec]:
    """An endless stream of dialogues, except those that are done."""
    share = settings.given_share if prompts else 0.0
    for number in count():
        if number in done:
            continue
        # Dialogues from prompts are spread evenly over the stream.
        if int((number + 1) * share) > int(number * share):
            prompt = prompts[int(number * share) % len(prompts)]
            yield given_dialogue(chat, prompt, number, settings)
        else:
            yield templates.dialogue(chat, number, settings)


def seed_of(*parts: object) -> int:
    """A seed in [0, 2^63) derived from all parts, the same on every machine."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
