"""Reads prompt files: our YAML, Spec-Bench / EAGLE questions, HumanEval, genai-perf inputs.

| layout | one prompt looks like |
|---|---|
| Spec-Bench, EAGLE, MT-Bench | `{"question_id": 81, "category": "writing", "turns": ["…", "…"]}` |
| HumanEval | `{"task_id": "HumanEval/0", "prompt": "def f(…", "entry_point": "f", …}` |
| genai-perf input file | `{"text": "…"}` or `{"text_input": "…"}`, with `session_id` a turn of it |
| genai-perf inputs.json | `{"data": [{"payload": [{"messages": […]}]}, {"text_input": ["…"]}]}` |
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from engine.errors import ConfigError
from presets import PromptSuite, parse_yaml

MAX_FILE_BYTES = 64 << 20
MAX_NAME = 80
_HUMANEVAL = {"task_id", "entry_point", "canonical_solution"}
_LAYOUTS = (
    "a prompt needs `turns` (Spec-Bench), `prompt` (HumanEval), `text` or `text_input` "
    "(genai-perf), or `data` around them"
)


def read_suite_file(path: Path) -> PromptSuite:
    """A suite from a file, named like the file.

    Raises:
        ConfigError: unreadable or in no known layout; names file, line and what is missing.
    """
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{path} is larger than {MAX_FILE_BYTES >> 20} MiB. Split it.")
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} could not be read: {error}.") from error
    return read_suite_text(text, path.name, where=str(path))


def read_suite_text(text: str, file_name: str, *, where: str) -> PromptSuite:
    """A suite from the text of a file; its name ends in .yaml where it is YAML.

    Raises:
        ConfigError: in no known layout; names `where`, line and what is missing.
    """
    stem, _, ending = file_name.rpartition(".")
    name = (stem or file_name)[:MAX_NAME]
    if ending in ("yaml", "yml"):
        values = parse_yaml(text, where=where)
        if not isinstance(values, dict):
            raise ConfigError(f"{where} must be a mapping with prompts, got {values!r:.60}.")
        return PromptSuite.parse({"name": name, "title": name, **values}, where=where)
    prompts = _joined_sessions([_prompt(item, at) for at, item in _items(text, where)])
    if not prompts:
        raise ConfigError(f"{where} has no prompts: {_LAYOUTS}.")
    head = {"name": name, "title": file_name, "examples": False}
    return PromptSuite.parse({**head, "prompts": prompts}, where=where)


def _items(text: str, where: str) -> list[tuple[str, Any]]:
    """Every object of the file with where it stands."""
    try:
        whole = json.loads(text)
    except json.JSONDecodeError:
        return _lines(text, where)
    rows = whole.get("data", [whole]) if isinstance(whole, dict) else whole
    if not isinstance(rows, list):
        raise ConfigError(f"{where} must hold a list of prompts: {_LAYOUTS}.")
    return [(f"{where}, prompt {n}", row) for n, row in enumerate(rows, start=1)]


def _lines(text: str, where: str) -> list[tuple[str, Any]]:
    found = []
    for n, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            found.append((f"{where}, line {n}", json.loads(line)))
        except json.JSONDecodeError as error:
            raise ConfigError(f"{where}, line {n} is not JSON: {error.msg}.") from error
    return found


def _prompt(item: Any, where: str) -> dict[str, Any]:
    """Fields of `presets.Prompt`, and `session` where the file has one."""
    if isinstance(item, str):
        item = {"text": item}
    if isinstance(item, list) and len(item) == 1:
        item = item[0]
    if not isinstance(item, Mapping):
        raise ConfigError(f"{where} must be an object, got {item!r:.60}: {_LAYOUTS}.")
    if "payload" in item:
        return _prompt(item["payload"], where)
    name = _name(item)
    if "turns" in item:
        turns = [_as_text(turn, where) for turn in _as_list(item["turns"])]
        return {"category": str(item.get("category") or "chat"), "turns": turns, "id": name}
    if "messages" in item:
        return {"category": _category(item, "chat"), "id": name, **_chat(item["messages"], where)}
    if "prompt" in item:
        raw = bool(_HUMANEVAL & set(item))
        category = _category(item, "code" if raw else "chat")
        return {
            "category": category,
            "turns": [_one(item["prompt"], where)],
            "raw": raw,
            "id": name,
        }
    for key in ("text_input", "text"):
        if key in item:
            found = {"category": _category(item, "chat"), "turns": [_one(item[key], where)]}
            return {**found, "id": name, "session": item.get("session_id")}
    raise ConfigError(f"{where} has the keys {', '.join(map(str, item))}; {_LAYOUTS}.")


def _name(item: Mapping[str, Any]) -> str:
    for key in ("question_id", "task_id", "id"):
        if item.get(key) is not None:
            return str(item[key])[:64]
    return ""


def _category(item: Mapping[str, Any], default: str) -> str:
    return str(item.get("category") or default)[:64]


def _chat(messages: Any, where: str) -> dict[str, Any]:
    """The last user message is the prompt; what stands before it is history."""
    pairs = []
    for message in _as_list(messages):
        if not isinstance(message, Mapping) or "role" not in message:
            raise ConfigError(f"{where}: messages must have role and content, got {message!r:.60}.")
        content = _one(message.get("content"), where)
        pairs.append({"role": str(message["role"]), "content": content})
    if not pairs or pairs[-1]["role"] != "user":
        raise ConfigError(f"{where}: the last message must be the user's.")
    return {"turns": [pairs[-1]["content"]], "history": pairs[:-1]}


def _one(value: Any, where: str) -> str:
    """One text, also where it stands in a list or in parts as a chat's content may."""
    parts = [p.get("text", "") if isinstance(p, Mapping) else p for p in _as_list(value)]
    return _as_text("".join(parts) if all(isinstance(p, str) for p in parts) else value, where)


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _as_text(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(f"{where}: a prompt must be text, got {value!r:.60}.")
    return value


def _joined_sessions(prompts: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Prompts of one session become the turns of one prompt."""
    found: list[dict[str, Any]] = []
    sessions: dict[str, dict[str, Any]] = {}
    for prompt in prompts:
        session = prompt.pop("session", None)
        if session is None:
            found.append(prompt)
        elif str(session) in sessions:
            sessions[str(session)]["turns"] += prompt["turns"]
        else:
            sessions[str(session)] = {**prompt, "id": prompt["id"] or str(session)}
            found.append(sessions[str(session)])
    return found
