"""OpenAI's endpoints over a tiny target: shapes, figures, refusals, clients that leave."""

from __future__ import annotations

import json
import socket
import sqlite3
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from playground.host.live import LiveRun
from storage import dialects
from tests.playground.asks import busy, finished, until
from tests.playground.serving import TOKEN, Served, serving_tiny
from tests.playground.test_http import call
from tests.playground.tiny import held_drafts

OPTIONS: dict[str, Any] = {"max_tokens": 24, "temperature": 0, "ignore_eos": True}
CHAT = {
    "model": "tiny:scripted",
    "messages": [{"role": "user", "content": "Say hello."}],
    **OPTIONS,
}
TEXT = {"model": "tiny:scripted", "prompt": "def f(x):", **OPTIONS}
COMPLETIONS = {"/v1/chat/completions": CHAT, "/v1/completions": TEXT}


def text_of(choice: dict[str, Any]) -> str:
    part = choice.get("delta") or choice.get("message") or choice
    return part.get("content") or part.get("text") or ""


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.mark.parametrize("path", COMPLETIONS)
def test_an_answer_is_the_run_of_the_log(http: httpx.Client, served: Served, path: str) -> None:
    answer = http.post(path, json=COMPLETIONS[path]).raise_for_status().json()
    run = served.log.get(answer["run_id"])
    assert run is not None and run.status == "completed"
    (choice,), figures = answer["choices"], run.metrics
    assert text_of(choice) == run.text
    assert choice["finish_reason"] == "length"
    kind = "chat.completion" if "chat" in path else "text_completion"
    assert answer["object"] == kind and answer["model"] == "tiny:scripted"
    assert answer["usage"] == {
        "prompt_tokens": run.num_prompt_tokens,
        "completion_tokens": 24,
        "total_tokens": run.num_prompt_tokens + 24,
        "prompt_tokens_details": {"cached_tokens": figures["num_cached"]},
    }
    told = answer["metrics"]["speculative_decoding"]
    assert told["num_spec_steps"] == sum(told["acceptance_histogram"]) == figures["num_steps"]
    assert told["num_draft_tokens"] == figures["num_drafted"] == answer["timings"]["draft_n"]
    assert len(told["acceptance_histogram"]) == told["num_spec_tokens"] + 1
    accepted = sum(j * steps for j, steps in enumerate(told["acceptance_histogram"]))
    assert told["num_accepted_draft_tokens"] == figures["num_accepted"] == accepted > 0
    assert answer["timings"]["draft_n_accepted"] == accepted


def test_a_conversation_s_next_turn_reads_what_is_new(http: httpx.Client) -> None:
    """Both protocols' words for it, and the log's."""
    first = http.post("/v1/chat/completions", json={**CHAT, "ignore_eos": False}).json()
    said = {"role": "assistant", "content": text_of(first["choices"][0])}
    turns = [*CHAT["messages"], said, {"role": "user", "content": "And now goodbye."}]
    answer = http.post("/v1/chat/completions", json={**CHAT, "messages": turns}).json()
    usage, timings = answer["usage"], answer["timings"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert first["usage"]["prompt_tokens"] <= cached < usage["prompt_tokens"]
    assert (timings["cache_n"], timings["prompt_n"]) == (cached, usage["prompt_tokens"] - cached)


@pytest.mark.parametrize("path", COMPLETIONS)
def test_a_stream_is_the_same_text_in_pieces(http: httpx.Client, path: str) -> None:
    body = COMPLETIONS[path]
    whole = http.post(path, json=body).json()
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = events(http.post(path, json=asked))
    assert "".join(text_of(chunk["choices"][0]) for chunk in chunks) == text_of(whole["choices"][0])
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == "length"
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks[:-1])
    assert {chunk["object"] for chunk in [*chunks, last]} == (
        {"chat.completion.chunk"} if "chat" in path else {"text_completion"}
    )
    (read, last_read) = (
        one.pop("prompt_tokens_details") for one in (whole["usage"], last["usage"])
    )
    assert last["choices"] == [] and last["usage"] == whole["usage"]
    # The second time all but the prompt's last token, which the answer begins with, is cached.
    assert last_read == {"cached_tokens": last["usage"]["prompt_tokens"] - 1} and read != {}
    assert last["metrics"] == whole["metrics"]
    assert len({chunk["id"] for chunk in [*chunks, last]}) == 1


