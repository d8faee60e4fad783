"""Sends prompts to a running engine at one concurrency after another, and times the answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from engine.errors import ConfigError, PlaygroundError
from engine.metrics import mat, mean_or_none, percentile, throughput, tok_s, tpot_ms
from playground.connect.client import Client, Reply
from playground.connect.readings import Reading, between
from playground.host.live import Message
from presets import PromptSuite

CONCURRENCIES = (1, 2, 4, 8, 16)
MAX_CONCURRENCY = 64


def read_concurrencies(text: str) -> tuple[int, ...]:
    """`1,2,4`. Raises ConfigError: naming what is allowed."""
    try:
        found = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        found = ()
    if not found or not all(1 <= one <= MAX_CONCURRENCY for one in found):
        raise ConfigError(
            f"concurrency must be numbers of 1 to {MAX_CONCURRENCY} like 1,2,4, got {text!r:.80}."
        )
    return found


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt of a suite; its first turn."""

    suite: str
    name: str
    category: str
    text: str

    @property
    def messages(self) -> list[Message]:
        return [{"role": "user", "content": self.text}]


def asked_of(suite: PromptSuite, limit: int) -> list[Asked]:
    """So many prompts of a suite, its categories in turn."""
    kinds: dict[str, list[Asked]] = {}
    for at, prompt in enumerate(suite.prompts):
        one = Asked(suite.name, prompt.id or str(at + 1), prompt.category, prompt.turns[0])
        kinds.setdefault(prompt.category, []).append(one)
    rounds = max(map(len, kinds.values()), default=0)
    mixed = [of_kind[i] for i in range(rounds) for of_kind in kinds.values() if i < len(of_kind)]
    return mixed[:limit]


@dataclass(frozen=True, slots=True)
class Answered:
    """What came back for a prompt: a reply, or why there is none."""

    asked: Asked
    reply: Reply | None
    error: str = ""


@dataclass(frozen=True, slots=True)
class Level:
    """All prompts once, so many at a time.

    Attributes:
        seconds: first request sent → last answer's end.
        counted: what the engine's counters grew by meanwhile; other clients' requests count too.
    """

    concurrency: int
    seconds: float
    answered: tuple[Answered, ...]
    counted: Reading | None = None
    restarted: bool = False

    @property
    def replies(self) -> list[Reply]:
        return [one.reply for one in self.answered if one.reply is not None]

    @property
    def num_failed(self) -> int:
        return len(self.answered) - len(self.replies)

    @property
    def throughput(self) -> float:
        new_tokens = sum(reply.num_new_tokens for reply in self.replies)
        return throughput(new_tokens, self.seconds) or 0.0

    @property
    def tok_s(self) -> float | None:
        """Decoding rate of one request, pooled; without the prompt."""
        return tok_s((reply.num_new_tokens, reply.decode_s) for reply in self.replies)

    def ttft_ms(self, q: float = 50) -> float | None:
        """Percentile of the time to the first token."""
        values = [1000 * reply.ttft_s for reply in self.replies]
        return percentile(values, q) if values else None

    @property
    def tpot_ms(self) -> float | None:
        """Mean over requests."""
        values = (tpot_ms(reply.num_new_tokens, reply.decode_s) for reply in self.replies)
        return mean_or_none([value for value in values if value is not None])

    @property
    def mat(self) -> float | None:
        """From the requests' own figures where the engine gives them, else from its counters."""
        told = [reply.drafting for reply in self.replies if reply.drafting is not None]
        if told:
            return mat(sum(d.accepted for d in told), sum(d.steps for d in told))
        return self.counted.mat if self.counted else None


@dataclass(frozen=True, slots=True)
class Load:
    """What is sent: prompts, how much is written for each, how long it may take in all."""

    asked: tuple[Asked, ...]
    concurrencies: tuple[int, ...] = CONCURRENCIES
    max_new_tokens: int = 128
    max_seconds: float = 300.0


async def replay(client: Client, load: Load) -> AsyncIterator[Level]:
    """One level after another; what is not answered when the time is up is not waited for."""
    ends = time.monotonic() + load.max_seconds
    for concurrency in load.concurrencies:
        if time.monotonic() > ends:
            return
        before = await _counters(client)
        began = time.perf_counter()
        answered = await _level(client, load, concurrency, ends)
        seconds = time.perf_counter() - began
        after = await _counters(client)
        counted, restarted = between(before, after) if before and after else (None, False)
        yield Level(concurrency, seconds, tuple(answered), counted, restarted)


async def _level(client: Client, load: Load, concurrency: int, ends: float) -> list[Answered]:
    """Workers take prompts until none is left."""
    waiting, answered = list(reversed(load.asked)), list[Answered]()

    async def work() -> None:
        while waiting and time.monotonic() < ends:
            asked = waiting.pop()
            try:
                async with asyncio.timeout(max(1.0, ends - time.monotonic())):
                    reply = await client.answer(asked.messages, max_new_tokens=load.max_new_tokens)
                answered.append(Answered(asked, reply))
            except PlaygroundError as error:
                answered.append(Answered(asked, None, str(error)))
            except TimeoutError:
                answered.append(Answered(asked, None, "The time limit was reached."))

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(load.asked))):
            group.create_task(work())
    return answered


async def _counters(client: Client) -> Reading | None:
    """None where the engine was not started with counters."""
    try:
        return await client.read()
    except PlaygroundError:
        return None


def same_texts(ours: Level, plain: Level) -> tuple[int, int]:
    """Of the prompts that both answered: how many texts are equal, and how many there are."""
    texts = {one.asked: one.reply.text for one in plain.answered if one.reply is not None}
    both = [
        (one.reply.text, texts[one.asked])
        for one in ours.answered
        if one.reply is not None and one.asked in texts
    ]
    return sum(a == b for a, b in both), len(both)


def failures(levels: Sequence[Level]) -> list[str]:
    """What went wrong, each sentence once."""
    return list(dict.fromkeys(one.error for lv in levels for one in lv.answered if one.error))
