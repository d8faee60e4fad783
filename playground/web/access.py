"""Access control in front of the page: token, host name, origin, and the size of a body.

Every request passes through it, those of the page itself too. Programs may call their endpoints
(`playground.api`) with a key of their own.
"""

from __future__ import annotations

import ipaddress
import logging
import re
import secrets
from dataclasses import dataclass, field
from urllib.parse import urlencode

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.errors import ConfigError
from playground.api.routes import is_endpoint, refusal

logger = logging.getLogger(__name__)

LOOPBACK = ("127.0.0.1", "localhost", "::1")
WILDCARD_ADDRESSES = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Addresses of all interfaces, each with the loopback address that reaches it from here."""

HOST_HEADER = re.compile(r"([\w.-]+|\[[0-9a-fA-F:.]+\])(?::\d+)?", re.ASCII)
STARTUP = "/gradio_api/startup-events"
"""Gradio requests this from itself, without a token, to learn whether it has started."""
TOKENLESS = (STARTUP, "/manifest.json")
"""Paths that need no token. Browsers fetch the manifest without cookies; it has only the title."""
UPLOAD = "/gradio_api/upload"
MAX_UPLOAD_BYTES = 40_000_000
MAX_BODY_BYTES = 8_000_000
"""Limit for all bodies but uploads."""

CLOSE_CONNECTION = {"connection": "close"}
"""A refusal leaves the request's body unread, so the connection cannot be reused."""
STALE_PAGE = "The call does not match the page being served. Reload it; details are in the log."
LOG_FAILED = "The run log failed"
TOKEN_FORM = """<!doctype html><html lang="en"><title>Speculative decoding playground</title>
<p>This page needs its token: open the address that the program printed when it started.</p>
<form><label>Token <input name="token" type="password" autofocus></label>
<button>Open</button></form>
<p>If you have opened the page before and followed a link, <a href="">continue</a>.</p></html>"""


@dataclass(frozen=True, slots=True)
class Access:
    """The address that the page listens on, and who may call it.

    Attributes:
        address: name or address to listen on; IPv6 without brackets.
        names: further host names under which the page may be requested.
        token: required of every caller; None = not required, on loopback only.
        api_key: accepted instead of the token from programs that call the endpoints. Without one
            they need nothing on loopback, and the token elsewhere.
    """

    address: str = "127.0.0.1"
    names: tuple[str, ...] = ()
    token: str | None = field(default_factory=lambda: secrets.token_urlsafe(24), repr=False)
    api_key: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        """Raises ConfigError: no token is required, and other machines reach the address."""
        if self.token is None and not self.is_loopback:
            raise ConfigError(
                f"--no-token must go with a loopback address, got --host {self.address}. "
                "Leave one of them out."
            )

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine reaches the address."""
        try:
            return ipaddress.ip_address(self.address).is_loopback
        except ValueError:
            return self.address == "localhost"

    @property
    def host_names(self) -> frozenset[str]:
        """Names accepted in the Host header; other names may resolve to this machine, too."""
        local = self.is_loopback or self.address in WILDCARD_ADDRESSES
        names = (self.address, *self.names, *(LOOPBACK if local else ()))
        return frozenset(name.lower().strip("[]") for name in names)

    def url(self, port: int) -> str:
        """The page's URL with its token, to open in a browser."""
        query = f"?token={self.token}" if self.token else ""
        return f"{self.base_url(port)}/{query}"

    def base_url(self, port: int) -> str:
        return f"http://{bracketed(WILDCARD_ADDRESSES.get(self.address, self.address))}:{port}"


def bracketed(name: str) -> str:
    """A name or address as it stands in a URL."""
    return f"[{name}]" if ":" in name else name


