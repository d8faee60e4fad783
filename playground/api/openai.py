"""OpenAI's endpoints: models, chat completions, completions, streaming and not.

Beside OpenAI's fields an answer has vLLM's acceptance of the request
(`metrics.speculative_decoding`) and llama-server's `timings`. What cannot be done here is refused,
not ignored: another answer than the one that was asked for is worse than none.
"""

from __future__ import annotations

import json
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any, Literal, Self

from anyio.to_thread import run_sync
from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from engine.config import Limits, Sampling
from engine.errors import ConfigError
from engine.grammar import choice_grammar
from playground.api import fields, figures
from playground.api.models import SEPARATOR, Model, model_of, offered
from playground.api.protocol import Asked, Endpoint, answers, body_of, while_connected
from playground.api.running import Answer
from playground.host.live import Message
from playground.host.request import MAX_PROMPT_CHARS
from playground.host.runner import EngineHost

OWNER = "speculative-decoding-playground"
COMPLETION_TOKENS = 16
"""Most new tokens of a completion that names no number: OpenAI's default."""
MAX_MESSAGES = 2_000
MAX_SEED = 2**31


class Part(Asked):
    """Part of a message's content; text is all that a language model takes."""

    type: Literal["text"]
    text: str


class Said(Asked):
    """A message of a chat."""

    refused = fields.MESSAGE_REFUSED

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Part]

    @property
    def message(self) -> Message:
        parts = self.content
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class StreamOptions(Asked):
    """What a stream tells beside its text."""

    ignored, refused = fields.STREAM_IGNORED, fields.STREAM_REFUSED

    include_usage: bool = False


class Held(Asked):
    """What the text is to follow, as vLLM's `structured_outputs` says it."""

    refused = fields.STRUCTURE_REFUSED

    schema_: str | dict[str, Any] | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = Field(None, min_length=1)
    grammar: str | None = None
    json_object: bool = False


class Named(Asked):
    """The schema of a `response_format`."""

    ignored = fields.SCHEMA_IGNORED

    schema_: dict[str, Any] = Field({}, alias="schema")


