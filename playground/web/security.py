"""Serving the page: theme, access control, content security policy, limit on connections."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
from collections.abc import Sequence
from typing import Any, cast

import gradio as gr
import h11
from anyio.to_thread import run_sync
from gradio.route_utils import CustomCORSMiddleware
from starlette.middleware import Middleware
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from playground.web.access import MAX_UPLOAD_BYTES, Access, AccessControl, bracketed
from playground.web.components import module_address, module_route, static_text

STREAMS_END_S = 1
"""Time that open streams have to end by themselves when the server shuts down."""
MAX_CONNECTIONS = 256
INLINE_SCRIPT = re.compile(rb"<script(?![^>]*\ssrc=)[^>]*>(.*?)</script>", re.DOTALL)
SANS = ("ui-sans-serif", "system-ui", "-apple-system", "Segoe UI", "Roboto", "sans-serif")
MONO = ("ui-monospace", "SFMono-Regular", "Menlo", "DejaVu Sans Mono", "monospace")
"""Fonts of the system; none are fetched."""
HEADERS = ((b"x-content-type-options", b"nosniff"), (b"referrer-policy", b"no-referrer"))


def content_security_policy(page: bytes = b"") -> bytes:
    """A policy that allows loading from this server only, and no inline scripts but the page's.

    Gradio compiles functions from strings (`unsafe-eval`) and writes styles into the page.
    """
    scripts = dict.fromkeys(INLINE_SCRIPT.findall(page))
    digests = (base64.b64encode(hashlib.sha256(script).digest()).decode() for script in scripts)
    hashes = "".join(f"'sha256-{digest}' " for digest in digests)
    return (
        f"default-src 'self'; script-src 'self' {hashes}'unsafe-eval'; "
        "style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; font-src 'self' data:; "
        "connect-src 'self'; worker-src 'self' blob:; object-src 'none'; base-uri 'self'; "
        "form-action 'self'; frame-ancestors 'self'"
    ).encode()


class SecurityHeaders:
    """Adds the headers to every HTTP response; plain ASGI, so streams are not buffered.

    The page itself is buffered, because its policy lists the hashes of its scripts.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        page_start: Message | None = None
        body = b""

        async def send_with_headers(message: Message) -> None:
            nonlocal page_start, body
            if message["type"] == "http.response.start":
                if scope["path"] == "/":
                    page_start = message
                    return
                message = _with_headers(message, content_security_policy())
            elif page_start is not None:
                body += message.get("body", b"")
                if message.get("more_body"):
                    return
                await send(_with_headers(page_start, await run_sync(content_security_policy, body)))
                message = {"type": "http.response.body", "body": body}
            await send(message)

        await self._app(scope, receive, send_with_headers if scope["type"] == "http" else send)


def _with_headers(start: Message, csp: bytes) -> Message:
    headers = [*start.get("headers", ()), (b"content-security-policy", csp), *HEADERS]
    return {**start, "headers": headers}


def launch(page: gr.Blocks, access: Access, port: int, routes: Sequence[BaseRoute]) -> None:
    """Serve the page and further routes behind access control, in a thread of its own.

    Raises OSError: the port is in use, or permission is denied.
    """
    address = json.dumps(module_address("page.js"))
    page.launch(
        server_port=port,
        prevent_thread_lock=True,
        server_name=bracketed(access.address),
        share=False,
        quiet=True,
        run_history=False,
        enable_monitoring=False,
        footer_links=[],
        max_file_size=MAX_UPLOAD_BYTES,
        state_session_capacity=200,
        ssr_mode=False,
        app_kwargs={
            "middleware": [Middleware(SecurityHeaders), Middleware(AccessControl, access=access)],
            "routes": [module_route(), *routes],
            "openapi_url": None,
            "docs_url": None,
            "redoc_url": None,
        },
        theme=theme(),
        css=static_text("page.css", "runs/runs.css"),
        js=f"() => {{ import(new URL({address}, document.baseURI)); }}",
    )
    # Gradio's CORS middleware admits other local pages; AccessControl checks the origin instead.
    app, cors = page.app, cast(Any, CustomCORSMiddleware)
    app.user_middleware = [m for m in app.user_middleware if m.cls is not cors]
    app.middleware_stack = app.build_middleware_stack()
    # Without it, open pages delay the shutdown.
    page.server.config.timeout_graceful_shutdown = STREAMS_END_S
    page.server.config.http_protocol_class = Connection  # for connections from now on


class Connection(H11Protocol):
    """One of at most MAX_CONNECTIONS, which leaves file descriptors for everything else.

    Beyond that, the connection that has waited longest for its client is closed, so idle and slow
    clients lock nobody out.
    """

    _waits_since_s = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._waits_since_s = self.loop.time()
        if len(self.connections) > MAX_CONNECTIONS:
            own = (other for other in self.connections if isinstance(other, Connection))
            waiting = [other for other in own if other._waits_for_client]
            longest = min(waiting, key=lambda other: other._waits_since_s, default=self)
            longest.transport.abort()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._waits_since_s = self.loop.time()

    @property
    def _waits_for_client(self) -> bool:
        """Whether the next request, or the rest of its body, is still to come."""
        is_idle = self.cycle is None or self.cycle.response_complete
        return is_idle or (self.conn.their_state is h11.SEND_BODY and not self.flow.read_paused)


def theme() -> gr.themes.Base:
    """A quiet, dense theme for light and dark."""
    base = gr.themes.Base(
        primary_hue="blue",
        neutral_hue="zinc",
        spacing_size="sm",
        text_size="sm",
        font=SANS,
        font_mono=MONO,
    )
    return base.set(
        body_background_fill="*neutral_50",
        body_background_fill_dark="*neutral_950",
        body_text_color_subdued="*neutral_500",
        layout_gap="10px",
        border_color_primary_dark="*neutral_800",
        block_background_fill_dark="*neutral_900",
        background_fill_primary_dark="*neutral_900",
        background_fill_secondary_dark="*neutral_800",
        block_padding="6px 10px",
        block_radius="8px",
        block_title_text_size="11px",
        block_title_text_color_dark="*neutral_400",
        input_background_fill="white",
        input_background_fill_dark="*neutral_900",
        input_border_width="1px",
        input_border_color_dark="*neutral_700",
        input_padding="6px 8px",
        input_radius="6px",
        checkbox_label_padding="5px 10px",
        checkbox_label_background_fill="transparent",
        checkbox_label_background_fill_dark="transparent",
        button_large_text_size="13px",
        button_small_text_size="12px",
        button_large_text_weight="500",
        button_primary_background_fill="*primary_600",
        button_primary_background_fill_hover="*primary_700",
        button_secondary_background_fill="white",
        button_secondary_background_fill_dark="*neutral_800",
        button_secondary_border_color_dark="*neutral_700",
    )
