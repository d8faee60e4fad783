"""The engine behind NVIDIA's own Triton server, whose binary nvidia-pytriton carries.

Clients of the tutorials speak to it as they are, over gRPC too. `ensemble` answers once;
`tensorrt_llm_bls` streams (it is decoupled, in Triton's words). Both decode with one model.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Any

from anyio.to_thread import run_sync

from engine.errors import ConfigError
from playground.api.models import model_of
from playground.api.protocol import status_of
from playground.api.triton import INPUTS, Generating
from playground.host.runner import EngineHost

INSTALL = "pip install 'speculative-decoding-playground[triton]'"
ONCE, STREAMING = "ensemble", "tensorrt_llm_bls"
KEY_HEADER = "triton-access-token"
ADMINISTRATION = "shared-memory,model-repository,statistics,trace,logging"
"""Protocols of Triton that are not for clients: they want the key, always."""
LISTS = ("bad_words", "stop_words")
FURTHER = (("bad_words", "BYTES"), ("stream", "BOOL"), ("pad_id", "INT32"), ("beam_width", "INT32"))
"""Inputs that the tutorials' clients send; those that would change the answer are refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listening:
    """Where Triton listens, and who may ask it to generate.

    Attributes:
        key: what administration wants, and what is said to be open wants not.
        open_http: whether anybody who reaches the port may generate over HTTP. A web page can send
            there whatever the user opens in a browser, so it is not the default.
        open_grpc: the same over gRPC, which browsers do not speak.
    """

    address: str
    http_port: int
    grpc_port: int
    metrics_port: int
    key: str
    open_http: bool
    open_grpc: bool

    def restricted(self, is_open: bool) -> str:
        """The protocols that want the key, in Triton's notation."""
        return f"{ADMINISTRATION}{'' if is_open else ',inference'}:{KEY_HEADER}={self.key}"


@contextmanager
def triton_server(host: EngineHost, model: str, listening: Listening) -> Iterator[None]:
    """Triton, started, and stopped in the end.

    Args:
        model: what both models decode with, named as `playground.api.models` names it.

    Raises ConfigError: pytriton is not installed, or there is no such model, or Triton did not
    start.
    """
    try:
        import numpy as np
        from pytriton.exceptions import PyTritonError
        from pytriton.model_config import ModelConfig, Tensor
        from pytriton.triton import Triton, TritonConfig, TritonSecurityConfig
    except ImportError as error:
        raise ConfigError(f"Triton's server comes with nvidia-pytriton: {INSTALL}") from error
    model_of(host.catalog, model)
    kinds = {"BYTES": bytes, "BOOL": np.bool_, "INT32": np.int32, "UINT64": np.uint64}
    inputs = [
        Tensor(
            name=name,
            dtype=kinds.get(kind, np.float32),
            shape=(-1 if name in LISTS else 1,),
            optional=name != "text_input",
        )
        for name, kind in (*INPUTS, *FURTHER)
    ]
    config = TritonConfig(
        http_address=listening.address,
        http_port=listening.http_port,
        http_restricted_api=listening.restricted(listening.open_http),
        grpc_address=listening.address,
        grpc_port=listening.grpc_port,
        grpc_restricted_protocol=listening.restricted(listening.open_grpc),
        metrics_address=listening.address,
        metrics_port=listening.metrics_port,
        log_verbose=0,
    )
    # Its own restrictions would be the same for HTTP and gRPC.
    security = TritonSecurityConfig(access_token=listening.key, restricted_endpoints=[])
    _find_libpython_first()
    try:
        with Triton(config=config, security_config=security) as server:
            for name, streams in ((ONCE, False), (STREAMING, True)):
                server.bind(
                    model_name=name,
                    infer_func=_streaming(host, model) if streams else _whole(host, model),
                    inputs=inputs,
                    outputs=[Tensor(name="text_output", dtype=bytes, shape=(1,))],
                    config=ModelConfig(max_batch_size=1, decoupled=streams),
                    strict=False,
                )
            server.run()
            yield
    except (PyTritonError, TimeoutError) as error:
        raise ConfigError(f"Triton did not start: {error}") from error


def _find_libpython_first() -> None:
    """Let Triton's Python stub load the libpython of this interpreter, not another version's."""
    folders = [sysconfig.get_config_var("LIBDIR"), os.environ.get("LD_LIBRARY_PATH")]
    os.environ["LD_LIBRARY_PATH"] = ":".join(filter(None, folders))


def _whole(host: EngineHost, model: str) -> Any:
    async def infer(requests: Sequence[Any]) -> list[dict[str, Any]]:
        (request,) = requests  # no batches: the engine does one run at a time
        with _as_tritons():
            asked = Generating.parse(values_of(request.data))
            run = await run_sync(asked.begin, host, model)
            return [_answer(asked.before + await run.text())]

    return infer


def _streaming(host: EngineHost, model: str) -> Any:
    async def infer(requests: Sequence[Any]) -> AsyncIterator[list[dict[str, Any]]]:
        (request,) = requests
        with _as_tritons():
            asked = Generating.parse(values_of(request.data))
            run = await run_sync(asked.begin, host, model)
            async with aclosing(run.texts()) as pieces:
                async for text in pieces:
                    yield [_answer(text)]

    return infer


@contextmanager
def _as_tritons() -> Iterator[None]:
    """Faults as the sentence that the generate endpoints give."""
    from pytriton.exceptions import PyTritonInvalidOperationError

    try:
        yield
    except Exception as error:  # pytriton answers with nothing but its own error's sentence
        raise PyTritonInvalidOperationError(status_of(error)[1]) from None


def _answer(text: str) -> dict[str, Any]:
    import numpy as np

    return {"text_output": np.array([[text.encode()]], dtype=object)}


def values_of(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `Generating` from the tensors of a request, `(1, number)` arrays by name.

    Raises ConfigError: a text is not UTF-8.
    """
    values: dict[str, Any] = {}
    for name, tensor in tensors.items():
        rows = [
            _text(name, one) if isinstance(one, bytes) else one for one in tensor.ravel().tolist()
        ]
        if name in LISTS:
            values[name] = rows
        elif rows:
            values[name] = rows[0]
    return values


def _text(name: str, raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name} is not UTF-8.") from error
