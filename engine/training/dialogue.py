"""Plans of dialogues: what is said for the user, what the target fills in, where it answers.

A dialogue's plan follows from a seed and its number alone, so a corpus can be cut anywhere and
continued.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from engine.errors import ConfigError, PromptError
from engine.model.target import Target
from engine.training.seeds import FOLLOW_UPS, OPENINGS
from engine.training.words import LISTS

GapKind = Literal["line", "question", "turn", "passage", "article"]
_GAP_TOKENS: dict[str, int] = {
    "line": 40,
    "question": 32,
    "turn": 72,
    "passage": 110,
    "article": 200,
}
_LONG_TOKENS = {"passage": 220, "article": 640}
_LONG_BLOCK, _LONG_EVERY = 128, 5
"""Blocks of dialogues, of which every so many have long texts: they run side by side then."""
_SHARES = {
    "chat": 0.30,
    "translation": 0.12,
    "summarisation": 0.18,
    "qa": 0.13,
    "maths": 0.14,
    "retrieval": 0.13,
}
_FOLLOW_UP_SHARE = 0.35
"""Chats that have a second turn."""
_DERIVED = {"name2": "name", "name3": "name"}
_PLACEHOLDER = re.compile(r"\{(\w+)\}")
_GAP = re.compile(r" ?\[(line|question|turn|passage|article)\]")
_MARKS = ("USERTURNONE", "ANSWERONE", "USERTURNTWO")


@dataclass(frozen=True, slots=True)
class Say:
    """Text that is put into the target's mouth."""

    text: str


@dataclass(frozen=True, slots=True)
class Gap:
    """Text of the user that the target writes."""

    kind: GapKind
    max_tokens: int
    temperature: float

    @property
    def min_tokens(self) -> int:
        """Articles and passages must reach half of their length."""
        return self.max_tokens // 2 if self.kind in ("article", "passage") else 0


@dataclass(frozen=True, slots=True)
class Answer:
    """The target answers."""

    max_tokens: int
    temperature: float


Segment = Say | Gap | Answer


@dataclass(frozen=True, slots=True)
class Plan:
    """One dialogue to be.

    Attributes:
        seed: of every random draw in it.
    """

    number: int
    category: str
    seed: int
    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class Frame:
    """What a chat template puts around turns: head USER to_answer ANSWER to_user USER …"""

    head: str
    to_answer: str
    to_user: str

    @classmethod
    def of(cls, target: Target) -> Frame:
        """The target's frame; three empty strings for a model without a chat template.

        Raises:
            PromptError: it has no tokenizer, or its template changes the turns' text.
        """
        if target.tokenizer is None:
            raise PromptError(
                f"{target.name} has no tokenizer. Training needs one to make prompts."
            )
        if not target.has_chat_template:
            return cls("", "", "")
        user, answer, again = _MARKS
        turns = [
            {"role": "user", "content": user},
            {"role": "assistant", "content": answer},
            {"role": "user", "content": again},
        ]
        text = str(
            target.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        )
        first = str(
            target.tokenizer.apply_chat_template(
                turns[:1], tokenize=False, add_generation_prompt=True
            )
        )
        if not all(mark in text for mark in _MARKS) or user not in first:
            raise PromptError(f"{target.name}'s chat template does not show the turns as given.")
        head, to_answer = first.split(user)
        to_user = text.split(answer)[1].split(again)[0]
        return cls(head, to_answer, to_user)


def seed_of(*parts: object) -> int:
    """A seed in [0, 2^63) that depends on every part, the same on every machine."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def self_made(frame: Frame, number: int, *, seed: int, answer_tokens: int) -> Plan:
    """Dialogue `number` of an endless stream of self-made ones."""
    own = seed_of(seed, "dialogue", number)
    draw = random.Random(own)
    category = draw.choices(list(_SHARES), list(_SHARES.values()))[0]
    long = number // _LONG_BLOCK % _LONG_EVERY == _LONG_EVERY - 1
    opening = _expand(draw.choice(OPENINGS[category]), draw)
    answer = Answer(answer_tokens, _answer_temperature(draw))
    segments = [Say(frame.head), *_turn(opening, draw, long), Say(frame.to_answer), answer]
    if category == "chat" and frame.to_user and draw.random() < _FOLLOW_UP_SHARE:
        follow = _turn(_expand(draw.choice(FOLLOW_UPS), draw), draw, long)
        segments += [Say(frame.to_user), *follow, Say(frame.to_answer), answer]
    return Plan(number, category, own, tuple(segments))


def given(frame: Frame, prompt: GivenPrompt, number: int, *, seed: int, answer_tokens: int) -> Plan:
    """A dialogue whose user turns come from a file."""
    own = seed_of(seed, "given", number)
    answer = Answer(answer_tokens, _answer_temperature(random.Random(own)))
    segments: list[Segment] = []
    for i, turn in enumerate(prompt.turns):
        segments.append(Say((frame.to_user if i else frame.head) + turn + frame.to_answer))
        segments.append(answer)
        if not frame.to_user:
            break
    return Plan(number, prompt.category, own, tuple(segments))


@dataclass(frozen=True, slots=True)
class GivenPrompt:
    """A question of a file: its kind and the user's turns."""

    category: str
    turns: tuple[str, ...]


def read_prompts(path: Path) -> list[GivenPrompt]:
    """Questions of a file in Spec-Bench's layout: per line `{"category": …, "turns": [ … ]}`.

    Raises:
        ConfigError: unreadable, or a line is no such object; names file and line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompts: {path} could not be read: {error}.") from error
    found = []
    for i, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
            turns = tuple(value["turns"])
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(
                f'{path}, line {i} must be like {{"category": …, "turns": ["…"]}}, got {line:.80}'
            ) from error
        if not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
            raise ConfigError(f"{path}, line {i}: turns must be texts, got {value['turns']!r:.80}.")
        found.append(GivenPrompt(str(value.get("category", "given")), turns))
    if not found:
        raise ConfigError(f"{path} holds no prompts. Give a file with one question per line.")
    return found


def _answer_temperature(draw: random.Random) -> float:
    """Mostly greedy, as drafters are used most; some livelier, so that more ground is covered."""
    return draw.choice((0.0, 0.0, 0.0, 0.0, 0.3, 0.7))


def _turn(text: str, draw: random.Random, long: bool) -> list[Segment]:
    """A user's turn: what is between gaps is said as it is."""
    segments: list[Segment] = []
    temperature = draw.choice((0.7, 0.8, 0.9, 1.0))
    at = 0
    for match in _GAP.finditer(text):
        if match.start() > at:
            segments.append(Say(text[at : match.start()]))
        kind = match[1]
        most = _LONG_TOKENS.get(kind, _GAP_TOKENS[kind]) if long else _GAP_TOKENS[kind]
        size = int(most * draw.uniform(0.6, 1.0))
        segments.append(Gap(kind, size, temperature))  # type: ignore[arg-type]
        at = match.end()
    if at < len(text):
        segments.append(Say(text[at:]))
    return segments


def _expand(text: str, draw: random.Random) -> str:
    """Fill every `{name}`, again and again until none is left."""

    def one(match: re.Match[str]) -> str:
        name = match[1]
        if name.endswith("_c"):
            value = draw.choice(LISTS[name[:-2]])
            return value[0].upper() + value[1:]
        return draw.choice(LISTS[_DERIVED.get(name, name)])

    while _PLACEHOLDER.search(text):
        text = _PLACEHOLDER.sub(one, text)
    return text
