"""Published chat templates: the prompts that llama.cpp's renderer makes of them.

`golden/chat_templates.json` holds these prompts (or, of long ones, their digests) for the templates
in llama.cpp's `models/templates`; the templates themselves are read from its source.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from engine.errors import PromptError
from engine.model.chat_template import read_options, render
from engine.model.random_weights import byte_tokenizer

RECORDED = json.loads(
    (Path(__file__).parents[1] / "golden/chat_templates.json").read_text(encoding="utf-8")
)
DATES = re.compile(r"\d{4}-\d\d-\d\d|\d{1,2} [A-Z][a-z]+ \d{4}|[A-Z][a-z]+ \d{1,2}, \d{4}")
MAX_CHARS = 300
NO_CALLS = (("agent",), "leaves out the call of the tool weather")
EVERY_TALK = tuple(RECORDED["conversations"])
REFUSED: dict[str, tuple[tuple[str, ...], str]] = {
    **dict.fromkeys(
        (
            "HuggingFaceTB-SmolLM3-3B",
            "LFM2-8B-A1B",
            "LFM2.5-Instruct",
            "deepseek-ai-DeepSeek-R1-Distill-Llama-8B",
            "ibm-granite-granite-3.3-2B-Instruct",
            "llama-cpp-rwkv-world",
            "microsoft-Phi-3.5-mini-instruct",
        ),
        NO_CALLS,
    ),
    **dict.fromkeys(("Kimi-K2-Instruct", "Kimi-K2-Thinking"), (("agent",), "is unsafe")),
    "fireworks-ai-llama-3-firefunction-v2": (EVERY_TALK, "'functions' is undefined"),
}
"""Conversations that llama.cpp renders and we refuse, and why: their template shows no calls, calls
a method that transformers' sandbox forbids, or reads a variable that only a request can set."""


def short(prompt: str) -> str:
    """A prompt without dates; its digest, where it is long."""
    text = DATES.sub("DATE", prompt)
    return text if len(text) <= MAX_CHARS else hashlib.sha256(text.encode()).hexdigest()[:24]


def template_text(name: str) -> str:
    if name in RECORDED["templates"]:
        return str(RECORDED["templates"][name])
    if not (folder := os.environ.get("LLAMA_CPP")):
        pytest.skip("set LLAMA_CPP to the folder of llama.cpp's source to read this template")
    return (Path(folder) / "models/templates" / f"{name}.jinja").read_text(encoding="utf-8")


def settings_of(template: str) -> list[dict[str, Any]]:
    """Every setting of thinking that a template asks for, after its own default."""
    options = read_options(template)
    switched = [dict.fromkeys(options.switches, value) for value in (True, False)]
    efforts = [{"reasoning_effort": effort} for effort in options.efforts]
    return [{}, *(switched if options.switches else []), *efforts]


@pytest.mark.parametrize("name", RECORDED["prompts"])
def test_a_published_template_renders_as_in_llama_cpp(name: str) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<|bos|>", "eos_token": "<|eos|>"})
    tokenizer.chat_template = template = template_text(name)
    prompts: dict[str, list[str]] = {}
    refused, refusal = REFUSED.get(name, ((), ""))
    for talk, messages in RECORDED["conversations"].items():
        for settings in settings_of(template) if talk in ("user", "turns") else [{}]:
            try:
                prompt = short(render(tokenizer, messages, settings, model=name))
                assert talk not in refused, "it is rendered now"
            except PromptError as error:
                prompt = "refused"
                assert str(error).startswith(f"{name}'s chat template ")
                assert talk not in refused or refusal in str(error)
            prompts.setdefault(talk, []).append(prompt)
    recorded = RECORDED["prompts"][name]
    assert prompts == recorded | dict.fromkeys(refused, ["refused"])
