"""Twenty prompts: chat, code, repetitive, a single token, and near the context limit."""

from __future__ import annotations

import random

from engine.model.target import Target

ROOM = 12
"""Tokens that fit behind a prompt near the context limit."""
CHAT = (
    "Why is the sky blue?",
    "Write a haiku about the sea.",
    "Translate to French: the train leaves at nine.",
    "日本語で自己紹介してください 🙂",
)
CODE = (
    "def mean(values):\n    return sum(values) / len(values)\n\n\ndef median(values):\n",
    "for i in range(10):\n    print(i)\nfor i in range(10):\n    print(",
    "SELECT name FROM runs WHERE speed > 2 ORDER BY",
    '{"a": 1, "b": [1, 2, 3], "a": 1, "b": [1,',
)
REPETITIVE = ("ab" * 12, "the cat sat. " * 4, "0" * 30, "one two three one two three one")


def prompts(target: Target) -> dict[str, list[int]]:
    """Token ids of all prompts for a target with a tokenizer."""
    found = {}
    for i, text in enumerate(CHAT):
        found[f"chat-{i}"] = target.encode_chat([{"role": "user", "content": text}])
    for kind, texts in (("code", CODE), ("repetitive", REPETITIVE)):
        for i, text in enumerate(texts):
            found[f"{kind}-{i}"] = target.encode(text)
    words = target.encode("A prompt that nearly fills the context of the model. 0123456789")
    for i in range(4):
        found[f"one-token-{i}"] = [words[i]]
        rng = random.Random(i)
        found[f"near-limit-{i}"] = rng.choices(words, k=target.context_len - ROOM)
    return found