def test_messages_are_a_conversation(http: httpx.Client, served: Served) -> None:
    parts = [{"type": "text", "text": "Say "}, {"type": "text", "text": "hello."}]
    talk = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "Hello.", "refusal": None, "tool_calls": []},
        {"role": "user", "content": "Again."},
    ]
    answer = http.post("/v1/chat/completions", json={**CHAT, "messages": talk}).json()
    run = served.log.get(answer["run_id"])
    assert run is not None and run.prompt_text == "Again."
    assert [dict(message) for message in run.messages] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "Again."},
    ]


AGENT_TEMPLATE = (
    "{% if not enable_thinking %}<off>{% endif %}{% for m in messages %}"
    "[{{ m.role }}]{{ m.reasoning_content }}{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}[assistant]"
)
AGENT_PROMPT = (
    '<off>[user]Say hello.[assistant]Look it up.weather{"place": "Paris"}[tool]Sunny[assistant]'
)


def test_an_agents_history_and_its_thinking_reach_the_template(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    function = {"name": "weather", "arguments": '{"place": "Paris"}'}
    call = {"id": "1", "type": "function", "function": function}
    turn = {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None}
    history: list[Any] = [
        *CHAT["messages"],
        {**turn, "reasoning_content": "Look it up."},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "Sunny"}]},
    ]
    asked: dict[str, Any] = {
        "model": "tiny:plain",
        "messages": history,
        "max_tokens": 2,
        "temperature": 0,
    }
    thinking = {"chat_template_kwargs": {"enable_thinking": False}}
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.BadRequestError, match="does not read enable_thinking"):
            client.chat.completions.create(**asked, extra_body=thinking)
        with pytest.raises(openai.BadRequestError, match="leaves out the call of the tool weather"):
            client.chat.completions.create(**asked)
        target = served.host.loaded
        assert target is not None and target.tokenizer is not None
        monkeypatch.setattr(target.tokenizer, "chat_template", AGENT_TEMPLATE)
        answers = [
            client.chat.completions.create(**asked, extra_body=thinking),
            client.chat.completions.create(**asked, reasoning_effort="none"),
        ]
        runs = [served.log.get(answer.model_extra["run_id"]) for answer in answers]
    asked_for = (thinking["chat_template_kwargs"], {"reasoning_effort": "none"})
    for run, kwargs in zip(runs, asked_for, strict=True):
        assert run is not None and run.sampling["chat_template_kwargs"] == kwargs
        assert target.tokenizer.decode(list(run.prompt_ids)) == AGENT_PROMPT
        assert run.prompt_text == "Sunny" and run.messages[1]["content"] is None
    assert len({run.setup_id for run in runs if run}) == 2


MESSAGE = {"role": "user", "content": "Hi."}
REFUSED: list[tuple[str, object, str]] = [
    *(("chat", body, word) for body, word in (("{", "JSON"), ([], "mapping"), ({}, "messages"))),
    ("chat", {"messages": []}, "messages"),
    ("chat", {"messages": [{"role": "user"}]}, "content"),
    ("chat", {"messages": [{"role": "x", "content": ""}]}, "role"),
    ("chat", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "content"),
    ("chat", {"messages": [{**MESSAGE, "tool_calls": [{"id": "1"}]}]}, "tool_calls"),
    ("chat", {"messages": [{**MESSAGE, "tool_call_id": "1"}]}, "tool_call_id belongs to"),
    ("chat", {"messages": [{"role": "tool", "tool_call_id": "1"}]}, "content is missing"),
    ("chat", {"chat_template_kwargs": {"a-b": 1}}, "chat_template_kwargs"),
    ("chat", {"messages": [{**MESSAGE, "unheard_of": 1}]}, "unheard_of"),
    ("chat", {"stream_options": {"continuous_usage_stats": True}}, "continuous_usage_stats"),
    ("chat", {"structured_outputs": {"whitespace_pattern": " "}}, "whitespace_pattern"),
    *((kind, {"unheard_of": 1}, "unheard_of") for kind in ("chat", "text")),
    ("text", {"logprobs": 0}, "logprobs must be"),
    *(("chat", {"temperature": value}, "temperature") for value in (-1, "hot")),
    ("chat", {"top_p": 2}, "top_p"),
    ("chat", {"max_tokens": 0}, "max_tokens"),
    ("chat", {"response_format": {"type": "other"}}, "format"),
    ("chat", {"guided_json": {"type": "objec"}}, "Invalid type: objec"),
    ("text", {"guided_regex": "("}, "unclosed group"),
    ("text", {"guided_regex": "a", "guided_choice": ["a"]}, "only one of"),
    ("chat", {"model": "gpt-9"}, "gpt-9"),
    ("chat", {"model": "tiny:none"}, "none"),
    ("chat", {"stop": ["x"] * 17}, "stop"),
    *(("text", {"prompt": prompt}, "prompt") for prompt in ("", [1, 2])),
    ("text", {"prompt": ["a", "b"]}, "prompt must be a valid string"),
    ("text", {"prompt": "a" * 1_000_000}, "characters"),
    ("text", {"prompt": "many words " * 400}, "context"),
]


