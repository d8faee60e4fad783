"""All endpoints for other programs, as routes beside the page's."""

from __future__ import annotations

import re

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

from playground.api.openai import OpenAI
from playground.api.prometheus import PrometheusMetrics
from playground.api.triton import Triton
from playground.host.runner import EngineHost

PATHS = re.compile(
    r"/metrics|/v1/(models(/.+)?|(chat/)?completions)"
    r"|/v2(/health/(live|ready)|/models/[^/]+(/ready|/generate(_stream)?)?)?",
    re.ASCII,
)


def api_routes(host: EngineHost) -> list[BaseRoute]:
    """Routes of an engine's endpoints; registers the metrics with its log."""
    metrics = PrometheusMetrics(host)
    host.log.watchers.append(metrics)

    def respond(_: Request) -> Response:
        return Response(metrics.text(), media_type=CONTENT_TYPE_LATEST)

    return [*OpenAI(host).routes(), *Triton(host).routes(), Route("/metrics", respond)]


def is_endpoint(path: str) -> bool:
    """Whether a path is an endpoint for programs, not part of the page."""
    return PATHS.fullmatch(path) is not None


def refusal(path: str, status: int, sentence: str, headers: dict[str, str]) -> Response:
    """A refusal in the format of the path's protocol."""
    if path.startswith("/v1/"):
        return JSONResponse(OpenAI.error_body(status, sentence), status, headers)
    if path.startswith("/v2"):
        return JSONResponse(Triton.error_body(status, sentence), status, headers)
    return PlainTextResponse(sentence, status, headers)
