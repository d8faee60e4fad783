"""Sends prompts to a running engine, a fixed number at a time, and times the answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from engine.errors import ConfigError, PlaygroundError
from engine.metrics import mat, tok_s
from playground.connect.client import Client, Reply
from playground.connect.readings import Reading, between
from playground.experiments.plan import Item

MAX_CONCURRENCY = 64


def read_concurrencies(text: str) -> tuple[int, ...]:
    """`1,2,4`. Raises ConfigError: naming what is allowed."""
    try:
        numbers = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        numbers = ()
    if not numbers or not all(1 <= number <= MAX_CONCURRENCY for number in numbers):
        raise ConfigError(
            f"concurrency must be numbers of 1 to {MAX_CONCURRENCY} like 1,2,4, got {text!r:.80}."
        )
    return numbers


@dataclass(frozen=True, slots=True)
class Outcome:
    """A prompt's reply, or why there is none."""

    prompt: Item
    reply: Reply | None
    error: str = ""


@dataclass(frozen=True, slots=True)
class Level:
    """All prompts once, at one concurrency.

    Attributes:
        seconds: first request sent → last answer's end.
        counters: growth of the engine's counters meanwhile, other clients' requests included.
    """

    concurrency: int
    seconds: float
    outcomes: tuple[Outcome, ...]
    counters: Reading | None = None
    restarted: bool = False

    @property
    def replies(self) -> list[Reply]:
        return [one.reply for one in self.outcomes if one.reply is not None]

    @property
    def num_failed(self) -> int:
        return len(self.outcomes) - len(self.replies)

    @property
    def tok_s(self) -> float | None:
        """Decoding rate of one request, pooled; without the prompt."""
        return tok_s((reply.num_new_tokens, reply.decode_s) for reply in self.replies)

    @property
    def mat(self) -> float | None:
        """From the requests' own figures if the engine reports them, else from its counters."""
        drafts = [reply.drafting for reply in self.replies if reply.drafting is not None]
        if drafts:
            return mat(sum(d.accepted for d in drafts), sum(d.steps for d in drafts))
        return self.counters.mat if self.counters else None


@dataclass(frozen=True, slots=True)
class Load:
    """The prompts to send, the length of an answer, and the time limit of each concurrency."""

    prompts: Sequence[Item]
    concurrencies: tuple[int, ...] = (1, 2, 4, 8, 16)
    max_new_tokens: int = 128
    max_seconds: float = 300.0


async def measure_level(
    client: Client, load: Load, concurrency: int, outcomes: list[Outcome]
) -> Level:
    """Send all prompts, `concurrency` at a time; no answer is awaited beyond the time limit.

    Args:
        outcomes: an empty list, which is extended as the answers arrive.
    """
    before, began_s = await _counters(client), time.perf_counter()
    await _send_all(client, load, concurrency, outcomes)
    seconds, after = time.perf_counter() - began_s, await _counters(client)
    counters, restarted = between(before, after) if before and after else (None, False)
    return Level(concurrency, seconds, tuple(outcomes), counters, restarted)


async def _send_all(client: Client, load: Load, concurrency: int, outcomes: list[Outcome]) -> None:
    """Workers take prompts until none is left."""
    prompts = list(reversed(load.prompts))
    deadline_s = time.monotonic() + load.max_seconds

    async def work() -> None:
        while prompts and time.monotonic() < deadline_s:
            prompt = prompts.pop()
            text = prompt.turns[0]
            try:
                async with asyncio.timeout(max(1.0, deadline_s - time.monotonic())):
                    reply = await client.answer(text, max_new_tokens=load.max_new_tokens)
                outcomes.append(Outcome(prompt, reply))
            except PlaygroundError as error:
                outcomes.append(Outcome(prompt, None, str(error)))
            except TimeoutError:
                outcomes.append(Outcome(prompt, None, "The time limit was reached."))

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(load.prompts))):
            group.create_task(work())


async def _counters(client: Client) -> Reading | None:
    """None if the engine was started without counters."""
    try:
        return await client.read()
    except PlaygroundError:
        return None


def count_equal_texts(level: Level, plain: Level) -> tuple[int, int]:
    """Numbers of equal texts and of prompts, among the prompts that both answered."""
    texts, plain_texts = _texts(level), _texts(plain)
    both = texts.keys() & plain_texts.keys()
    return sum(texts[key] == plain_texts[key] for key in both), len(both)


def _texts(level: Level) -> dict[tuple[str, str], str]:
    """The answers of a level by suite and id of their prompts."""
    return {
        (one.prompt.suite, one.prompt.id): one.reply.text
        for one in level.outcomes
        if one.reply is not None
    }
