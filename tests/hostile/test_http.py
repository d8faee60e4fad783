"""Who may call the page, over HTTP: foreign pages, foreign names, programs without the token."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.errors import ConfigError
from playground.web.access import Access
from tests.playground.serving import TOKEN, Served, serving_tiny

API = "/gradio_api"
CALL = f"{API}/component_server"
BODY: dict[str, Any] = {"data": {}, "component_id": 1, "fn_name": "x", "session_hash": "x"}


# ---- the token


def test_every_page_and_call_needs_the_token(served: Served) -> None:
    for path in ("/", "/config", f"{API}/info", f"{API}/queue/data?session_hash=a", "/static/x"):
        assert httpx.get(served.url + path).status_code == 401, path
    assert httpx.get(f"{served.url}/manifest.json").status_code == 200, "browsers ask without it"
    assert httpx.post(served.url + CALL, json=BODY).status_code == 401
    wrong = {"authorization": "Bearer wrong"}
    assert httpx.get(served.url, headers=wrong).status_code == 401
    assert httpx.get(f"{served.url}/?token=wrong").status_code == 401
    answer = httpx.get(served.url, headers={"accept": "text/html"})
    assert answer.status_code == 401 and 'name="token"' in answer.text, "a person is asked for it"
    odd = {"host": f"127.0.0.1{API}/startup-events?"}
    assert httpx.get(f"{served.url}/config", headers=odd).status_code in (400, 401)


def test_the_address_with_the_token_gives_a_cookie_and_an_address_without(served: Served) -> None:
    with httpx.Client(base_url=served.url) as client:
        answer = client.get(f"/?run=a&token={TOKEN}&__theme=dark")
        assert (answer.status_code, answer.headers["location"]) == (303, "/?run=a&__theme=dark")
        cookie = answer.headers["set-cookie"].lower()
        assert "httponly" in cookie and "samesite=strict" in cookie
        assert client.get("/").status_code == 200


def test_no_token_is_for_loopback_only() -> None:
    for address in ("127.0.0.1", "::1", "localhost", "127.3.2.1"):
        assert "token" not in Access(address, token=None).url(80)
    for address in ("0.0.0.0", "::", "192.168.1.5", "name"):
        with pytest.raises(ConfigError, match="--no-token"):
            Access(address, token=None)


def test_without_a_token_programs_pass_and_foreign_pages_do_not(tmp_path: Path) -> None:
    with serving_tiny(tmp_path, Access("::1", token=None)) as served:
        assert served.url.startswith("http://[::1]:")
        assert httpx.get(f"{served.url}/config").status_code == 200
        assert httpx.get(served.url, headers={"origin": served.url}).status_code == 200
        foreign = {"sec-fetch-site": "cross-site"}
        assert httpx.post(served.url + CALL, json=BODY, headers=foreign).status_code == 403


# ---- pages of others


def test_every_response_carries_the_policy(served: Served) -> None:
    with served.client() as client:
        answers = [httpx.get(served.url), client.get("/")]
    for answer in answers:
        assert "default-src 'self'" in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"


ORIGINS = "null https://evil.example http://localhost:1 http://127.0.0.1:1 http://127.0.0.1".split()
FOREIGN: list[dict[str, str]] = [
    *({"sec-fetch-site": site} for site in ("cross-site", "same-site", "something new")),
    *({"origin": origin} for origin in ORIGINS),
    {"sec-fetch-site": "same-origin", "origin": "http://localhost:1"},
]


@pytest.mark.parametrize("path", [CALL, f"{API}/upload"])
def test_foreign_pages_change_nothing(served: Served, path: str) -> None:
    """The origin must be the scheme, the name and the port."""
    near = [served.url.replace("http:", "https:"), served.url.replace("127.0.0.1", "localhost")]
    for headers in (*FOREIGN, *({"origin": origin} for origin in (*near, served.url + "0"))):
        with served.client(headers=headers) as client:
            answer = client.post(path, json=BODY)
        assert answer.status_code == 403, headers
        assert answer.text.count(".") == 1 and "\n" not in answer.text
    with served.client(headers={"origin": served.url}) as client:
        assert client.post(CALL, json=BODY).status_code not in (400, 401, 403, 415)


def test_foreign_pages_may_link_here_and_read_nothing(served: Served) -> None:
    site = {"sec-fetch-site": "cross-site"}
    link = {**site, "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
    with served.client() as client:
        assert client.get("/", headers=link).status_code == 200
        assert client.get("/", headers={**link, "sec-fetch-dest": "iframe"}).status_code == 403
        assert client.get("/config", headers=link).status_code == 403
        assert client.get("/", headers=site).status_code == 403
        stream = f"{API}/queue/data?session_hash=a"
        assert client.get(stream, headers=site).status_code == 403


def test_no_response_allows_another_origin(served: Served) -> None:
    asked = {"access-control-request-method": "POST"}
    with served.client() as client:
        for source in ("http://localhost:1", "https://evil.example", served.url):
            headers = {"origin": source}
            answers = [
                client.get("/", headers=headers),
                client.post(CALL, json=BODY, headers=headers),
                client.options(CALL, headers={**headers, **asked}),
            ]
            for answer in answers:
                assert not [name for name in answer.headers if name.startswith("access-control")]
                assert source not in str(answer.headers.raw)


# ---- names


def test_foreign_host_names_are_refused(served: Served) -> None:
    names = ["evil.example", "127.0.0.1.evil.example", "localhost.evil", "10.1.2.3", "[", "", "*"]
    odd = ["evil@127.0.0.1", "127.0.0.1/gradio_api/startup-events?", "127.0.0.1#"]
    for name in (*names, *odd):
        with served.client(headers={"host": name}) as client:
            assert client.get("/").status_code == 400, name


def test_listening_on_every_interface_does_not_accept_every_host_name(tmp_path: Path) -> None:
    with serving_tiny(tmp_path, Access("0.0.0.0", names=("box.lan",), token=TOKEN)) as served:
        with served.client() as client:
            assert client.get("/", headers={"host": "evil.example"}).status_code == 400
            assert client.get("/", headers={"host": "box.lan:80"}).status_code == 200
            assert client.get("/").status_code == 200
        assert httpx.get(served.url).status_code == 401


# ---- files and calls


def test_only_files_of_this_server_are_served(served: Served, tmp_path: Path) -> None:
    (tmp_path / "other").write_text("other")
    with served.client() as client:
        sent = client.post(f"{API}/upload", files={"files": ("a.txt", b"mine")})
        assert sent.status_code == 200
        (mine,) = sent.json()
        assert client.get(f"{API}/file={mine}").text == "mine"
        folder = Path(mine).parents[1]
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        (folder / "link").unlink(missing_ok=True)
        (folder / "link").symlink_to(tmp_path / "other")
        shared = ("/etc/passwd", __file__, tmp_path / "other", folder, folder / "link", "a")
        for path in (*shared, f"{folder}/../{tmp_path.name}/other"):
            assert client.get(f"{API}/file={path}").status_code in (403, 404), path


def test_calls_of_another_page_are_refused(served: Served) -> None:
    call = {"data": [], "fn_index": 10**6, "session_hash": "x"}
    calls = [(CALL, BODY), (CALL, BODY | {"component_id": 10**9})]
    calls += [(f"{API}/{path}", call) for path in ("queue/join", "run/predict")]
    calls += [(f"{API}/{path}", {"data": []}) for path in ("run/none", "call/none")]
    calls += [(CALL, BODY | {"fn_name": name}) for name in ("__init__", "launch", "close", "")]
    with served.client() as client:
        for path, body in calls:
            answer = client.post(path, json=body)
            assert 400 <= answer.status_code < 500 and "Traceback" not in answer.text, path
        assert client.get("/config").status_code == 200


@pytest.mark.parametrize("listener", ["import_file", "add_files", "read_file"])
def test_a_page_shows_nothing_of_a_file_that_nobody_uploaded(
    served: Served, tmp_path: Path, listener: str
) -> None:
    (other := tmp_path / "other.json").write_text("what nobody may see")
    with served.client() as client:
        listeners = {fn["api_name"]: fn for fn in client.get("/config").json()["dependencies"]}
        given = {"path": str(other), "orig_name": "a", "meta": {"_type": "gradio.FileData"}}
        for value in (given, [given]):
            data = [value, *[None] * (len(listeners[listener]["inputs"]) - 1)]
            body = {"data": data, "fn_index": listeners[listener]["id"], "session_hash": "x"}
            answer = client.post(f"{API}/run/predict", json=body)
            assert "what nobody may see" not in answer.text
