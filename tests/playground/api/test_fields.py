"""Every field of vLLM's and of TensorRT-LLM's requests: done, harmless, or refused by its name.

The names in fields.json are those of vLLM's `ChatCompletionRequest` and `CompletionRequest` (commit
002032ee, and `guided_*` of 0.10), OpenAI's API reference of 2025, and the inputs of `ensemble` and
`tensorrt_llm_bls` in NVIDIA/TensorRT-LLM's triton_backend (commits 2a9abd95, 0193dbd4) with those
of release 0.9.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.errors import ConfigError
from playground.api.openai import ChatRequest, CompletionRequest
from playground.api.protocol import RequestBody
from playground.api.triton import TritonRequest
from tests.playground.api.test_openai import COMPLETIONS, events, text_of
from tests.playground.serving import Served

KNOWN: dict[str, list[str]] = json.loads(
    Path(__file__).with_name("fields.json").read_text(encoding="utf-8")
)
OTHERS = ["speculative", "disable_spec_decode", "no_repeat_ngram_size"]
ALL = {
    "/v1/chat/completions": [*KNOWN["vllm"], *KNOWN["vllm chat"], *OTHERS],
    "/v1/completions": [*KNOWN["vllm"], *KNOWN["vllm text"], *OTHERS],
    "/v2/models/tiny:scripted/generate": KNOWN["triton"],
}
BODIES: dict[str, dict[str, Any]] = {
    **COMPLETIONS,
    "/v2/models/tiny:scripted/generate": {"text_input": "def f(x):", "max_tokens": 24},
}
MODELS: dict[str, type[RequestBody]] = dict(
    zip(ALL, (ChatRequest, CompletionRequest, TritonRequest), strict=True)
)
HARMLESS = (
    "user safety_identifier session_id request_id metadata store service_tier prompt_cache_key "
    "prompt_cache_retention stream_interval guided_decoding_backend return_mm_kwargs "
    "return_token_offsets spaces_between_special_tokens tools parallel_tool_calls pad_id"
).split()
HARMLESS_VALUES = {"tools": [{"type": "function", "function": {"name": "f"}}], "pad_id": 2}


class Asking:
    """One endpoint, asked with some fields changed."""

    def __init__(self, http: httpx.Client, served: Served, path: str) -> None:
        self._http, self._log, self.path = http, served.log, path

    def post(self, **fields: Any) -> httpx.Response:
        return self._http.post(self.path, json={**BODIES[self.path], **fields})

    def answer(self, **fields: Any) -> dict[str, Any]:
        answer: dict[str, Any] = self.post(**fields).raise_for_status().json()
        return answer

    def text(self, **fields: Any) -> str:
        answer = self.answer(**fields)
        return answer["text_output"] if "text_output" in answer else text_of(answer["choices"][0])

    def output_ids(self) -> tuple[int, ...]:
        self.answer()
        run = self._log.get(self._log.find().rows[0].id)
        assert run is not None
        return tuple(run.output_ids)


@pytest.fixture(params=list(ALL))
def asking(http: httpx.Client, served: Served, request: pytest.FixtureRequest) -> Asking:
    return Asking(http, served, request.param)


# ---- what is done


def stops_at_token(ask: Asking, name: str, value: Callable[[int], Any]) -> None:
    ids = ask.output_ids()
    at = next(i for i in range(3, len(ids)) if ids[i] not in ids[:i])
    answer = ask.answer(**{name: value(ids[at])})
    assert answer["timings"]["predicted_n"] == at + 1


def is_drawn(ask: Asking, name: str) -> None:
    def text(seed: int) -> str:
        return ask.text(temperature=1.0, top_k=0, **{name: seed})

    assert text(1) == text(1) and len({text(seed) for seed in range(4)}) > 1
    assert len({ask.text(temperature=1.0, top_k=0) for _ in range(3)}) > 1


def leaves_the_best(ask: Asking, **cut: Any) -> None:
    few = {"max_tokens": 8, "seed": 1}  # bfloat16 has ties: nothing cuts those
    hot = ask.text(temperature=5.0, **few)
    assert ask.text(temperature=5.0, **few, **cut) == ask.text(**few) != hot


def ends_text(ask: Asking, name: str) -> None:
    """At a stop string, of which not even the beginning is streamed."""
    whole = ask.text()
    begin = len("def f(x):") if "generate" in ask.path else 0
    # Bytes of a tiny model seldom make whole characters: only these are the same in any context.
    pairs = (whole[at : at + 2] for at in range(begin + 3, len(whole) - 1))
    stop = next(pair for pair in pairs if pair.isascii())
    cut = whole[: whole.index(stop, begin)]
    assert ask.text(**{name: [stop]}) == cut
    if "generate" not in ask.path:
        assert ask.answer(**{name: [stop]})["choices"][0]["finish_reason"] == "stop"
        pieces = events(ask.post(stream=True, **{name: [stop]}))
        assert "".join(text_of(piece["choices"][0]) for piece in pieces) == cut


def ends_early(ask: Asking) -> int:
    """A seed whose text the end-of-text token ends."""
    return next(s for s in range(99) if ended(ask, seed=s, ignore_eos=False) == "stop")


def ended(ask: Asking, **fields: Any) -> str:
    asked = {"temperature": 10.0, "max_tokens": 200, **fields}
    return str(ask.answer(**asked)["choices"][0]["finish_reason"])


def is_plain(ask: Asking, **fields: Any) -> None:
    usual, plain = ask.answer(), ask.answer(**fields)
    assert usual["timings"]["draft_n"] > 0 == plain["timings"]["draft_n"]
    assert "metrics" not in plain and text_of(plain["choices"][0]) == text_of(usual["choices"][0])


def is_stream(ask: Asking, **fields: Any) -> None:
    assert ask.post(stream=True, **fields).headers["content-type"].startswith("text/event-stream")


def has_usage(ask: Asking) -> None:
    told = ask.post(stream=True, stream_options={"include_usage": True}).text
    assert '"usage"' in told and '"usage"' not in ask.post(stream=True).text


def is_limited(ask: Asking, name: str) -> None:
    assert ask.answer(**{name: 5})["timings"]["predicted_n"] == 5


def follows_format(ask: Asking) -> None:
    schema = {"name": "a", "schema": {"enum": ["a"]}}
    given = {"type": "json_schema", "json_schema": schema}
    assert ask.text(response_format=given) == '"a"'
    assert ask.text(response_format={"type": "json_object"}, max_tokens=1)[0] == "{"


def reaches_template(ask: Asking, **settings: Any) -> None:
    """The tiny target's chat template reads none, and says so."""
    refusal = ask.post(**settings)
    assert refusal.status_code == 400 and "chat template does not read" in refusal.text


