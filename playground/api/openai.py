"""OpenAI's endpoints: models, chat completions and completions, streamed or not.

Besides OpenAI's fields, a response has vLLM's acceptance figures (`metrics.speculative_decoding`)
and llama-server's `timings`. A field that cannot be honoured is refused rather than ignored: no
answer is better than the answer to a different request.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Literal, Self

from anyio.to_thread import run_sync
from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from engine.config import EFFORT, Limits, Sampling
from engine.errors import ConfigError
from engine.grammar import choice_grammar
from engine.model.chat_template import message_text
from playground.api import fields
from playground.api.answer import Answer, Disconnected, speculative_decoding, timings, usage
from playground.api.models import SEPARATOR, Model, list_models, model_of
from playground.api.protocol import Endpoints, PromptText, RequestBody, StopTexts, read_body
from playground.host.live import Message
from playground.host.request import MAX_PROMPT_CHARS

OWNER = "speculative-decoding-playground"
MAX_MESSAGES = 2_000
MAX_SEED = 2**31
MAX_TOKENS = 1_000_000
JSON_OBJECT = {"type": "object"}


class TextPart(RequestBody):
    """Part of a message's content; only text is supported."""

    type: Literal["text"]
    text: str


class CalledFunction(RequestBody):
    """The function of a tool call; its arguments are an object, or one as JSON text."""

    name: str = Field(min_length=1)
    arguments: str | dict[str, Any] = "{}"


class ToolCall(RequestBody):
    """A call that the assistant has made earlier."""

    ignored = fields.TOOL_CALL_IGNORED

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(RequestBody):
    """A message of a chat, or of an agent's history."""

    refused = fields.MESSAGE_REFUSED

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] = []
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _check_role(self) -> Self:
        of_roles: dict[str, dict[str, Any]] = {
            "assistant": {"reasoning": self.reasoning, "reasoning_content": self.reasoning_content}
            | {"tool_calls": self.tool_calls},
            "tool": {"tool_call_id": self.tool_call_id, "name": self.name},
        }
        for role, values in of_roles.items():
            names = [name for name, value in values.items() if value and role != self.role]
            if names:
                raise ValueError(f"{names[0]} belongs to messages of the role {role} only")
        if self.content is None and self.role != "assistant":
            raise ValueError(f"content is missing in a message of the role {self.role}")
        return self

    @property
    def message(self) -> Message:
        """As the chat template gets it: without fields that were left out or are empty."""
        values = self.model_dump(exclude_none=True)
        optional = {name: value for name, value in values.items() if value not in ("", [])}
        role = "system" if self.role == "developer" else self.role
        return {**optional, "role": role, "content": values.get("content")}


class StreamOptions(RequestBody):
    """What a stream reports besides its text."""

    ignored, refused = fields.STREAM_IGNORED, fields.STREAM_REFUSED

    include_usage: bool = False


class StructuredOutputs(RequestBody):
    """vLLM's constraints of the text."""

    refused = fields.STRUCTURE_REFUSED

    json_: str | dict[str, Any] | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = Field(None, min_length=1)
    grammar: str | None = None
    json_object: bool = False

    @property
    def constraints(self) -> list[tuple[str, str]]:
        """Kind and text of each constraint."""
        constraints = [
            ("json_schema", JSON_OBJECT if self.json_object else None),
            ("json_schema", self.json_),
            ("regex", self.regex),
            ("grammar", self.grammar),
            ("grammar", choice_grammar(self.choice) if self.choice else None),
        ]
        return [
            (kind, value if isinstance(value, str) else json.dumps(value))
            for kind, value in constraints
            if value is not None
        ]


class JsonSchema(RequestBody):
    """The schema of a `response_format`."""

    ignored = fields.SCHEMA_IGNORED

    schema_: dict[str, Any] = Field({}, alias="schema")


