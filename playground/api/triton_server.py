"""The engine behind NVIDIA's Triton server, whose binary nvidia-pytriton ships.

The tutorials' clients work unchanged, also over gRPC. `ensemble` answers once; `tensorrt_llm_bls`
streams if the request says `stream` (Triton calls it decoupled), and answers once otherwise, as
`generate` requires; `tensorrt_llm` takes and returns token ids. All decode with the same model.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from anyio.to_thread import run_sync
from pydantic import Field

from engine.errors import ConfigError
from playground.api.models import model_of
from playground.api.protocol import status_of
from playground.api.triton import INPUTS, TritonRequest
from playground.host.request import MAX_PROMPT_CHARS
from playground.host.runner import EngineHost

INSTALL = "pip install 'speculative-decoding-playground[triton]'"
KEY_HEADER = "triton-access-token"
ADMINISTRATION = "shared-memory,model-repository,trace,logging"
"""Triton's protocols for administration; they always require the key."""
LIST_INPUTS = ("bad_words", "stop_words", "input_ids")
EXTRA_INPUTS = {"BYTES": "bad_words", "BOOL": "stream", "INT32": "pad_id beam_width"}
"""Unsupported inputs that the tutorials' clients send; values with an effect are refused."""
TOKEN_NAMES = {
    "request_output_len": "max_tokens",
    "runtime_top_k": "top_k",
    "runtime_top_p": "top_p",
    "streaming": "stream",
}
"""Names of fields in the token-level model."""
TOKEN_INPUTS = {
    "INT32": "input_ids input_lengths request_output_len runtime_top_k end_id pad_id beam_width "
    "num_draft_tokens",
    "FP32": "temperature runtime_top_p",
    "UINT64": "random_seed",
    "BOOL": "streaming return_log_probs",
}


class TokenRequest(TritonRequest):
    """Inputs of the token-level model; `input_lengths` is that of `input_ids`."""

    ignored = {"pad_id": "there is no padding", "input_lengths": "input_ids says it"}
    refused = {**TritonRequest.refused, "stream": (False,)}

    text_input: str = ""
    input_ids: tuple[int, ...] = Field(min_length=1, max_length=MAX_PROMPT_CHARS)


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonAccess:
    """Addresses of Triton, and who may generate.

    Attributes:
        key: required for administration, and for generation unless that is open.
        open_http: whether generation over HTTP needs no key. Web pages can send requests to the
            port, so this is not the default.
        open_grpc: whether generation over gRPC, which browsers do not speak, needs no key.
    """

    address: str
    http_port: int
    grpc_port: int
    metrics_port: int
    key: str
    open_http: bool
    open_grpc: bool

    def restricted(self, is_open: bool) -> str:
        """The protocols that require the key, in Triton's notation."""
        generation = "" if is_open else ",inference,statistics"
        return f"{ADMINISTRATION}{generation}:{KEY_HEADER}={self.key}"


@contextmanager
def triton_server(host: EngineHost, model: str, access: TritonAccess) -> Iterator[None]:
    """Run Triton for the duration of the context.

    Args:
        model: the model that both Triton models decode with, as in `playground.api.models`.

    Raises ConfigError: pytriton is not installed, the model is unknown, or Triton did not start.
    """
    try:
        from pytriton.exceptions import PyTritonError
        from pytriton.triton import Triton, TritonConfig, TritonSecurityConfig
    except ImportError as error:
        raise ConfigError(f"Triton's server comes with nvidia-pytriton: {INSTALL}") from error
    model_of(host.catalog, model)
    config = TritonConfig(
        http_address=access.address,
        http_port=access.http_port,
        http_restricted_api=access.restricted(access.open_http),
        grpc_address=access.address,
        grpc_port=access.grpc_port,
        grpc_restricted_protocol=access.restricted(access.open_grpc),
        metrics_address=access.address,
        metrics_port=access.metrics_port,
        log_verbose=0,
    )
    # pytriton's own restrictions would be the same for HTTP and gRPC.
    security = TritonSecurityConfig(access_token=access.key, restricted_endpoints=[])
    # Triton's Python stub must load this interpreter's libpython.
    folders = [sysconfig.get_config_var("LIBDIR"), os.environ.get("LD_LIBRARY_PATH")]
    os.environ["LD_LIBRARY_PATH"] = ":".join(filter(None, folders))
    try:
        with Triton(config=config, security_config=security) as server:
            _bind_models(server, host, model)
            server.run()
            yield
    except (PyTritonError, TimeoutError) as error:
        raise ConfigError(f"Triton did not start: {error}") from error


