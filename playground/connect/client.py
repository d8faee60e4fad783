"""Client of a running engine: its kind, its counters, and timed answers.

Engines are not trusted: responses are limited in size while they arrive, calls in their duration.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Self
from urllib.parse import urlsplit

import httpx
from anyio.to_thread import run_sync
from pydantic import Field, model_validator

from engine.errors import ConfigError, PlaygroundError, first_line
from engine.safe_text import read_json, short
from playground.connect.readings import (
    Count,
    Engine,
    Items,
    ModelList,
    Reading,
    Response,
    engine_of,
)

TIMEOUT_S = 10.0
ANSWER_S = 600.0
"""Time limits from the start of a call to its last byte: of most calls, and of an answer."""
MAX_BYTES = 1 << 20
"""Size limit of a response that is not streamed."""
MAX_LINE_BYTES = 64 << 10
LIMITS = httpx.Limits(keepalive_expiry=1.0)
"""Connections that were idle for longer are not reused: an engine may be closing them."""
TOKEN_BYTES = 2 << 10
"""Size limit of a stream per requested token; a chunk of one token has a few hundred bytes."""


class DraftCounts(Response):
    """Counts of one request's drafting."""

    steps: Annotated[Count, Field(ge=1)]
    drafted: Count
    accepted: Count

    @model_validator(mode="after")
    def _no_more_than_drafted(self) -> Self:
        if self.accepted > self.drafted:
            raise ValueError(
                f"accepted draft tokens must be at most those drafted, {self.drafted}, "
                f"got {self.accepted}"
            )
        return self


class Delta(Response):
    """A piece of an answer; reasoning has one of two names, some engines send both."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None

    @property
    def text(self) -> str:
        return (self.reasoning_content or self.reasoning or "") + (self.content or "")


class StreamChoice(Response):
    delta: Delta | None = None
    finish_reason: str | None = None


class Usage(Response):
    prompt_tokens: Count = 0
    completion_tokens: Count = 0


class Acceptance(Response):
    num_spec_steps: Count
    num_draft_tokens: Count
    num_accepted_draft_tokens: Count


class RequestMetrics(Response):
    speculative_decoding: Acceptance | None = None


class Timings(Response):
    draft_n: Count = 0
    draft_n_accepted: Count | None = None
    predicted_n: Count = 0


class Chunk(Response):
    """One event of a streamed answer; the last events have the figures."""

    choices: Items[StreamChoice] | None = None
    usage: Usage | None = None
    metrics: RequestMetrics | None = None
    timings: Timings | None = None
    error: Any = None

    @property
    def drafting(self) -> DraftCounts | None:
        """The counts that vLLM or llama-server report; None without any, or without drafts.

        Raises ConfigError: the figures contradict each other.
        """
        spec, times = self.metrics and self.metrics.speculative_decoding, self.timings
        if spec and (spec.num_spec_steps or spec.num_draft_tokens):
            steps, drafted = spec.num_spec_steps, spec.num_draft_tokens
            accepted: int | None = spec.num_accepted_draft_tokens
        elif times and times.draft_n:
            drafted, accepted = times.draft_n, times.draft_n_accepted
            # The first token comes from the prompt; every step commits one more than it accepts.
            steps = max(1, times.predicted_n - 1 - (accepted or 0))
        else:
            return None
        return DraftCounts.parse({"steps": steps, "drafted": drafted, "accepted": accepted})


class EngineError(PlaygroundError):
    """The engine cannot be reached, or its response is invalid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One answer, timed by the client.

    Attributes:
        ttft_s: request sent → first piece of text.
        latency_s: request sent → last piece of text.
        finish_reason: as the engine reports it; None if the answer did not end.
        drafting: None if the engine does not report it.
    """

    text: str
    num_prompt_tokens: int
    num_new_tokens: int
    ttft_s: float
    latency_s: float
    finish_reason: str | None
    drafting: DraftCounts | None

    @property
    def decode_s(self) -> float:
        return self.latency_s - self.ttft_s


class Client:
    """Client of one engine; no request goes to any other address."""

    engine: Engine
    model: str

    def __init__(self, url: str, http: httpx.AsyncClient) -> None:
        self.url = url
        self._http = http

    @classmethod
    @asynccontextmanager
    async def connect(cls, url: str, key: str = "", model: str = "") -> AsyncIterator[Self]:
        """A client with its engine identified and its model chosen.

        Raises EngineError, ConfigError: it failed.
        """
        client = cls.at(url, key)
        async with client._http:
            await client._identify(model)
            yield client

    @classmethod
    def at(cls, url: str, key: str = "") -> Self:
        """Raises ConfigError: the address or the key is invalid."""
        if not (key.isascii() and key.isprintable()):
            raise ConfigError("The API key must be printable ASCII characters. Copy it again.")
        # Without compression the size limit holds for the decoded body.
        headers = {"accept-encoding": "identity"}
        headers |= {"authorization": f"Bearer {key}"} if key else {}
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            is_http = parts.scheme in ("http", "https") and parts.port != 0
            if not is_http or not parts.hostname or parts.username:
                raise ValueError
            base = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"
            http = httpx.AsyncClient(base_url=base, headers=headers, timeout=None, limits=LIMITS)
        except (ValueError, httpx.InvalidURL) as error:
            raise ConfigError(
                f"The address must be like http://127.0.0.1:8000, got {url!r:.80}."
            ) from error
        return cls(base, http)

    async def _identify(self, model: str) -> None:
        path = "/v1/models"
        body = await self._get(path)
        models = await run_sync(lambda: ModelList.parse(read_json(body, what=path), where=path))
        self.engine = engine_of(models)
        names = [one.id for one in models.data]
        if model and model not in names and self.engine.name != "playground":
            raise ConfigError(f"model must be one of {', '.join(names)[:400]}, got {model!r:.80}.")
        self.model = model or names[0]

    async def read(self) -> Reading:
        """The current counters. Raises EngineError, ConfigError: they cannot be read."""
        return await run_sync(self.engine.read, await self._get("/metrics"))

    async def answer(self, prompt: str, *, max_new_tokens: int) -> Reply:
        """One greedy answer to a user's message, streamed.

        Raises EngineError: the engine refuses, hangs up, or sends an invalid chunk.
        """
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": max_new_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.engine.extra,
        }
        path, max_bytes = "/v1/chat/completions", MAX_BYTES + TOKEN_BYTES * max_new_tokens
        stream = _AnswerStream(time.perf_counter(), max_new_tokens)
        try:
            async with (
                self._deadline(ANSWER_S),
                self._http.stream("POST", path, json=body) as response,
            ):
                await self._check(response, path)
                async for line in _lines(_bounded(response, max_bytes)):
                    stream.add(line)
                    await asyncio.sleep(0)  # one part may hold thousands of lines
            return stream.reply()
        except httpx.HTTPError as error:
            raise EngineError(f"{self.url} hung up: {first_line(error)}.") from error
        except ConfigError as error:
            raise EngineError(f"The engine sent no valid chunk: {error}") from error

    async def _get(self, path: str) -> bytes:
        """The whole body; follows a redirect from /metrics to /metrics/ only."""
        try:
            async with self._deadline(TIMEOUT_S):
                for place in (path, f"{path}/"):
                    async with self._http.stream("GET", place) as response:
                        if place == path and response.is_redirect:
                            continue
                        await self._check(response, path)
                        return await _whole(response)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise EngineError(f"{self.url} cannot be reached: {first_line(error)}.") from error
        raise AssertionError

    async def _check(self, response: httpx.Response, path: str) -> None:
        """Raises EngineError: the status is not OK; quotes the engine's explanation."""
        if response.status_code != httpx.codes.OK:
            words = " ".join((await _whole(response))[:200].decode(errors="replace").split())
            reason = f"{response.status_code}: {words}".rstrip(" :.")
            raise EngineError(f"{self.url}{path} answers {reason}.")

    @asynccontextmanager
    async def _deadline(self, seconds: float) -> AsyncIterator[None]:
        """One time limit for the whole call, so that a slow trickle of bytes cannot extend it."""
        try:
            async with asyncio.timeout(seconds):
                yield
        except TimeoutError as error:
            raise EngineError(f"{self.url} did not answer within {seconds:g} s.") from error