class ResponseFormat(RequestBody):
    """OpenAI's constraint of the text."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema = JsonSchema()


class GenerationRequest(RequestBody):
    """Fields of both kinds of completion; without a limit, an answer may fill the context."""

    model: str = ""
    max_tokens: int = Field(MAX_TOKENS, ge=1, le=MAX_TOKENS)
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: StopTexts = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    speculative: bool = True
    disable_spec_decode: bool = False
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    response_format: ResponseFormat = ResponseFormat(type="text")
    structured_outputs: StructuredOutputs = StructuredOutputs()
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = Field(None, min_length=1)
    guided_grammar: str | None = None

    @property
    def limit(self) -> int:
        """Maximum number of new tokens."""
        return self.max_tokens

    @property
    def sampling(self) -> Sampling:
        """OpenAI's defaults: temperature 1 and a random seed."""
        seed = secrets.randbelow(MAX_SEED) if self.seed is None else self.seed
        return Sampling.parse(
            {
                "temperature": self.temperature,
                "top_p": self.top_p,
                "top_k": max(0, self.top_k),  # vLLM's -1 means all, too
                "min_p": self.min_p,
                "seed": seed,
                "chat_template_kwargs": self.template,
                **self._constraint(),
            }
        )

    @property
    def template(self) -> dict[str, Any]:
        """Settings of the chat template; only a chat has any."""
        return {}

    def _constraint(self) -> dict[str, str]:
        """The settings of structured output, if any."""
        guided: dict[str, Any] = {"json": self.guided_json, "regex": self.guided_regex}
        guided |= {"choice": self.guided_choice, "grammar": self.guided_grammar}
        outputs = [self.structured_outputs, StructuredOutputs.parse(guided)]
        if self.response_format.type != "text":
            is_schema = self.response_format.type == "json_schema"
            schema = self.response_format.json_schema.schema_ if is_schema else JSON_OBJECT
            outputs.append(StructuredOutputs.parse({"json": schema}))
        constraints = [constraint for one in outputs for constraint in one.constraints]
        if len(constraints) > 1:
            raise ConfigError("Give only one of schema, regular expression, choice and grammar.")
        return dict(
            zip(("structured_output", "grammar"), *constraints, strict=True) if constraints else {}
        )

    @property
    def limits(self) -> Limits:
        return Limits.parse(
            {
                "max_new_tokens": self.limit,
                "ignore_eos": self.ignore_eos,
                "stop": self.stop,
                "stop_token_ids": self.stop_token_ids,
            }
        )


class ChatRequest(GenerationRequest):
    """Body of `/v1/chat/completions`."""

    ignored, refused = fields.CHAT_IGNORED, fields.CHAT_REFUSED

    messages: list[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS)
    chat_template_kwargs: dict[str, Any] = {}
    reasoning_effort: str | None = None

    @property
    def template(self) -> dict[str, Any]:
        effort = {} if self.reasoning_effort is None else {EFFORT: self.reasoning_effort}
        return effort | self.chat_template_kwargs

    @property
    def limit(self) -> int:
        return self.max_completion_tokens or self.max_tokens


class CompletionRequest(GenerationRequest):
    """Body of `/v1/completions`."""

    ignored, refused = fields.COMPLETION_IGNORED, fields.TEXT_REFUSED

    max_tokens: int = Field(16, ge=1, le=MAX_TOKENS)
    """The default is OpenAI's."""
    prompt: PromptText