class AccessControl:
    """Forwards a request or refuses it in one sentence; plain ASGI, so streams are not buffered."""

    def __init__(self, app: ASGIApp, *, access: Access) -> None:
        self._app = app
        self._access = access
        self._host_names = access.host_names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":  # the playground serves none
            await send({"type": "websocket.close", "code": 1008})
        elif (response := self._refusal(Request(scope))) is not None:
            await response(scope, receive, send)
        else:
            path = scope["path"].rstrip("/")
            limit = MAX_UPLOAD_BYTES if path == UPLOAD else MAX_BODY_BYTES
            call = self._app if is_endpoint(scope["path"]) else self._call_gradio
            await call(scope, limit_body(receive, limit), send)

    async def _call_gradio(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward a call to Gradio, which fails with 500 if the call does not match its components.

        If the run log fails, the 500 says so (`shell.Pages`); nothing else in the playground's
        handlers fails (`playground.errors`).
        """
        stale = _refused(422, STALE_PAGE, scope["path"])
        has_begun, failed_start = False, None

        async def send_checked(message: Message) -> None:
            nonlocal has_begun, failed_start
            if message.get("status") == 500:
                failed_start = message
            elif failed_start and LOG_FAILED.encode() not in message["body"]:
                await stale(scope, receive, send)
            elif failed_start:
                await send(failed_start)
                await send(message)
            elif has_begun or message["type"] == "http.response.start":
                has_begun = True
                await send(message)

        try:
            await self._app(scope, receive, send_checked)
        except ClientDisconnect:
            pass
        except Exception:
            if has_begun:
                raise
            logger.exception("a call of %s failed", scope["path"])
            await stale(scope, receive, send)

    def _refusal(self, request: Request) -> Response | None:
        """The response that refuses a request; None if it is allowed."""
        path = request.scope["path"]
        if "content-length" in request.headers and "transfer-encoding" in request.headers:
            return _refused(400, "A request must not state its length in two ways.", path)
        if not self._has_own_host(request):
            return _refused(
                400,
                "The page is not served under this host name; add it with --allowed-host.",
                path,
            )
        if is_cross_origin(request):
            return _refused(403, "Only the playground's own pages may request this.", path)
        if path == "/" and "token" in request.query_params:
            return self._set_cookie(request)
        if path not in TOKENLESS and not self._is_authorized(request):
            return _unauthorized(request)
        return None

    def _has_own_host(self, request: Request) -> bool:
        """Whether the Host header is one of the page's names, or the address of the connection.

        Others can make a name resolve to this machine, but not an address.
        """
        hosts = request.headers.getlist("host")
        match = HOST_HEADER.fullmatch(hosts[0]) if len(hosts) == 1 else None
        address, _ = request.scope.get("server") or ("", 0)
        return match is not None and match[1].strip("[]").lower() in {*self._host_names, address}

    def _set_cookie(self, request: Request) -> Response:
        """Exchange the token in the URL for a cookie, and redirect to the URL without it."""
        if not self._is_token(request.query_params["token"]):
            return _unauthorized(request)
        query = request.query_params.multi_items()
        others = urlencode([(name, value) for name, value in query if name != "token"])
        response = RedirectResponse(f"/?{others}" if others else "/", status_code=303)
        if self._access.token is not None:
            response.set_cookie(
                cookie_name(request),
                self._access.token,
                httponly=True,
                samesite="strict",
                secure=request.scope["scheme"] == "https",
            )
        return response

    def _is_authorized(self, request: Request) -> bool:
        """Whether it carries the token or, for an endpoint, the API key if one is set."""
        key, bearer = self._access.api_key, _bearer(request)
        if is_endpoint(request.scope["path"]):
            if key is None and self._access.is_loopback:
                return True
            if key is not None and bearer is not None and _equal(bearer, key):
                return True
        return self._is_token(bearer or request.cookies.get(cookie_name(request), ""))

    def _is_token(self, text: str) -> bool:
        token = self._access.token
        return token is None or _equal(text, token)


def _bearer(request: Request) -> str | None:
    scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
    return bearer.strip() if scheme.lower() == "bearer" else None


def _equal(text: str, secret: str) -> bool:
    return secrets.compare_digest(text.encode(), secret.encode())


def is_cross_origin(request: Request) -> bool:
    """Whether a page of another origin sent it; another port of this machine is another origin.

    Other origins may link to the playground, nothing else. Programs send neither header.
    """
    headers = request.headers
    origin = headers.get("origin")
    if origin is not None and origin != f"{request.scope['scheme']}://{headers['host']}":
        return True
    is_link = (
        request.method == "GET"
        and request.scope["path"] == "/"
        and headers.get("sec-fetch-mode") == "navigate"
        and headers.get("sec-fetch-dest") == "document"
    )
    return headers.get("sec-fetch-site", "none") not in ("same-origin", "none") and not is_link


def cookie_name(request: Request) -> str:
    """A name per port, because browsers send a host's cookies to all of its ports."""
    _, port = request.scope.get("server") or ("", 0)
    return f"playground-{port}"


def limit_body(receive: Receive, max_bytes: int) -> Receive:
    """Receives the body as it arrives. Raises HTTPException 413 beyond `max_bytes`."""
    total = 0

    async def receive_limited() -> Message:
        nonlocal total
        message = await receive()
        total += len(message.get("body", b""))
        if total > max_bytes:
            sentence = f"A request may have at most {max_bytes} bytes."
            raise HTTPException(413, sentence, CLOSE_CONNECTION)
        return message

    return receive_limited


def _unauthorized(request: Request) -> Response:
    if request.method == "GET" and "text/html" in request.headers.get("accept", ""):
        return HTMLResponse(TOKEN_FORM, status_code=401, headers=CLOSE_CONNECTION)
    sentence = "The token is missing or wrong: send it as Authorization: Bearer TOKEN."
    return _refused(401, sentence, request.scope["path"])


def _refused(status: int, sentence: str, path: str) -> Response:
    return refusal(path, status, sentence, CLOSE_CONNECTION)
