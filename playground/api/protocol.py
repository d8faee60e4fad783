"""What the protocols share: validated request bodies, event streams, errors by HTTP status."""

from __future__ import annotations

import json
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from typing import Annotated, Any, ClassVar, TypeVar

import anyio
from anyio.to_thread import run_sync
from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, model_validator
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from engine.config import Settings
from engine.errors import ConfigError, PlaygroundError
from engine.safe_text import read_json, short
from playground.api.answer import RunFailedError
from playground.api.fields import NeutralValues, is_neutral
from playground.api.models import UnknownModelError
from playground.host.request import MAX_PROMPT_CHARS
from playground.host.runner import EngineHost, QueueFullError, StuckError
from playground.host.task import ClosingError
from storage import BusyError, StorageError

logger = logging.getLogger(__name__)
INTERNAL_ERROR = "Internal error. The details are in the server's log."
STATUSES = {
    UnknownModelError: 404,
    QueueFullError: 503,
    ClosingError: 503,
    StuckError: 503,
    ConfigError: 400,
    PlaygroundError: 500,
    BusyError: 503,
    StorageError: 500,
}
"""HTTP statuses by class of error; the first match counts."""
Body = TypeVar("Body", bound="RequestBody")
PromptText = Annotated[
    str,
    Field(min_length=1, max_length=MAX_PROMPT_CHARS),
    BeforeValidator(lambda raw: raw[0] if isinstance(raw, list) and len(raw) == 1 else raw),
]
"""A text, or a list of one."""
StopTexts = Annotated[
    list[str],
    BeforeValidator(lambda raw: [raw] if isinstance(raw, str) else raw),
    AfterValidator(lambda texts: [text for text in texts if text]),
]
"""A text or a list of texts, of which the empty ones are dropped."""
Endpoint = Callable[[Request], Awaitable[Response]]


class RequestBody(Settings):
    """A request's body; unsupported fields are refused by name, null means absent."""

    model_config = ConfigDict(extra="forbid", strict=False)

    ignored: ClassVar[Mapping[str, str]] = {}
    """Further fields that change no answer, and why."""
    refused: ClassVar[Mapping[str, NeutralValues]] = {}
    """Further fields that would change the answer, and their neutral values."""

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        for name, neutral in cls.refused.items():
            value = values.get(name)
            if value is not None and not is_neutral(value, neutral):
                rule = " or ".join([*map(json.dumps, neutral), "left out"])
                raise ValueError(f"{name} must be {rule}, got {short(value)}: it is not supported")
        unused = {*cls.ignored, *cls.refused}
        return {k: value for k, value in values.items() if value is not None and k not in unused}


async def read_body(request: Request, kind: type[Body]) -> Body:
    """Parse a request's body. Raises ConfigError: invalid JSON, or an invalid field."""
    body = await request.body()
    return await run_sync(lambda: kind.parse(read_json(body, what="The request's body")))


def status_of(error: BaseException) -> tuple[int, str]:
    """HTTP status and message of an error."""
    status = next((status for kind, status in STATUSES.items() if isinstance(error, kind)), None)
    if isinstance(error, RunFailedError):
        status = error.status
    if status is not None:
        return status, str(error)
    if isinstance(error, HTTPException):  # the body is too long
        return error.status_code, error.detail
    if isinstance(error, ClientDisconnect):
        return 400, "The request was cut off."
    logger.error("unexpected error in an endpoint", exc_info=error)
    return 500, INTERNAL_ERROR


class Endpoints(ABC):
    """The endpoints of one protocol over an engine."""

    def __init__(self, host: EngineHost) -> None:
        self._host = host

    @staticmethod
    @abstractmethod
    def error_body(status: int, sentence: str) -> dict[str, Any]:
        """An HTTP status and a message as the protocol writes them."""

    def route(self, path: str, endpoint: Endpoint, method: str = "GET") -> Route:
        """A route whose errors, bugs included, are responses of the protocol."""

        async def respond(request: Request) -> Response:
            try:
                return await endpoint(request)
            except Exception as error:
                status, sentence = status_of(error)
                headers = {"retry-after": "1"} if status == 503 else None
                return JSONResponse(self.error_body(status, sentence), status, headers)

        return Route(path, respond, methods=[method])

    async def stream(self, events: AsyncGenerator[Mapping[str, Any] | str]) -> Response:
        """Server-sent events: mappings as JSON, strings verbatim.

        An error is the last event; before the first event, it is raised.
        """
        first = await anext(events)

        async def lines() -> AsyncIterator[str]:
            try:
                yield line(first)
                async with aclosing(events):
                    async for event in events:
                        yield line(event)
            except Exception as error:  # the status has been sent: only an event can report it
                yield line(self.error_body(*status_of(error)))

        def line(event: Mapping[str, Any] | str) -> str:
            text = event if isinstance(event, str) else json.dumps(event, ensure_ascii=False)
            return f"data: {text}\n\n"

        return EventStream(lines(), media_type="text/event-stream")


class EventStream(StreamingResponse):
    """Closes its generator when the client disconnects, so that its run is cancelled."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(OSError):
            try:
                await super().__call__(scope, receive, send)
            finally:
                with anyio.CancelScope(shield=True):
                    await self.body_iterator.aclose()  # type: ignore[attr-defined]
