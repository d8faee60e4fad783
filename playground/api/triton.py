"""Triton's generate endpoints with the bodies of TensorRT-LLM's tutorials, and KServe's health.

`ensemble` (or any other name of `models.model_of`) continues `text_input` as it is: no chat
template. Fields may stand in the body or in its `parameters`.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from anyio.to_thread import run_sync
from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from engine.config import Limits, Sampling
from playground.api import fields
from playground.api.answer import Answer, timings
from playground.api.models import model_of
from playground.api.protocol import Endpoints, PromptText, RequestBody, StopTexts, read_body
from playground.host.runner import EngineHost

VERSION = "1"
DEFAULT_TOKENS = 16
INPUTS = {
    "BYTES": "text_input stop_words",
    "INT32": "max_tokens top_k end_id num_draft_tokens",
    "FP32": "temperature top_p",
    "UINT64": "random_seed seed",
    "BOOL": "exclude_input_in_output use_draft_logits",
}
"""Names of tensors by their type."""


class TritonRequest(RequestBody):
    """Body of `generate`; later versions of TensorRT-LLM renamed `random_seed` to `seed`."""

    ignored, refused = fields.TRITON_IGNORED, fields.TRITON_REFUSED

    text_input: PromptText
    max_tokens: int = Field(DEFAULT_TOKENS, ge=1, le=1_000_000)
    stop_words: StopTexts = []
    temperature: float | None = None
    """None = 1 if `top_k` or `top_p` restrict the tokens, else 0 (greedy)."""
    top_k: int = 0
    top_p: float = 1.0
    random_seed: int | None = None
    seed: int | None = None
    end_id: int | None = Field(None, ge=-1)
    """The one token that ends the text; -1 = none."""
    exclude_input_in_output: bool = False
    num_draft_tokens: int | None = Field(None, ge=0)
    """Largest number of draft tokens per step; 0 = plain decoding."""
    use_draft_logits: bool | None = None
    """Whether draft tokens are sampled and verified with the draft model's distributions."""

    @property
    def sampling(self) -> Sampling:
        seed = self.random_seed if self.seed is None else self.seed
        samples = self.top_k > 1 or 0 < self.top_p < 1  # as in TensorRT-LLM
        temperature = float(samples) if self.temperature is None else self.temperature
        return Sampling.parse(
            {
                "temperature": 0.0 if self.top_k == 1 else temperature,
                "top_k": self.top_k,
                "top_p": self.top_p or 1.0,
                "seed": secrets.randbelow(2**31) if seed is None else seed,
            }
        )

    @property
    def prefix(self) -> str:
        """The text before the answer, unless it is streamed."""
        return "" if self.exclude_input_in_output else self.text_input

    def begin(self, host: EngineHost, model: str, prompt_ids: tuple[int, ...] = ()) -> Answer:
        """Queue the run on the model of that name; `prompt_ids` come before `text_input`."""
        ends = () if self.end_id is None or self.end_id < 0 else (self.end_id,)
        limits = Limits.parse(
            {
                "max_new_tokens": self.max_tokens,
                "stop": self.stop_words,
                "stop_token_ids": ends,
                "ignore_eos": self.end_id is not None,
            }
        )
        drafts = self.num_draft_tokens != 0
        return Answer(
            host,
            model_of(host.catalog, model, drafts=drafts).with_drafting(
                self.num_draft_tokens or None, self.use_draft_logits if drafts else None
            ),
            prompt=self.text_input,
            prompt_ids=prompt_ids,
            sampling=self.sampling,
            limits=limits,
        )


class Triton(Endpoints):
    @staticmethod
    def error_body(status: int, sentence: str) -> dict[str, Any]:
        return {"error": sentence}

    def routes(self) -> list[Route]:
        model = "/v2/models/{name}"
        return [
            Route("/v2", self.server),
            Route("/v2/health/live", self.healthy),
            self.route("/v2/health/ready", self.ready),
            self.route(model, self.model),
            self.route(f"{model}/ready", self.model_ready),
            self.route(f"{model}/generate", self.generate, "POST"),
            self.route(f"{model}/generate_stream", self.generate_stream, "POST"),
        ]

    async def healthy(self, _: Request) -> Response:
        return Response()

    async def ready(self, _: Request) -> Response:
        self._host.check_progress()
        return Response()

    async def server(self, _: Request) -> Response:
        server = {"name": "speculative-decoding-playground", "extensions": ["generate"]}
        return JSONResponse({**server, "version": VERSION})

    async def model(self, request: Request) -> Response:
        await run_sync(model_of, self._host.catalog, request.path_params["name"])
        tensors = [
            {"name": name, "datatype": kind, "shape": [-1, 1]}
            for kind, names in INPUTS.items()
            for name in names.split()
        ]
        return JSONResponse(
            {
                "name": request.path_params["name"],
                "versions": [VERSION],
                "platform": "speculative_decoding_playground",
                "inputs": tensors,
                "outputs": [{"name": "text_output", "datatype": "BYTES", "shape": [-1, 1]}],
            }
        )

    async def model_ready(self, request: Request) -> Response:
        await run_sync(model_of, self._host.catalog, request.path_params["name"])
        return await self.ready(request)

    async def generate(self, request: Request) -> Response:
        body, answer = await self._begin(request)
        text = await answer.text(request.is_disconnected)
        return JSONResponse(self._response(request, body.prefix + text, answer))

    async def generate_stream(self, request: Request) -> Response:
        _, answer = await self._begin(request)

        async def events() -> AsyncGenerator[dict[str, Any]]:
            async with aclosing(answer.texts(request.is_disconnected)) as pieces:
                async for text in pieces:
                    yield self._response(request, text)
            yield self._response(request, "", answer)

        return await self.stream(events())

    async def _begin(self, request: Request) -> tuple[TritonRequest, Answer]:
        envelope = await read_body(request, _Envelope)
        body = TritonRequest.parse({**envelope.parameters, **(envelope.model_extra or {})})
        return body, await run_sync(body.begin, self._host, request.path_params["name"])

    def _response(
        self, request: Request, text: str, answer: Answer | None = None
    ) -> dict[str, Any]:
        """A response; the last one has the answer's timings."""
        end = {} if answer is None else {"timings": timings(answer.run)}
        return {
            "model_name": request.path_params["name"],
            "model_version": VERSION,
            "sequence_end": False,
            "sequence_id": 0,
            "sequence_start": False,
            "text_output": text,
            **end,
        }


class _Envelope(RequestBody):
    """A body whose fields may be in `parameters`."""

    model_config = {"extra": "allow"}

    parameters: dict[str, Any] = {}
