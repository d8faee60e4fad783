"""One request's run: queued for the engine as the page's are, and followed to its end."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from engine.config import Limits, Sampling
from engine.errors import PlaygroundError
from playground.api.models import Model
from playground.host.live import LiveRun, Message
from playground.host.request import GenerateRequest
from playground.host.runner import EngineHost

POLL_S = 0.005
"""How often a run is looked at for its first token."""
TEXT_POLL_S = 0.02
"""And for what follows it, which comes in pieces of 50 ms; a look costs the engine's time."""


class RunFailedError(PlaygroundError):
    """The run could not begin, or broke off."""

    def __init__(self, run: LiveRun) -> None:
        super().__init__(run.error or "The run was stopped.")
        self.refused = run.refused
        """Whether what was asked for is at fault, and not the server."""


class Answer:
    """A run and its text, as much of it as will stay.

    What could be the start of a stop string is held back until it is known not to be one.
    """

    def __init__(
        self,
        host: EngineHost,
        model: Model,
        *,
        prompt: str = "",
        messages: Sequence[Message] = (),
        sampling: Sampling,
        limits: Limits,
    ) -> None:
        """Queue the run; `messages` of a chat, or a raw `prompt` to go on with.

        Raises QueueFullError, ClosingError: too many are waiting, or nothing is taken on.
        """
        request = GenerateRequest(
            target=model.target,
            dtype="auto",
            method=model.method,
            config=model.method.config,
            sampling=sampling,
            limits=limits,
            mode="chat" if messages else "raw",
            system="",
            prompt=prompt,
            messages=tuple(messages),
        )
        self._stop = limits.stop
        self.run = host.generate(request, owner=f"api/{secrets.token_urlsafe(9)}")

    async def begun(self) -> None:
        """Wait for the first token.

        Raises RunFailedError: there is none. Leaving early cancels the run.
        """
        try:
            while self.run.first is None and not self.run.over.is_set():
                await asyncio.sleep(POLL_S)
        except asyncio.CancelledError:
            self.run.cancel()
            raise
        self._check()

    async def texts(self) -> AsyncGenerator[str, None]:
        """The text, piece by piece; what clients stop reading is cancelled.

        Raises RunFailedError: the run broke off.
        """
        text, num_events, told = "", 0, 0
        try:
            while not self.run.over.is_set():
                pieces = self.run.pieces(num_events)
                num_events += len(pieces)
                text += "".join(pieces)
                if told < (safe := _num_safe(text, self._stop)):
                    yield text[told:safe]
                    told = safe
                await asyncio.sleep(TEXT_POLL_S)
            self._check()
            if self.run.finish is not None and self.run.finish.text[told:]:
                yield self.run.finish.text[told:]
        finally:
            self.run.cancel()

    async def text(self) -> str:
        """The whole text. Raises RunFailedError: the run broke off."""
        async with aclosing(self.texts()) as pieces:
            return "".join([piece async for piece in pieces])

    def _check(self) -> None:
        if self.run.state == "failed" or (self.run.over.is_set() and self.run.finish is None):
            raise RunFailedError(self.run)

    @property
    def finish_reason(self) -> str:
        """`length` where a limit ended the text, else `stop`."""
        reason = self.run.finish.reason if self.run.finish else None
        return "length" if reason in ("length", "context") else "stop"


def _num_safe(text: str, stops: Sequence[str]) -> int:
    """Letters that stay: those before a stop string, or before what could become one."""
    found = [at for stop in stops if (at := text.find(stop)) >= 0]
    if found:
        return min(found)
    longest = max(map(len, stops), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(stop.startswith(text[-length:]) for stop in stops):
            return len(text) - length
    return len(text)