DONE: dict[str, Callable[[Asking], None]] = {
    "model": lambda ask: is_plain(ask, model="tiny:plain"),
    "speculative": lambda ask: is_plain(ask, speculative=False),
    "disable_spec_decode": lambda ask: is_plain(ask, disable_spec_decode=True),
    "messages": lambda ask: _differ(
        ask.text(), ask.text(messages=[{"role": "user", "content": "Other."}])
    ),
    "prompt": lambda ask: _differ(ask.text(), ask.text(prompt="Other.")),
    "text_input": lambda ask: _differ(ask.text()[9:], ask.text(text_input="Other.")[6:]),
    "exclude_input_in_output": lambda ask: _same(
        ask.text(), "def f(x):" + ask.text(exclude_input_in_output=True)
    ),
    "num_draft_tokens": lambda ask: _same(
        (ask.answer(num_draft_tokens=0)["timings"]["draft_n"], ask.text(num_draft_tokens=0)),
        (0, ask.text()),
    ),
    "use_draft_logits": lambda ask: _same(ask.post(use_draft_logits=True).status_code, 400),
    "max_tokens": lambda ask: is_limited(ask, "max_tokens"),
    "max_completion_tokens": lambda ask: is_limited(ask, "max_completion_tokens"),
    "chat_template_kwargs": lambda ask: reaches_template(
        ask, chat_template_kwargs={"enable_thinking": False}
    ),
    "reasoning_effort": lambda ask: reaches_template(ask, reasoning_effort="low"),
    "seed": lambda ask: is_drawn(ask, "seed"),
    "random_seed": lambda ask: is_drawn(ask, "random_seed"),
    "temperature": lambda ask: _differ(ask.text(), ask.text(temperature=5.0)),
    "top_p": lambda ask: leaves_the_best(ask, top_p=1e-6),
    "top_k": lambda ask: leaves_the_best(ask, top_k=1),
    "min_p": lambda ask: leaves_the_best(ask, min_p=1.0),
    "stop": lambda ask: ends_text(ask, "stop"),
    "stop_words": lambda ask: ends_text(ask, "stop_words"),
    "stop_token_ids": lambda ask: stops_at_token(ask, "stop_token_ids", lambda token: [token]),
    "end_id": lambda ask: stops_at_token(ask, "end_id", lambda token: token),
    "ignore_eos": lambda ask: _same(ended(ask, seed=ends_early(ask), ignore_eos=True), "length"),
    "stream": is_stream,
    "stream_options": has_usage,
    "response_format": follows_format,
    "structured_outputs": lambda ask: _same(ask.text(structured_outputs={"choice": ["a"]}), "a"),
    "guided_json": lambda ask: _same(
        (ask.text(guided_json={"enum": ["a"]}), ask.text(guided_json='{"enum": ["a"]}')),
        ('"a"', '"a"'),
    ),
    "guided_regex": lambda ask: _same(ask.text(guided_regex="abc"), "abc"),
    "guided_choice": lambda ask: _same(ask.text(guided_choice=["a"]), "a"),
    "guided_grammar": lambda ask: _same(ask.text(guided_grammar='root ::= "a"'), "a"),
}