class ResponseFormat(Asked):
    """OpenAI's way to say it."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: Named = Named()


class Completing(Asked):
    """Fields that both kinds of completion have."""

    model: str = ""
    max_tokens: int | None = Field(None, ge=1, le=1_000_000)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    speculative: bool = True
    disable_spec_decode: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: Held | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = Field(None, min_length=1)
    guided_grammar: str | None = None

    @property
    def limit(self) -> int | None:
        """Most new tokens, if any are named."""
        return self.max_tokens

    @property
    def sampling(self) -> Sampling:
        """OpenAI samples at temperature 1 unless told otherwise, another text each time."""
        seed = secrets.randbelow(MAX_SEED) if self.seed is None else self.seed
        return Sampling.parse(
            {
                "temperature": 1.0 if self.temperature is None else self.temperature,
                "top_p": 1.0 if self.top_p is None else self.top_p,
                "top_k": max(0, self.top_k or 0),  # vLLM's -1 is all, too
                "min_p": self.min_p or 0.0,
                "seed": seed,
                **self._structure(),
            }
        )

    def _structure(self) -> dict[str, str]:
        """What the text has to follow, if anything."""
        held, form = self.structured_outputs or Held(), self.response_format
        schemas = [held.schema_, self.guided_json, {"type": "object"} if held.json_object else None]
        if form is not None and form.type != "text":
            named = form.type == "json_schema"
            schemas.append(form.json_schema.schema_ if named else {"type": "object"})
        choices = [one for one in (held.choice, self.guided_choice) if one]
        asked: list[tuple[str, str]] = [
            *(
                ("json_schema", one if isinstance(one, str) else json.dumps(one))
                for one in schemas
                if one is not None
            ),
            *(("regex", one) for one in (held.regex, self.guided_regex) if one is not None),
            *(("grammar", one) for one in (held.grammar, self.guided_grammar) if one is not None),
            *(("grammar", choice_grammar(texts)) for texts in choices),
        ]
        if len(asked) > 1:
            raise ConfigError("Give only one of schema, regular expression, choice and grammar.")
        return dict(zip(("structured_output", "grammar"), *asked, strict=True)) if asked else {}

    def limits(self, default: int) -> Limits:
        texts = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return Limits.parse(
            {
                "max_new_tokens": self.limit or default,
                "ignore_eos": self.ignore_eos,
                "stop": [text for text in texts if text],
                "stop_token_ids": self.stop_token_ids,
            }
        )


class Chat(Completing):
    """Body of `/v1/chat/completions`."""

    ignored, refused = fields.CHAT_IGNORED, fields.CHAT_REFUSED

    messages: list[Said] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: int | None = Field(None, ge=1, le=1_000_000)

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens


class Completion(Completing):
    """Body of `/v1/completions`."""

    ignored, refused = fields.COMPLETION_IGNORED, fields.TEXT_REFUSED

    prompt: str | list[str]

    @model_validator(mode="after")
    def _check_prompt(self) -> Self:
        if not isinstance(self.prompt, str) and len(self.prompt) != 1:
            raise ValueError("prompt must be a single text; send one request per prompt")
        return self

    @property
    def text(self) -> str:
        return self.prompt if isinstance(self.prompt, str) else self.prompt[0]


def fault(status: int, sentence: str) -> dict[str, Any]:
    kinds = {401: "authentication_error", 404: "not_found_error", 503: "overloaded_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": sentence, "type": kind, "param": None, "code": status}}


class OpenAI(Endpoint):
    """The endpoints over an engine."""

    def __init__(self, host: EngineHost) -> None:
        super().__init__(fault)
        self._host = host

    def routes(self) -> list[Route]:
        return [
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.model),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.completions, methods=["POST"]),
        ]

    # ---- models

    def models(self, _: Request) -> Response:
        loaded = self._host.loaded
        names = offered(self._host.catalog, loaded.key if loaded else None)
        return JSONResponse({"object": "list", "data": [_described(name) for name in names]})

    @answers
    async def model(self, request: Request) -> Response:
        named = await run_sync(model_of, self._host.catalog, request.path_params["name"])
        return JSONResponse(_described(named.name))

    # ---- completions

    @answers
    async def chat(self, request: Request) -> Response:
        asked = await body_of(request, Chat)
        messages = [said.message for said in asked.messages]
        if sum(len(message["content"]) for message in messages) > MAX_PROMPT_CHARS:
            raise ConfigError(f"The messages must have at most {MAX_PROMPT_CHARS} characters.")
        return await self._complete(request, asked, ChatForm, messages=messages)

    @answers
    async def completions(self, request: Request) -> Response:
        asked = await body_of(request, Completion)
        if not 0 < len(asked.text) <= MAX_PROMPT_CHARS:
            raise ConfigError(f"prompt must have 1 to {MAX_PROMPT_CHARS} characters.")
        return await self._complete(request, asked, TextForm, prompt=asked.text)

    async def _complete(
        self,
        request: Request,
        asked: Completing,
        form: type[Form],
        *,
        prompt: str = "",
        messages: list[Message] | None = None,
    ) -> Response:
        def begin() -> Form:
            drafts = asked.speculative and not asked.disable_spec_decode
            model = model_of(self._host.catalog, asked.model, drafts=drafts)
            answer = Answer(
                self._host,
                model,
                prompt=prompt,
                messages=messages or (),
                sampling=asked.sampling,
                limits=asked.limits(form.default_tokens),
            )
            return form(model, answer)

        written = await run_sync(begin)  # a grammar takes its time
        answer = written.answer
        if not asked.stream:
            text = await while_connected(request, answer.text())
            return JSONResponse(written.whole(text or ""))
        await answer.begun()
        with_usage = asked.stream_options is not None and asked.stream_options.include_usage
        return self.stream(written.events(with_usage=with_usage))


class Form(ABC):
    """How an answer is written."""

    default_tokens: int
    id_prefix: str
    kind: str
    chunk_kind: str

    def __init__(self, model: Model, answer: Answer) -> None:
        self.answer = answer
        self._drafts = model.drafts
        self._common = {
            "id": f"{self.id_prefix}-{answer.run.id}",
            "created": int(time.time()),
            "model": model.name,
        }

    @abstractmethod
    def choice(self, text: str) -> dict[str, Any]:
        """The whole answer's own part of a choice."""

    @abstractmethod
    def piece(self, text: str | None, *, first: bool) -> dict[str, Any]:
        """A chunk's own part of a choice; None at the end."""

    def whole(self, text: str) -> dict[str, Any]:
        choice = {"index": 0, **self.choice(text), "logprobs": None}
        choice["finish_reason"] = self.answer.finish_reason
        return {**self._common, "object": self.kind, "choices": [choice], **self._told}

    async def events(self, *, with_usage: bool) -> AsyncIterator[dict[str, Any] | str]:
        """Chunks of the text, how it ended, the figures if they are asked for, `[DONE]`."""
        first = True
        async with aclosing(self.answer.texts()) as pieces:
            async for text in pieces:
                yield self._chunk(self.piece(text, first=first), None)
                first = False
        last = self._chunk(self.piece(None, first=first), self.answer.finish_reason)
        yield {**last, "timings": figures.timings(self.answer.run)}
        if with_usage:
            yield {**self._common, "object": self.chunk_kind, "choices": [], **self._told}
        yield "[DONE]"

    def _chunk(self, piece: dict[str, Any], reason: str | None) -> dict[str, Any]:
        choice = {"index": 0, **piece, "logprobs": None, "finish_reason": reason}
        return {**self._common, "object": self.chunk_kind, "choices": [choice]}

    @property
    def _told(self) -> dict[str, Any]:
        run = self.answer.run
        acceptance = figures.speculative_decoding(run) if self._drafts else None
        metrics = {"metrics": {"speculative_decoding": acceptance}} if acceptance else {}
        return {
            "usage": figures.usage(run),
            **metrics,
            "timings": figures.timings(run),
            "run_id": run.log_id,
        }


class ChatForm(Form):
    """A chat completion; its text ends with the context unless a limit is named."""

    default_tokens = 1_000_000
    id_prefix = "chatcmpl"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def choice(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text}}

    def piece(self, text: str | None, *, first: bool) -> dict[str, Any]:
        role = {"role": "assistant"} if first else {}
        return {"delta": {**role, **({} if text is None else {"content": text})}}


class TextForm(Form):
    default_tokens = COMPLETION_TOKENS
    id_prefix = "cmpl"
    kind = chunk_kind = "text_completion"

    def choice(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def piece(self, text: str | None, *, first: bool) -> dict[str, Any]:
        return {"text": text or ""}


def _described(name: str) -> dict[str, Any]:
    target = name.partition(SEPARATOR)[0]
    return {"id": name, "object": "model", "created": 0, "owned_by": OWNER, "root": target}
