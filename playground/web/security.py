"""How the page is served: which names it answers to, what it may load, nothing sent elsewhere."""

from __future__ import annotations

import json
from typing import Any

from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOOPBACK = ("127.0.0.1", "localhost", "::1")
MAX_UPLOAD = "64mb"
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


def launch_options(host: str, allowed_hosts: tuple[str, ...] = ()) -> dict[str, Any]:
    """Arguments of `Blocks.launch`: local, private, quiet, with our theme, styles and keys."""
    from playground.web.components import module_address, module_routes, static_text
    from playground.web.theme import theme

    address = json.dumps(module_address("page.js"))
    return {
        "server_name": host,
        "share": False,
        "quiet": True,
        "show_error": False,
        "run_history": False,
        "enable_monitoring": False,
        "footer_links": [],
        "max_file_size": MAX_UPLOAD,
        "state_session_capacity": 200,
        "ssr_mode": False,
        "app_kwargs": {
            "middleware": middleware(host, allowed_hosts),
            "routes": module_routes(),
            "openapi_url": None,
            "docs_url": None,
            "redoc_url": None,
        },
        "theme": theme(),
        "css": static_text("page.css", "compare_page.css", "runs/runs.css"),
        "js": f"() => {{ import(new URL({address}, document.baseURI)); }}",
    }
