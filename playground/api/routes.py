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
from storage import RunLog

GET_PATHS = re.compile(
    r"/metrics|/v1/models(/.+)?|/v2(/health/(live|ready)|/models/[^/]+(/ready)?)?", re.ASCII
)
POST_PATHS = re.compile(r"/v1/(chat/)?completions|/v2/models/[^/]+/generate(_stream)?", re.ASCII)
"""Paths of GET and of POST requests."""


def api_routes(host: EngineHost, log: RunLog) -> list[BaseRoute]:
    """Routes of an engine's endpoints; registers the metrics with its log."""
    metrics = PrometheusMetrics(host)
    log.watchers.append(metrics)

    def respond(_: Request) -> Response:
        return Response(metrics.text(), media_type=CONTENT_TYPE_LATEST)

    return [*OpenAI(host).routes(), *Triton(host).routes(), Route("/metrics", respond)]


def is_endpoint(path: str) -> bool:
    """Whether a path is an endpoint for programs, not part of the page."""
    return GET_PATHS.fullmatch(path) is not None or POST_PATHS.fullmatch(path) is not None


def refusal(path: str, status: int, sentence: str, headers: dict[str, str]) -> Response:
    """A refusal in the format of the path's protocol."""
    if path.startswith("/v1/"):
        return JSONResponse(OpenAI.error_body(status, sentence), status, headers)
    if path.startswith("/v2"):
        return JSONResponse(Triton.error_body(status, sentence), status, headers)
    return PlainTextResponse(sentence, status, headers)