@pytest.mark.parametrize(("kind", "changes", "word"), REFUSED)
def test_an_invalid_request_is_refused_in_the_protocols_own_form(
    http: httpx.Client, kind: str, changes: object, word: str
) -> None:
    path, whole = next((p, b) for p, b in COMPLETIONS.items() if ("chat" in p) == (kind == "chat"))
    body = {**whole, **changes} if isinstance(changes, dict) and changes else changes
    bodies = [body] if isinstance(body, str) else [json.dumps(body)]
    if isinstance(body, dict):
        bodies.append(json.dumps({**body, "stream": True}))
    for text in bodies:
        answer = http.post(path, content=text, headers={"content-type": "application/json"})
        status = 404 if isinstance(changes, dict) and "model" in changes else 400
        assert answer.status_code == status, answer.text
        error = answer.json()["error"]
        assert word in error["message"] and error["code"] == status and error["type"]


STREAMED = {
    "/v1/chat/completions": {**CHAT, "stream": True},
    "/v2/models/ensemble/generate_stream": {"text_input": "a"},
}


@contextmanager
def leaving(served: Served, path: str, body: dict[str, Any]) -> Iterator[None]:
    """A client asks, and hangs up at the end of the block."""
    address, content = httpx.URL(served.url), json.dumps(body)
    head = f"POST {path} HTTP/1.1\r\nhost: {address.netloc.decode()}\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    with socket.create_connection((address.host, address.port or 80)) as client:
        client.sendall((head + content).encode())
        yield


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_run(served: Served, stream: bool) -> None:
    past = served.host.runs.all()
    with held_drafts():
        with leaving(served, "/v1/chat/completions", {**CHAT, "stream": stream}):
            until(lambda: any(run.first for run in served.host.runs.all() if run not in past))
        run = served.host.runs.all()[-1]
        until(run.cancel_requested.is_set)
    assert finished(run).state == "cancelled"
    assert served.log.find().rows[0].status == "cancelled"


@pytest.mark.parametrize("path", STREAMED)
def test_a_client_that_leaves_while_it_waits_gives_up_its_place(served: Served, path: str) -> None:
    with busy(served.host):
        with leaving(served, path, STREAMED[path]):
            until(lambda: served.host.occupancy == (1, 1))
        until(lambda: served.host.occupancy == (1, 0))


@contextmanager
def held(served: Served, **fields: Any) -> Iterator[tuple[LiveRun, Future[httpx.Response]]]:
    """The run of a chat, which stands still after its first token, and its answer."""
    url, past = f"{served.url}/v1/chat/completions", served.host.runs.all()
    with ThreadPoolExecutor(1) as client, held_drafts():
        answer = client.submit(httpx.post, url, json={**CHAT, **fields}, timeout=60)
        until(lambda: any(run.first for run in served.host.runs.all() if run not in past))
        yield served.host.runs.all()[-1], answer


@pytest.mark.parametrize("stream", [False, True])
def test_a_stopped_answer_is_an_error(served: Served, stream: bool) -> None:
    letters = {"structured_outputs": {"regex": "[a-z]{24}"}}  # no half characters
    with held(served, stream=stream, **letters) as (run, answering):
        run.cancel()
    answer = answering.result()
    assert answer.status_code == (200 if stream else 503)
    told = json.loads(answer.text.strip().rpartition("data: ")[2])
    error = {"message": "The run was stopped.", "type": "overloaded_error"}
    assert told == {"error": {**error, "param": None, "code": 503}}