async def _bounded(response: httpx.Response, max_bytes: int) -> AsyncIterator[bytes]:
    """The body in parts. Raises EngineError: it is encoded, or longer than `max_bytes`."""
    coding, total = response.headers.get("content-encoding", "identity"), 0
    if coding != "identity":
        raise EngineError(f"{response.url} must not be encoded, got {short(coding)}.")
    async for part in response.aiter_raw():
        total += len(part)
        if total > max_bytes:
            raise EngineError(f"{response.url} must be at most {max_bytes} bytes.")
        yield part


async def _whole(response: httpx.Response) -> bytes:
    return b"".join([part async for part in _bounded(response, MAX_BYTES)])


async def _lines(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    rest = b""
    async for part in parts:
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            yield line
        if len(rest) > MAX_LINE_BYTES:
            raise EngineError(f"The engine sent a line of more than {MAX_LINE_BYTES} bytes.")
    yield rest


class _AnswerStream:
    """The chunks of an answer received so far."""

    def __init__(self, began_s: float, max_new_tokens: int) -> None:
        self.max_new_tokens = max_new_tokens
        self._began_s = self._last_s = began_s
        self._first_s: float | None = None
        self._text: list[str] = []
        self._reason: str | None = None
        self._figures = Chunk()

    def add(self, line: bytes) -> None:
        """Raises ConfigError: the chunk is invalid. Raises EngineError: it reports an error."""
        data = line.removeprefix(b"data:").strip()
        if not line.startswith(b"data:") or data == b"[DONE]":
            return
        chunk = Chunk.parse(read_json(data, what="It"))
        if chunk.error is not None:
            raise EngineError(f"The engine gave up: {short(chunk.error, 200)}.")
        for choice in chunk.choices or ():
            self._reason = choice.finish_reason or self._reason
            if choice.delta and choice.delta.text:
                self._last_s = time.perf_counter()
                self._first_s = self._first_s or self._last_s
                self._text.append(choice.delta.text)
        for name in ("usage", "metrics", "timings"):
            if (figures := getattr(chunk, name)) is not None:
                self._figures = self._figures.model_copy(update={name: figures})

    def reply(self) -> Reply:
        """Raises ConfigError: its figures contradict each other or the request."""
        usage = self._figures.usage
        num_new_tokens = usage.completion_tokens if usage else 0
        if num_new_tokens > self.max_new_tokens:
            raise ConfigError(
                f"usage.completion_tokens must be at most {self.max_new_tokens}, as requested, "
                f"got {num_new_tokens}."
            )
        return Reply(
            text="".join(self._text),
            num_prompt_tokens=usage.prompt_tokens if usage else 0,
            num_new_tokens=num_new_tokens,
            ttft_s=(self._first_s or self._last_s) - self._began_s,
            latency_s=self._last_s - self._began_s,
            finish_reason=self._reason,
            drafting=self._figures.drafting,
        )