class OpenAI(Endpoints):
    @staticmethod
    def error_body(status: int, sentence: str) -> dict[str, Any]:
        kinds = {401: "authentication_error", 404: "not_found_error", 503: "overloaded_error"}
        kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
        return {"error": {"message": sentence, "type": kind, "param": None, "code": status}}

    def routes(self) -> list[Route]:
        return [
            Route("/v1/models", self.models),
            self.route("/v1/models/{name:path}", self.model),
            self.route("/v1/chat/completions", self.chat, "POST"),
            self.route("/v1/completions", self.completions, "POST"),
        ]

    def models(self, _: Request) -> Response:
        loaded = self._host.loaded
        names = list_models(self._host.catalog, loaded.name if loaded else None)
        return JSONResponse({"object": "list", "data": [_model_object(name) for name in names]})

    async def model(self, request: Request) -> Response:
        model = await run_sync(model_of, self._host.catalog, request.path_params["name"])
        return JSONResponse(_model_object(model.name))

    async def chat(self, request: Request) -> Response:
        body = await read_body(request, ChatRequest)
        messages = [message.message for message in body.messages]
        if sum(len(message_text(message)) for message in messages) > MAX_PROMPT_CHARS:
            raise ConfigError(f"The messages must have at most {MAX_PROMPT_CHARS} characters.")
        return await self._complete(request, body, messages=messages)

    async def completions(self, request: Request) -> Response:
        body = await read_body(request, CompletionRequest)
        return await self._complete(request, body, prompt=body.prompt)

    async def _complete(
        self,
        request: Request,
        body: GenerationRequest,
        *,
        prompt: str = "",
        messages: list[Message] | None = None,
    ) -> Response:
        def begin() -> Writer:
            drafts = body.speculative and not body.disable_spec_decode
            model = model_of(self._host.catalog, body.model, drafts=drafts)
            answer = Answer(
                self._host,
                model,
                prompt=prompt,
                messages=messages or (),
                sampling=body.sampling,
                limits=body.limits,
            )
            return Writer(model, answer, is_chat=bool(messages))

        writer = await run_sync(begin)  # compiling a grammar takes time
        if not body.stream:
            text = await writer.answer.text(request.is_disconnected)
            return JSONResponse(writer.response(text))
        with_usage = body.stream_options.include_usage
        return await self.stream(writer.events(request.is_disconnected, with_usage=with_usage))


class Writer:
    """Writes an answer as a response, or as the events of a stream."""

    def __init__(self, model: Model, answer: Answer, *, is_chat: bool) -> None:
        self.answer = answer
        self._drafts, self._is_chat = model.drafts, is_chat
        self._kind = "chat.completion" if is_chat else "text_completion"
        self._common = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{answer.run.id}",
            "created": int(time.time()),
            "model": model.name,
        }

    def response(self, text: str) -> dict[str, Any]:
        message = {"message": {"role": "assistant", "content": text}}
        part = message if self._is_chat else {"text": text}
        choices = [self._choice(part, self.answer.finish_reason)]
        return {**self._common, "object": self._kind, "choices": choices, **self._figures}

    async def events(
        self, disconnected: Disconnected, *, with_usage: bool
    ) -> AsyncGenerator[dict[str, Any] | str]:
        """Chunks of text, the finish reason, the figures if requested, `[DONE]`."""
        first = True
        async with aclosing(self.answer.texts(disconnected)) as pieces:
            async for text in pieces:
                yield self._chunk([self._choice(self._delta(text, first=first), None)])
                first = False
        end = self._choice(self._delta(None, first=first), self.answer.finish_reason)
        yield {**self._chunk([end]), "timings": timings(self.answer.run)}
        if with_usage:
            yield {**self._chunk([]), **self._figures}
        yield "[DONE]"

    def _delta(self, text: str | None, *, first: bool) -> dict[str, Any]:
        """A piece of text in the choice of a chunk; None at the end."""
        if not self._is_chat:
            return {"text": text or ""}
        role = {"role": "assistant"} if first else {}
        return {"delta": {**role, **({} if text is None else {"content": text})}}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._is_chat else self._kind
        return {**self._common, "object": kind, "choices": choices}

    def _choice(self, text: dict[str, Any], finish_reason: str | None) -> dict[str, Any]:
        return {"index": 0, **text, "logprobs": None, "finish_reason": finish_reason}

    @property
    def _figures(self) -> dict[str, Any]:
        run = self.answer.run
        acceptance = speculative_decoding(run) if self._drafts else None
        metrics = {"metrics": {"speculative_decoding": acceptance}} if acceptance else {}
        return {
            "usage": usage(run),
            **metrics,
            "timings": timings(run),
            "run_id": run.log_id,
        }


def _model_object(name: str) -> dict[str, Any]:
    target = name.partition(SEPARATOR)[0]
    return {"id": name, "object": "model", "created": 0, "owned_by": OWNER, "root": target}
