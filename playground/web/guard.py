"""HTTP guards: which names the server answers to, and what a page may load."""

from __future__ import annotations

from typing import Any

from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOOPBACK = ("127.0.0.1", "localhost", "::1")
ANY_ADDRESS = ("0.0.0.0", "::")
POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; font-src 'self' data:; "
    "connect-src 'self'; worker-src 'self' blob:; object-src 'none'; base-uri 'self'; "
    "form-action 'self'; frame-ancestors 'self'"
)
"""Everything from this server only; Gradio's custom components need `unsafe-eval`."""
HEADERS = (
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
)


class SecurityHeaders:
    """Adds the headers to every HTTP response; plain ASGI, so that streams are not buffered."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *HEADERS]}
            await send(message)

        await self._app(scope, receive, send_with_headers if scope["type"] == "http" else send)


def allowed_names(address: str, extra: tuple[str, ...] = ()) -> list[str]:
    """Host names that requests may carry; a foreign name that resolves here is refused.

    An address that means "every interface" cannot tell its own names: then any is taken, unless
    names are given.
    """
    if address in ANY_ADDRESS and not extra:
        return ["*"]
    return [*LOOPBACK, address, *extra]


def middleware(address: str, extra: tuple[str, ...] = ()) -> list[Any]:
    """What goes in front of the app, outermost first."""
    return [
        Middleware(SecurityHeaders),
        Middleware(TrustedHostMiddleware, allowed_hosts=allowed_names(address, extra)),
    ]
