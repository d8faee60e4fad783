"""What both protocols are made of: bodies that pydantic checks, event streams, faults by status."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any, ClassVar, TypeVar

import anyio
from anyio.to_thread import run_sync
from pydantic import ConfigDict, model_validator
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from engine.config import Settings
from engine.errors import ConfigError, PlaygroundError
from engine.safe_text import read_json, short
from playground.api.fields import Neutral, is_neutral
from playground.api.models import UnknownModelError
from playground.api.running import RunFailedError
from playground.host.runner import ClosingError, QueueFullError
from storage import StorageError

logger = logging.getLogger(__name__)
BROKE = "Something broke while answering. The details are in the server's log."
Body = TypeVar("Body", bound="Asked")
Asks = TypeVar("Asks", bound="Endpoint")
Result = TypeVar("Result")


class Asked(Settings):
    """A request's body: what it asks for is done, or refused by name. A null asks for nothing."""

    model_config = ConfigDict(extra="forbid", strict=False)

    ignored: ClassVar[Mapping[str, str]] = {}
    """Further fields that change no answer, and why."""
    refused: ClassVar[Mapping[str, Neutral]] = {}
    """Further fields that would change it, and their values that do not."""

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        for name, neutral in cls.refused.items():
            value = values.get(name)
            if value is not None and not is_neutral(value, neutral):
                rule = " or ".join([*map(json.dumps, neutral), "left out"])
                raise ValueError(f"{name} must be {rule}, got {short(value)}: it is not done here")
        known = {*cls.ignored, *cls.refused}
        return {k: value for k, value in values.items() if value is not None and k not in known}


async def body_of(request: Request, kind: type[Body]) -> Body:
    """Raises ConfigError: it is no JSON, or a field is of the wrong type or out of range."""
    body = await request.body()
    return await run_sync(lambda: kind.parse(read_json(body, what="The request's body")))


def status_of(error: BaseException) -> tuple[int, str]:
    """HTTP status and sentence of what went wrong."""
    if isinstance(error, UnknownModelError):
        return 404, str(error)
    if isinstance(error, QueueFullError | ClosingError):
        return 503, str(error)
    if isinstance(error, RunFailedError):
        return 400 if error.refused else 500, str(error)
    if isinstance(error, ConfigError):
        return 400, str(error)
    if isinstance(error, PlaygroundError | StorageError):
        return 500, str(error)
    if isinstance(error, HTTPException):  # the body is too long
        return error.status_code, error.detail
    if isinstance(error, ClientDisconnect):
        return 400, "The request was cut off."
    logger.error("unexpected error in an endpoint", exc_info=error)
    return 500, BROKE


class Endpoint:
    """Answers requests in its protocol's own form, faults too."""

    def __init__(self, fault: Callable[[int, str], dict[str, Any]]) -> None:
        """`fault`: writes an HTTP status and a sentence as the protocol does."""
        self.fault = fault

    def refusal(self, status: int, sentence: str) -> Response:
        headers = {"retry-after": "1"} if status == 503 else None
        return JSONResponse(self.fault(status, sentence), status_code=status, headers=headers)

    def stream(self, events: AsyncIterator[Mapping[str, Any] | str]) -> Response:
        """Server-sent events: mappings as JSON, texts as they are; a fault is the last event."""

        async def lines() -> AsyncIterator[str]:
            try:
                async for event in events:
                    yield _event(event)
            except Exception as error:  # the status is sent already: an event is all there is
                yield _event(self.fault(*status_of(error)))

        return EventStream(lines(), media_type="text/event-stream")


def answers(method: Callable[[Asks, Request], Awaitable[Response]]) -> Any:
    """An endpoint's method, which says why where it has no answer."""

    @functools.wraps(method)
    async def answer(self: Asks, request: Request) -> Response:
        try:
            return await method(self, request)
        except Exception as error:  # a bug, too, is answered in the protocol's form
            return self.refusal(*status_of(error))

    return answer


class EventStream(StreamingResponse):
    """Ends its generator when the client has gone, so that the run behind it is cancelled."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(OSError):
            try:
                await super().__call__(scope, receive, send)
            finally:
                with anyio.CancelScope(shield=True):
                    await self.body_iterator.aclose()  # type: ignore[attr-defined]


def _event(event: Mapping[str, Any] | str) -> str:
    text = event if isinstance(event, str) else json.dumps(event, ensure_ascii=False)
    return f"data: {text}\n\n"


async def while_connected(request: Request, work: Coroutine[Any, Any, Result]) -> Result | None:
    """What `work` brings; None, and `work` is cancelled, where the client goes first."""

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    doing, watching = asyncio.create_task(work), asyncio.create_task(watch())
    try:
        await asyncio.wait((doing, watching), return_when=asyncio.FIRST_COMPLETED)
        return await doing if doing.done() else None
    finally:
        for task in (doing, watching):
            task.cancel()
        await asyncio.gather(doing, watching, return_exceptions=True)