def _same(one: object, other: object) -> None:
    assert one == other


def _differ(one: object, other: object) -> None:
    assert one != other


def supported(path: str) -> list[str]:
    """Fields that change the answer; Triton's address decides about `stream`."""
    return [n for n in ALL[path] if n in DONE and not ("generate" in path and n == "stream")]


def harmless(path: str) -> list[str]:
    return [n for n in ALL[path] if n in HARMLESS or ("generate" in path and n == "stream")]


@pytest.mark.parametrize(
    ("asking", "name"),
    [(path, name) for path in ALL for name in supported(path)],
    indirect=["asking"],
)
def test_every_supported_field_acts(asking: Asking, name: str) -> None:
    DONE[name](asking)


def test_harmless_fields_change_no_answer(asking: Asking) -> None:
    values = {name: HARMLESS_VALUES.get(name, "x") for name in harmless(asking.path)}
    assert asking.text(**values) == asking.text()


@pytest.mark.parametrize("path", ALL)
def test_every_other_field_is_refused_by_its_name(path: str) -> None:
    for name in {*ALL[path]} - {*supported(path)} - {*harmless(path)}:
        refusals = []
        for value in (2, "x", ["x"], {"a": 1}, True, False):
            try:
                MODELS[path].parse({**BODIES[path], name: value})
            except ConfigError as error:
                refusals.append(str(error).startswith(f"{name} must be "))
        assert all(refusals) and len(refusals) >= 5, f"{name}: only a flag may be at rest"


def test_neutral_values_and_nulls_change_no_answer(asking: Asking) -> None:
    """Clients send defaults and nulls for everything they know."""
    usual, refused = asking.text(), MODELS[asking.path].refused
    for i in range(max(map(len, refused.values()))):
        values = {name: neutral[i] for name, neutral in refused.items() if i < len(neutral)}
        assert asking.text(**values) == usual, values
    assert asking.text(**dict.fromkeys([*refused, "unheard_of"])) == usual
