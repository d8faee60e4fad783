"""Asks a running engine: which one it is, its counters, and for answers that are timed."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self
from urllib.parse import urlsplit

import httpx

from engine.errors import ConfigError, PlaygroundError, first_line
from playground.connect.readings import COUNTED, Engine, Reading, engine_of
from playground.host.live import Message

TIMEOUT_S = 10.0
ANSWER_S = 600.0
"""Most seconds without a byte of an answer."""
MAX_ANSWER = 16 << 20


class EngineError(PlaygroundError):
    """The engine cannot be reached, or answers as none does."""


@dataclass(frozen=True, slots=True)
class Drafting:
    """What an engine says of one request's drafting; `steps` where it tells."""

    steps: int
    drafted: int
    accepted: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One answer, timed here. Seconds.

    Attributes:
        ttft_s: request sent → first piece of text.
        latency_s: request sent → last piece of text.
        finish_reason: as the engine says; None where it did not come to an end.
    """

    text: str
    num_prompt_tokens: int
    num_new_tokens: int
    ttft_s: float
    latency_s: float
    finish_reason: str | None
    drafting: Drafting | None

    @property
    def decode_s(self) -> float:
        return self.latency_s - self.ttft_s


class Client:
    """One engine at one address; nothing is asked of any other."""

    def __init__(self, url: str, http: httpx.AsyncClient) -> None:
        self.url = url
        self.model = ""
        self._http = http
        self._engine: Engine | None = None
        self._drained = Reading()

    @classmethod
    def at(cls, url: str, key: str = "") -> Self:
        """Raises ConfigError: that is no address of a server."""
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username:
            raise ConfigError(f"The address must be like http://127.0.0.1:8000, got {url!r:.80}.")
        base = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"
        headers = {"authorization": f"Bearer {key}"} if key else {}
        http = httpx.AsyncClient(
            base_url=base, headers=headers, timeout=TIMEOUT_S, follow_redirects=False
        )
        return cls(base, http)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    @property
    def engine(self) -> Engine:
        assert self._engine is not None, "find() first"
        return self._engine

    async def find(self, model: str = "") -> Engine:
        """Learn which engine it is, and which model to ask for.

        Raises EngineError, ConfigError: nothing answers, or no engine that is known here.
        """
        listed = self._json(await self._get("/v1/models"), "/v1/models")
        self._engine = engine_of(listed)
        names = [str(one.get("id")) for one in listed["data"]]
        if model and model not in names and self._engine.name != "playground":
            raise ConfigError(f"model must be one of {', '.join(names)[:400]}, got {model!r:.80}.")
        self.model = model or names[0]
        return self._engine

    async def read(self) -> Reading:
        """Its counters now.

        Raises EngineError, ConfigError: it has none, or they cannot be read.
        """
        answer = await self._get("/metrics", follow=True)
        found = self.engine.read(answer.text)
        if self.engine.name != "trtllm":
            return found
        past = {name: getattr(self._drained, name) or 0.0 for name in COUNTED}
        added = {
            name: past[name] + value
            for name in COUNTED
            if (value := getattr(found, name)) is not None
        }
        self._drained = replace(found, **added)
        return self._drained

    async def answer(self, messages: list[Message], *, max_new_tokens: int) -> Reply:
        """One greedy answer to a conversation, streamed.

        Raises EngineError: it refuses, breaks off, or says what no engine says.
        """
        asked = {
            "model": self.model,
            "messages": messages,
            "max_tokens": max_new_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.engine.extra,
        }
        for is_last in (False, True):
            heard = _Heard(time.perf_counter())
            try:
                await self._hear(asked, heard)
                return heard.reply()
            except httpx.HTTPError as error:
                # An engine may close a connection that waited just when it is used again.
                is_stale = isinstance(error, httpx.RemoteProtocolError) and not heard.anything
                if is_last or not is_stale:
                    raise EngineError(f"{self.url} hung up: {first_line(error)}.") from error
        raise AssertionError

    async def _hear(self, asked: Mapping[str, Any], heard: _Heard) -> None:
        async with self._http.stream(
            "POST", "/v1/chat/completions", json=asked, timeout=ANSWER_S
        ) as response:
            if response.status_code != httpx.codes.OK:
                await response.aread()
                raise EngineError(f"{self.url} answers {_refusal(response)}")
            async for line in response.aiter_lines():
                heard.take(line)

    async def _get(self, path: str, *, follow: bool = False) -> httpx.Response:
        try:
            answer = await self._http.get(path)
            if follow and answer.is_redirect:  # /metrics → /metrics/ of the same server
                answer = await self._http.get(f"{path}/")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            said = first_line(error)
            raise EngineError(f"{self.url} cannot be reached: {said}.") from error
        if answer.status_code != httpx.codes.OK or len(answer.content) > MAX_ANSWER:
            raise EngineError(f"{self.url}{path} answers {_refusal(answer)}")
        return answer

    def _json(self, answer: httpx.Response, path: str) -> Any:
        try:
            return answer.json()
        except ValueError as error:
            raise EngineError(f"{self.url}{path} is not JSON; is it an engine's?") from error


class _Heard:
    """A stream of chunks, as far as it has come."""

    def __init__(self, began_s: float) -> None:
        self._began_s = began_s
        self._first_s: float | None = None
        self._last_s = began_s
        self._text: list[str] = []
        self._reason: str | None = None
        self._told: dict[str, Any] = {}

    @property
    def anything(self) -> bool:
        """Whether there was text."""
        return self._first_s is not None

    def take(self, line: str) -> None:
        """Raises EngineError: it is no chunk, or a fault."""
        data = line.removeprefix("data:").strip()
        if not line.startswith("data:") or data == "[DONE]":
            return
        try:
            chunk = json.loads(data)
            if "error" in chunk:
                raise EngineError(f"The engine gave up: {chunk['error']!r:.200}.")
            for choice in chunk.get("choices") or ():
                self._choice(choice)
            self._told |= {k: v for k, v in chunk.items() if k in ("usage", "metrics", "timings")}
        except (ValueError, TypeError, AttributeError) as error:
            raise EngineError(f"The engine sent no valid chunk: {data[:80]!r}.") from error

    def _choice(self, choice: Mapping[str, Any]) -> None:
        self._reason = choice.get("finish_reason") or self._reason
        if piece := (choice.get("delta") or {}).get("content"):
            self._last_s = time.perf_counter()
            self._first_s = self._first_s or self._last_s
            self._text.append(str(piece))

    def reply(self) -> Reply:
        usage = self._told.get("usage") or {}
        first_s = self._first_s or self._last_s
        return Reply(
            text="".join(self._text),
            num_prompt_tokens=int(usage.get("prompt_tokens") or 0),
            num_new_tokens=int(usage.get("completion_tokens") or 0),
            ttft_s=first_s - self._began_s,
            latency_s=self._last_s - self._began_s,
            finish_reason=self._reason,
            drafting=self._drafting(),
        )

    def _drafting(self) -> Drafting | None:
        spec = (self._told.get("metrics") or {}).get("speculative_decoding")
        if spec:
            return Drafting(
                int(spec["num_spec_steps"]),
                int(spec["num_draft_tokens"]),
                int(spec["num_accepted_draft_tokens"]),
            )
        times = self._told.get("timings") or {}
        if not times.get("draft_n"):
            return None
        accepted = int(times["draft_n_accepted"])
        # The first token comes from the prompt; every step commits one more than it accepts.
        steps = max(1, int(times["predicted_n"]) - 1 - accepted)
        return Drafting(steps, int(times["draft_n"]), accepted)


def _refusal(answer: httpx.Response) -> str:
    said = " ".join(answer.text[:200].split())
    return f"{answer.status_code}: {said}" if said else f"{answer.status_code}."
