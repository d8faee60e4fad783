"""The door of the page: who may call, under which name, and what of Gradio is open at all.

Every request passes, the browser's own too. What passes has the token, comes from our page or from
no page, asks for a route that our pages or programs use, and carries JSON that is bounded
(`engine.safe_text`). Programs may call their endpoints (`playground.api`) with a key of their own,
and write no content type: what a browser sends from a foreign page is told by its origin.
"""

from __future__ import annotations

import ipaddress
import logging
import re
import secrets
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from urllib.parse import urlencode

from anyio.to_thread import run_sync
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.errors import ConfigError
from engine.safe_text import read_json
from playground.api.routes import CALL, is_endpoint, refusal
from playground.api.routes import READ as READ_BY_PROGRAMS

logger = logging.getLogger(__name__)

LOOPBACK = ("127.0.0.1", "localhost", "::1")
ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Addresses that mean every interface, and the one under which this machine reaches them."""

HOST = re.compile(r"([\w.-]+|\[[0-9a-fA-F:.]+\])(?::\d+)?", re.ASCII)
API = "/gradio_api"
STARTED = f"{API}/startup-events"
"""Gradio asks itself whether it has started, without a token; it says yes or no, no more."""
UPLOAD = f"{API}/upload"
FILE = f"{API}/file="
READ = re.compile(
    r"/|/(config|theme\.css|favicon\.ico|robots\.txt|manifest\.json)/?"
    r"|/(assets|static|svelte|modules)/.+"
    rf"|{API}/(info|theme\.css|app_id|queue/data|upload_progress|startup-events)/?"
    rf"|{API}/(heartbeat/[^/]+|call/[^/]+/[^/]+)"
)
"""What pages and programs read. All else that Gradio serves (`proxy=`, `deep_link`, `stream`,
`run-history`, `custom_component`, `dev/reload`, `monitoring`, …) is not found."""
CHANGE = re.compile(rf"{API}/(queue/join|component_server|upload|cancel|reset|(run|call)/[^/]+)/?")
"""Where pages and programs post; not `api`, `call/v2`, `login`, `process_recording`, …"""

MAX_BODY = 40_000_000
MAX_JSON = 8_000_000
"""Bytes of an upload, and of any other body."""

CLOSED = {"connection": "close"}
"""A refusal leaves the request's body unread, so its connection serves no other."""
UNFIT = "The call does not match the page now being served. Reload it; details are in the log."
LOCKED = """<!doctype html><html lang="en"><title>Speculative decoding playground</title>
<p>This page needs its token: open the address that the program printed when it started.</p>
<form><label>Token <input name="token" type="password" autofocus></label>
<button>Open</button></form>
<p>Followed a link here, and have opened the page before? <a href="">Continue</a>.</p></html>"""


@dataclass(frozen=True, slots=True)
class Access:
    """Where the page listens, and who may call it.

    Attributes:
        address: name or address to listen on; IPv6 without brackets.
        names: further host names under which the page may be asked for.
        token: what callers must know; None = nobody has to, on loopback only.
        api_key: what programs that call the endpoints may know instead of the token. Without one
            they need nothing on loopback, and the token elsewhere.
    """

    address: str = "127.0.0.1"
    names: tuple[str, ...] = ()
    token: str | None = field(default_factory=lambda: secrets.token_urlsafe(24), repr=False)
    api_key: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        """Raises ConfigError: no token is asked for, and others reach the address."""
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
    def allowed(self) -> frozenset[str]:
        """Host names that requests may carry; a foreign name that resolves here is refused."""
        local = self.is_loopback or self.address in ANY_ADDRESS
        own = (self.address, *self.names, *(LOOPBACK if local else ()))
        return frozenset(name.lower().strip("[]") for name in own)

    def url(self, port: int) -> str:
        """The page's address for a person, token and all."""
        query = f"?token={self.token}" if self.token else ""
        return f"{self.base_url(port)}/{query}"

    def base_url(self, port: int) -> str:
        """What every address begins with."""
        return f"http://{bracketed(ANY_ADDRESS.get(self.address, self.address))}:{port}"


def bracketed(name: str) -> str:
    """A name or address as it stands in a URL."""
    return f"[{name}]" if ":" in name else name