def _bind_models(server: Any, host: EngineHost, model: str) -> None:
    from pytriton.model_config import ModelConfig, Tensor

    kinds = {"BYTES": bytes, "BOOL": np.bool_, "INT32": np.int32, "UINT64": np.uint64}
    required = ("text_input", "input_ids")

    def tensors(*tables: Mapping[str, str]) -> list[Any]:
        return [
            Tensor(
                name=name,
                dtype=kinds.get(kind, np.float32),
                shape=(-1 if name in LIST_INPUTS else 1,),
                optional=name not in required,
            )
            for table in tables
            for kind, names in table.items()
            for name in names.split()
        ]

    texts = tensors(INPUTS, EXTRA_INPUTS), [Tensor(name="text_output", dtype=bytes, shape=(1,))]
    ids = [
        Tensor(name="output_ids", dtype=np.int32, shape=(1, -1)),
        Tensor(name="sequence_length", dtype=np.int32, shape=(1,)),
    ]
    for name, function, (inputs, outputs) in (
        ("ensemble", _once, texts),
        ("tensorrt_llm_bls", _streaming, texts),
        ("tensorrt_llm", _once, (tensors(TOKEN_INPUTS), ids)),
    ):
        server.bind(
            model_name=name,
            infer_func=function(host, model),
            inputs=inputs,
            outputs=outputs,
            config=ModelConfig(max_batch_size=1, decoupled=function is _streaming),
            strict=False,
        )


def _once(host: EngineHost, model: str) -> Any:
    """Text in and out, or token ids in and out where the request has some."""

    async def infer(requests: Sequence[Any]) -> list[dict[str, Any]]:
        (request,) = requests  # max_batch_size is 1
        with _triton_errors():
            values = request_values(request.data)
            if "input_ids" not in values:
                body = TritonRequest.parse(values)
                answer = await run_sync(body.begin, host, model)
                return [_output(body.prefix + await answer.text())]
            ids = TokenRequest.parse({TOKEN_NAMES.get(k, k): v for k, v in values.items()})
            answer = await run_sync(ids.begin, host, model, ids.input_ids)
            await answer.text()
            output = np.array([[[*ids.input_ids, *await run_sync(answer.token_ids)]]], np.int32)
            return [{"output_ids": output, "sequence_length": np.array([[output.size]], np.int32)}]

    return infer


def _streaming(host: EngineHost, model: str) -> Any:
    async def infer(requests: Sequence[Any]) -> AsyncIterator[list[dict[str, Any]]]:
        (request,) = requests
        with _triton_errors():
            body = TritonRequest.parse(request_values(request.data))
            answer = await run_sync(body.begin, host, model)
            if not any(request.data.get("stream", np.array([False])).ravel()):
                yield [_output(body.prefix + await answer.text())]
                return
            async with aclosing(answer.texts()) as pieces:
                async for text in pieces:
                    yield [_output(text)]

    return infer


@contextmanager
def _triton_errors() -> Iterator[None]:
    """Re-raise errors as pytriton's, with the message of the generate endpoints."""
    from pytriton.exceptions import PyTritonInvalidOperationError

    try:
        yield
    except Exception as error:  # pytriton sends the message of its own errors only
        raise PyTritonInvalidOperationError(status_of(error)[1]) from None


def _output(text: str) -> dict[str, Any]:
    return {"text_output": np.array([[text.encode()]], dtype=object)}


def request_values(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `TritonRequest` from a request's tensors, arrays `(1, n)` by name.

    Raises ConfigError: a string is not UTF-8.
    """
    values: dict[str, Any] = {}
    for name, tensor in tensors.items():
        try:
            items = tensor.ravel().tolist()
            rows = [item.decode() if isinstance(item, bytes) else item for item in items]
        except UnicodeDecodeError as error:
            raise ConfigError(f"{name} is not UTF-8.") from error
        if name in LIST_INPUTS:
            values[name] = rows
        elif rows:
            values[name] = rows[0]
    return values
