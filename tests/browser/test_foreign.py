"""A page of another origin, in a real browser, tries to drive the playground."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.playground.serving import Served, with_token

pytestmark = pytest.mark.browser

ATTACK = """<!doctype html><body><script>
const at = new URLSearchParams(location.search).get("at") + "/gradio_api/";
const body = JSON.stringify({ data: [], session_hash: "x", fn_index: 0, component_id: 1,
  fn_name: "x" });
const posts = ["component_server", "queue/join", "run/predict", "upload", "call/run"];
const send = (path, more) =>
  fetch(at + path, { method: "POST", body, credentials: "include", ...more }).catch(() => null);
(async () => {
  for (const path of posts) {
    await send(path, { mode: "no-cors" });
    await send(path, { headers: { "content-type": "application/json" } });
  }
  await fetch(at + "info", { mode: "no-cors", credentials: "include" }).catch(() => null);
  const form = document.createElement("form");
  Object.assign(form, { method: "post", enctype: "text/plain", action: at + "component_server" });
  form.innerHTML = `<input name='{"a": "' value='"}'>`;
  document.body.append(form);
  document.title = "tried";
})();
</script>"""


@pytest.fixture
def evil() -> Iterator[str]:
    """Another origin of this machine."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.end_headers()
            self.wfile.write(ATTACK.encode())

        def log_message(self, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f":{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost"])
def test_a_page_of_another_origin_can_do_nothing(
    chromium: Any, served: Served, evil: str, name: str
) -> None:
    context = chromium.new_context()
    page = context.new_page()
    page.goto(with_token(served.url + "/"))
    page.wait_for_selector("#pg-panel .panel", state="attached")
    page.goto("about:blank")  # what the own page still asked for is not an answer to another
    answers: list[tuple[int, str]] = []
    page.on(
        "response",
        lambda got: (
            answers.append((got.status, json.dumps(got.headers)))
            if got.url.startswith(served.url)
            else None
        ),
    )
    runs = len(served.host.runs.all())
    page.goto(f"http://{name}{evil}/?at={served.url}")
    page.wait_for_function("document.title === 'tried'")
    with page.expect_navigation():
        page.evaluate("document.forms[0].submit()")
    assert "own pages" in page.inner_text("body")
    assert len(answers) >= 7
    assert {status for status, _ in answers} == {403}
    assert not any("access-control" in headers for _, headers in answers)
    assert len(served.host.runs.all()) == runs
    context.close()