class Door:
    """Lets a request pass, or says in one sentence why not; plain ASGI, streams are not buffered.

    Args:
        files: the folder of uploads and downloads; no other file of this machine is served.
    """

    def __init__(self, app: ASGIApp, *, access: Access, files: Path) -> None:
        self._app = app
        self._access = access
        self._allowed = access.allowed
        self._files = files.resolve()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":  # nothing of ours speaks it
            await send({"type": "websocket.close", "code": 1008})
        else:
            answer, call = await self._answer(Request(scope)), self._app
            if answer is None and scope["method"] == "POST":
                receive = counted(receive, MAX_BODY)
                call = self._app if is_endpoint(scope["path"]) else self._call
                if scope["path"].rstrip("/") != UPLOAD:
                    answer, receive = await checked(receive, scope["path"])
            await (answer or call)(scope, receive, send)

    async def _call(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Gradio's answer. Where it fails at a call before our part of it begins (which does not
        fail: `playground.errors`), the call was for another page than this one."""
        unfit = _refused(422, UNFIT, scope["path"])
        begun = False

        async def send_fit(message: Message) -> None:
            nonlocal begun
            if message.get("status") == 500:
                await unfit(scope, receive, send)
            elif begun or message["type"] == "http.response.start":
                begun = True
                await send(message)

        try:
            await self._app(scope, receive, send_fit)
        except Exception:
            if begun:
                raise
            logger.exception("a call of %s failed", scope["path"])
            await unfit(scope, receive, send)

    async def _answer(self, request: Request) -> Response | None:
        """Why the request does not pass; None = it does."""
        path = request.scope["path"]
        if "content-length" in request.headers and "transfer-encoding" in request.headers:
            return _refused(400, "A request must not say its length in two ways.", path)
        if not self._is_named(request):
            return _refused(
                400,
                "The page is not served under this host name; add it with --allowed-host.",
                path,
            )
        if is_foreign(request):
            return _refused(403, "Only the playground's own pages may request this.", path)
        if path == "/" and "token" in request.query_params:
            return self._exchange(request)
        if path != STARTED and not self._may_call(request):
            return _locked(request)
        if not await self._is_open(request):
            return _refused(404, "There is nothing here.", path)
        if not is_endpoint(path) and not _is_readable(request):
            return _refused(415, "A request's body must be JSON.", path)
        return None

    def _is_named(self, request: Request) -> bool:
        """Whether it asks for one of our names, or for the address that it was sent to.

        An address cannot be made to resolve here by somebody else; a name can.
        """
        hosts = request.headers.getlist("host")
        found = HOST.fullmatch(hosts[0]) if len(hosts) == 1 else None
        reached, _ = request.scope.get("server") or ("", 0)
        return found is not None and found[1].strip("[]").lower() in {*self._allowed, reached}

    def _exchange(self, request: Request) -> Response:
        """The token for a cookie; the address that stays on show is without it."""
        query = request.query_params.multi_items()
        if not self._is_token(request.query_params["token"]):
            return _locked(request)
        rest = urlencode([(name, value) for name, value in query if name != "token"])
        answer = RedirectResponse(f"/?{rest}" if rest else "/", status_code=303)
        if self._access.token is not None:
            secure = request.scope["scheme"] == "https"
            answer.set_cookie(
                cookie_name(request),
                self._access.token,
                httponly=True,
                samesite="strict",
                secure=secure,
            )
        return answer

    def _may_call(self, request: Request) -> bool:
        """Whether it knows the token; of endpoints for programs, the key, where one is needed."""
        key, given = self._access.api_key, _bearer(request)
        if is_endpoint(request.scope["path"]):
            if key is None and self._access.is_loopback:
                return True
            if key is not None and given is not None and _is_same(given, key):
                return True
        return self._is_token(given or request.cookies.get(cookie_name(request), ""))

    def _is_token(self, given: str) -> bool:
        wanted = self._access.token
        return wanted is None or _is_same(given, wanted)

    async def _is_open(self, request: Request) -> bool:
        """Whether our pages, or programs, use the route."""
        path = request.scope["path"]
        if request.method not in ("GET", "HEAD"):
            posts = CHANGE.fullmatch(path) or CALL.fullmatch(path)
            return request.method == "POST" and posts is not None
        if path.startswith(FILE):
            file = Path(path.removeprefix(FILE))
            return file.is_absolute() and self._files in (await run_sync(file.resolve)).parents
        return (READ.fullmatch(path) or READ_BY_PROGRAMS.fullmatch(path)) is not None


def _bearer(request: Request) -> str | None:
    scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
    return bearer.strip() if scheme.lower() == "bearer" else None


def _is_same(given: str, wanted: str) -> bool:
    return secrets.compare_digest(given.encode(), wanted.encode())


def is_foreign(request: Request) -> bool:
    """Whether a page of another origin sent it; another port of this machine is another origin.

    Foreign pages may link to ours, nothing else. Programs send neither header.
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
    """One per port: browsers give a host's cookies to all of its ports."""
    _, port = request.scope.get("server") or ("", 0)
    return f"playground-{port}"


def _is_readable(request: Request) -> bool:
    """Whether it has no body, or one of JSON, or is an upload."""
    headers = request.headers
    if headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers:
        return True
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    is_upload = request.scope["path"].rstrip("/") == UPLOAD
    return kind == ("multipart/form-data" if is_upload else "application/json")


def counted(receive: Receive, most: int) -> Receive:
    """The body as it comes, as long as it is no longer than this."""
    total = 0

    async def receive_some() -> Message:
        nonlocal total
        message = await receive()
        total += len(message.get("body", b""))
        if total > most:
            raise HTTPException(413, f"A request may have at most {most} bytes.", CLOSED)
        return message

    return receive_some


async def checked(receive: Receive, path: str) -> tuple[Response | None, Receive]:
    """Why the body is not taken, None if it is; and the body again.

    It is looked at whole before anybody parses it: forms and questions are short.
    """
    receive_some, body, more = counted(receive, MAX_JSON), bytearray(), True
    try:
        while more:
            message = await receive_some()
            if message["type"] == "http.disconnect":
                return _refused(400, "The request was cut off.", path), receive
            body += message.get("body", b"")
            more = message.get("more_body", False)
        if body:
            await run_sync(partial(read_json, bytes(body), what="The request"))
    except HTTPException as error:
        return _refused(error.status_code, error.detail, path), receive
    except ConfigError as error:
        return _refused(400, str(error), path), receive
    whole: list[Message] = [{"type": "http.request", "body": bytes(body)}]

    async def receive_again() -> Message:
        return whole.pop() if whole else await receive()

    return None, receive_again


def _locked(request: Request) -> Response:
    if request.method == "GET" and "text/html" in request.headers.get("accept", ""):
        return HTMLResponse(LOCKED, status_code=401, headers=CLOSED)
    sentence = "The token is missing or wrong: send it as Authorization: Bearer TOKEN."
    return _refused(401, sentence, request.scope["path"])


def _refused(status: int, sentence: str, path: str) -> Response:
    return refusal(path, status, sentence, CLOSED)