def test_a_page_that_follows_a_requests_run_does_not_own_it(served: Served) -> None:
    with ThreadPoolExecutor(1) as page:
        with held(served) as (run, answering):
            following = page.submit(call, served, "follow_link", ["tab", run.id, None])
            until(lambda: run.watchers or following.done())
            watchers, owner = run.watchers, run.owner
        assert answering.result().status_code == 200 and following.result()
    assert watchers == 1 and owner.startswith("api/")


def idle(served: Served) -> None:
    """Wait until the engine does nothing."""
    until(lambda: served.host.occupancy == (0, 0))


@pytest.mark.parametrize(
    "constraint",
    [
        {"guided_json": {"type": "integer", "multipleOf": 99999989}},
        {"guided_grammar": 'start: e\ne: "" | e e | e e e | /[a-z]/ | /[^,]/ | /./'},
        {"guided_regex": "(.|\\n)*(a|e|i).{24}(o|u|x).{11}"},
    ],
)
def test_no_grammar_keeps_the_others_waiting(
    http: httpx.Client, served: Served, constraint: dict[str, Any]
) -> None:
    with ThreadPoolExecutor(4) as pool:
        bombs = [pool.submit(http.post, "/v1/completions", json=TEXT | constraint) for _ in "123"]
        for path in ("/v1/completions", "/v2/health/ready"):
            body = TEXT | {"max_tokens": 2}
            answer = http.post(path, json=body) if path.startswith("/v1") else http.get(path)
            assert answer.status_code == 200
        for bomb in bombs:
            assert bomb.result(timeout=30).status_code in (200, 400, 500)
    assert served.host.occupancy == (0, 0)


def test_a_client_is_told_to_wait_where_the_queue_is_full(served: Served) -> None:
    with busy(served.host, full=True):
        answer = httpx.post(f"{served.url}/v1/completions", json=TEXT, timeout=60)
    assert answer.status_code == 503 and "waiting" in answer.json()["error"]["message"]
    assert "retry-after" in answer.headers


def test_the_openai_package_is_served(served: Served) -> None:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        names = ["tiny", "tiny:plain", "tiny:scripted"]
        assert [model.id for model in client.models.list()] == names
        assert client.models.retrieve(names[-1]).id == names[-1]
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("none")
        asked = {**CHAT, "extra_body": {"ignore_eos": True}}
        del asked["ignore_eos"]
        whole = client.chat.completions.create(**asked)
        stream = client.chat.completions.create(
            **asked, stream=True, stream_options={"include_usage": True}
        )
        *chunks, last = list(stream)
        pieces = [chunk.choices[0].delta.content or "" for chunk in chunks]
        assert "".join(pieces) == whole.choices[0].message.content and last.usage == whole.usage
        with pytest.raises(openai.BadRequestError, match="n must be 1"):
            client.chat.completions.create(**asked, n=2)
        text = client.completions.create(model="tiny", prompt="def f(x):", max_tokens=8)
        assert text.choices[0].finish_reason in ("length", "stop")


def test_the_api_is_the_programs_but_not_foreign_pages(served: Served) -> None:
    foreign = {"origin": "http://127.0.0.1:1", "sec-fetch-site": "cross-site"}
    url = f"{served.url}/v1/completions"
    for headers in ({"origin": foreign["origin"]}, {"sec-fetch-site": "cross-site"}):
        answer = httpx.post(url, json=TEXT, headers=headers)
        assert answer.status_code == 403 and answer.json()["error"]["code"] == 403
    assert httpx.get(f"{served.url}/v1/models", headers={"host": "evil.example"}).status_code == 400
    assert httpx.get(f"{served.url}/v1/other", headers=bearer(TOKEN)).status_code == 404


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_a_log_that_another_program_has_locked_is_unavailable_and_no_bad_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dialects, "BUSY_TIMEOUT_MS", 10)
    with serving_tiny(tmp_path) as served, httpx.Client(base_url=served.url, timeout=60) as http:
        with closing(sqlite3.connect(tmp_path / "runs.db")) as other:
            other.execute("BEGIN IMMEDIATE")
            answer = http.post("/v1/completions", json=TEXT)
        assert http.post("/v1/completions", json=TEXT).status_code == 200
    assert answer.status_code == 503 and answer.headers["retry-after"]
    assert "is locked by another program" in answer.json()["error"]["message"]
