"""The page's functions called with what no page sends, over HTTP at a running server.

A short campaign by default, 6,000 calls and more with `--hostile-long`.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from playground import errors
from playground.web import access
from tests.hostile.campaign import CANARY, VALUES, Campaign, our_fault, shown
from tests.hostile.test_bounds import GROWMAPS
from tests.hostile.test_texts import BAD_JSON, BAD_YAML
from tests.playground.asks import finished, start
from tests.playground.serving import Served, serving_tiny
from tests.storage.conftest import finished_run

pytestmark = pytest.mark.slow

API = "/gradio_api"
JSON_TYPE = {"content-type": "application/json"}
Listener = tuple[int, str, list[Any]]
"""Its number, its name and what its inputs hold."""
RUN = "0123456789abcdef"
QUESTIONS: dict[str, dict[str, Any]] = {
    "since": {"run": RUN, "have": 0},
    "step": {"run": RUN, "index": 0},
    "show": {"run": RUN},
    "start": {"target": "tiny", "method": "scripted", "link": None},
    "table": {"source": "stock", "target": "tiny", "method": "scripted"},
    "drafted": {"run": RUN, "step": 0},
    "optimise": {"source": "stock", "nodes": 8, "tree": [[0]]},
    "read": {"text": "[[0]]", "target": "tiny", "method": "scripted"},
    "write": {"tree": [[0]], "format": "lists", "method": "scripted"},
    "save": {"name": "a", "tree": [[0]], "method": "scripted"},
    "forget": {"name": "a"},
}
"""About what a module asks; others are asked with one of these, too."""


class Page:
    """The page, and its functions as its own `config` lists them."""

    def __init__(self, client: httpx.Client, campaign: Campaign) -> None:
        self.client, self.campaign = client, campaign
        config = client.get("/config").json()
        held = {part["id"]: part["props"].get("value") for part in config["components"]}
        self.listeners: list[Listener] = [
            (fn["id"], fn["api_name"], [held.get(part) for part in fn["inputs"]])
            for fn in config["dependencies"]
            if fn["backend_fn"]
        ]
        self.served = [
            (part["id"], name)
            for part in config["components"]
            for name in part["props"].get("server_fns") or ()
        ]
        self.faults: list[str] = []

    def post(self, path: str, body: Any, case: str) -> None:
        with self.campaign.timed(case):
            try:
                content = json.dumps(body)  # lone surrogates and NaN too
                answer = self.client.post(f"{API}/{path}", content=content, headers=JSON_TYPE)
            except httpx.HTTPError as error:
                self.campaign.judge(case, "broken off", "", fault=repr(error))
                return
        fault, self.faults = ", ".join(self.faults), []
        refused = answer.status_code != 200
        if refused and (answer.status_code >= 500 or "\n" in answer.text.strip()):
            fault = fault or f"status {answer.status_code}: {answer.text[:200]}"
        said = "error" in answer.text[:200] or refused
        self.campaign.judge(case, "refused" if said else "answered", answer.text, fault=fault)

    def listener(self, listener: Listener, at: int, value: Any) -> None:
        number, name, held = listener
        data = [*held[:at], value, *held[at + 1 :]]
        body = {"data": data, "fn_index": number, "session_hash": "hostile"}
        self.post("run/predict", body, f"{name} {at}: {shown(value)}")

    def question(self, served: tuple[int, str], data: Any) -> None:
        number, name = served
        body = {"data": data, "component_id": number, "fn_name": name, "session_hash": "hostile"}
        self.post("component_server", body, f"{name}: {shown(data)}")

    def calls(self) -> Iterator[Callable[[], None]]:
        """Every value in every place."""
        for listener in self.listeners:
            for at in range(len(listener[2])):
                yield from (partial(self.listener, listener, at, value) for value in VALUES)
        for served in self.served:
            question = QUESTIONS.get(served[1], {"method": "scripted", "target": "tiny"})
            for value in VALUES:
                yield partial(self.question, served, value)
                for key in (*question, "more"):
                    yield partial(self.question, served, {**question, key: value})


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("calls")
    (folder / "canary.txt").write_text(CANARY)
    VALUES.append(str(folder / "canary.txt"))
    with serving_tiny(folder) as served:
        for _ in range(3):
            finished_run(served.log)
        yield served
    VALUES.pop()


@pytest.fixture
def page(served: Served, monkeypatch: pytest.MonkeyPatch) -> Iterator[Page]:
    with served.client() as client:
        page = Page(client, Campaign("page calls"))

        def note(*_: Any, **__: Any) -> None:
            if fault := our_fault(sys.exc_info()[1]):
                page.faults.append(fault)

        # Gradio prints what a listener raised; ours raise nothing.
        monkeypatch.setattr(traceback, "print_exc", note)
        for edge in (access, errors):
            monkeypatch.setattr(edge.logger, "exception", note)
        yield page
        assert client.get("/config").status_code == 200, "the server lives"
    run = finished(start(served.host))
    assert run.state == "completed", "and generates"
    page.campaign.check()


@pytest.fixture
def is_long(pytestconfig: pytest.Config) -> bool:
    return bool(pytestconfig.getoption("--hostile-long"))


def test_every_function_bears_every_value(page: Page, is_long: bool) -> None:
    for call in random.Random(13).sample(list(page.calls()), 6000 if is_long else 500):
        call()


JSON = st.recursive(
    st.sampled_from([value for value in VALUES if not isinstance(value, list | dict)]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=10,
)


def test_functions_bear_values_that_nobody_listed(page: Page, is_long: bool) -> None:
    @seed(13)
    @settings(
        max_examples=1500 if is_long else 60,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.sampled_from(page.listeners), st.integers(0, 99), JSON)
    def call(listener: Listener, at: int, value: Any) -> None:
        if listener[2]:
            page.listener(listener, at % len(listener[2]), value)
        page.question(page.served[at % len(page.served)], value)

    call()


def test_calls_that_are_no_calls_are_refused(page: Page) -> None:
    number, _, held = page.listeners[2]
    whole = {"data": held, "fn_index": number, "session_hash": "hostile"}
    part, name = page.served[0]
    asked = {"data": {}, "component_id": part, "fn_name": name, "session_hash": "hostile"}
    names = ("__init__", "__class__", "launch", "close", "")
    bodies = [("component_server", asked | {"fn_name": name}) for name in names]
    for path, body in (("run/predict", whole), ("queue/join", whole), ("component_server", asked)):
        for key, value in itertools.product(body, VALUES):
            if key != "data":
                bodies.append((path, body | {key: value}))
        bodies += [(path, {k: v for k, v in body.items() if k != key}) for key in body]
        bodies += [(path, value) for value in VALUES[:60]]
    bodies += [("run/predict", whole | {"data": held[:n] + held}) for n in range(len(held))]
    bodies += [("run/predict", whole | {"data": held[:n]}) for n in range(len(held))]
    bodies += [("cancel", value) for value in VALUES[:20]]
    for path, body in random.Random(13).sample(bodies, 200):
        page.post(path, body, f"{path} {shown(body)}")


def test_every_hostile_file_is_a_sentence(page: Page) -> None:
    texts = {**BAD_YAML, **BAD_JSON}
    files = {name: encoded(text)[:1_000_000] for name, text in texts.items()} | GROWMAPS
    takers = {name: one for one in page.listeners for name in [one[1]]}
    for name, payload in files.items():
        for ending, taker in (("yaml", "add_files"), ("json", "add_files"), ("gz", "import_file")):
            sent = {"files": (f"{name[:20]}.{ending}", payload)}
            (path,) = page.client.post(f"{API}/upload", files=sent).json()
            meta = {"_type": "gradio.FileData"}
            given = {"path": path, "orig_name": Path(path).name, "meta": meta}
            for value in (given, [given]):
                page.listener(takers[taker], 0, value)
        page.listener(takers["read_file"], 0, given)


def encoded(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
