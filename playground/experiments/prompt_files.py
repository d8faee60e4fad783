"""Reads prompt files: our YAML, Spec-Bench / EAGLE questions, HumanEval, genai-perf inputs.

| layout | one prompt looks like |
|---|---|
| Spec-Bench, EAGLE, MT-Bench | `{"question_id": 81, "category": "writing", "turns": ["…", "…"]}` |
| HumanEval | `{"task_id": "HumanEval/0", "prompt": "def f(…", "entry_point": "f", …}` |
| genai-perf input file | `{"text": "…"}` or `{"text_input": "…"}`, with `session_id` a turn of it |
| TensorRT-LLM input_data.json | `{"input": "…", "instruction": "…", "output": "…"}`: joined so |
| genai-perf inputs.json | `{"data": [{"payload": [{"messages": […]}]}, {"text_input": ["…"]}]}` |
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field

from engine.config import Settings
from engine.errors import ConfigError
from engine.safe_text import read_json, read_text
from presets import PromptSuite
from presets.reading import parse_yaml

MAX_NAME = 80
MAX_CATEGORY = 64
_HUMANEVAL = {"task_id", "entry_point", "canonical_solution"}
_LAYOUTS = (
    "a prompt needs `turns` (Spec-Bench), `prompt` (HumanEval), `text` or `text_input` "
    "(genai-perf), or `data` around them"
)


def _joined(value: Any) -> str:
    """One text, also where it stands in a list or in parts as a chat's content may."""
    parts = [p.get("text", "") if isinstance(p, dict) else p for p in _listed(value)]
    text = "".join(parts) if all(isinstance(p, str) for p in parts) else None
    if text is None or not text.strip():
        raise ValueError(f"a prompt must be text, got {value!r:.60}")
    return text


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


Text = Annotated[str, BeforeValidator(_joined)]


class _Message(Settings):
    model_config = ConfigDict(extra="ignore")

    role: str
    content: Text


class _Row(Settings):
    """One prompt as any of the layouts spells it."""

    model_config = ConfigDict(extra="ignore", coerce_numbers_to_str=True, strict=False)

    question_id: str | None = None
    task_id: str | None = None
    id: str | None = None
    session_id: str | None = None
    category: str | None = None
    turns: Annotated[list[Text], BeforeValidator(_listed), Field(min_length=1)] | None = None
    messages: Annotated[list[_Message], BeforeValidator(_listed), Field(min_length=1)] | None = None
    prompt: Text | None = None
    text_input: Text | None = None
    text: Text | None = None
    input: Text | None = None
    instruction: Text | None = None

    @property
    def name(self) -> str:
        return (self.question_id or self.task_id or self.id or "")[:MAX_CATEGORY]


def read_suite_file(path: Path) -> PromptSuite:
    return read_suite_text(read_text(path), path.name, where=str(path))


def read_suite_text(text: str, file_name: str, *, where: str) -> PromptSuite:
    """A suite from the text of a file; its name ends in .yaml where it is YAML."""
    stem, _, ending = file_name.rpartition(".")
    name = (stem or file_name)[:MAX_NAME]
    if ending in ("yaml", "yml"):
        values = parse_yaml(text, where=where)
        if not isinstance(values, dict):
            raise ConfigError(f"{where} must be a mapping with prompts, got {values!r:.60}.")
        return PromptSuite.parse({"name": name, "title": name, **values}, where=where)
    prompts: list[dict[str, Any]] = []
    sessions: dict[str, dict[str, Any]] = {}
    for at, item in _items(text, where):
        prompt, session = _prompt(item, at)
        if session is not None and session in sessions:
            sessions[session]["turns"] += prompt["turns"]
            continue
        prompts.append(prompt)
        if session is not None:
            sessions[session] = prompt
            prompt["id"] = prompt["id"] or session
    if not prompts:
        raise ConfigError(f"{where} has no prompts: {_LAYOUTS}.")
    head = {"name": name, "title": file_name, "examples": False}
    return PromptSuite.parse({**head, "prompts": prompts}, where=where)


def _items(text: str, where: str) -> list[tuple[str, Any]]:
    """Every object of the file with where it stands."""
    try:
        whole = read_json(text, what=where)
    except ConfigError:  # a line of it may be at fault, which that one is named by
        return _lines(text, where)
    rows = whole.get("data", [whole]) if isinstance(whole, dict) else whole
    if not isinstance(rows, list):
        raise ConfigError(f"{where} must hold a list of prompts: {_LAYOUTS}.")
    return [(f"{where}, prompt {n}", row) for n, row in enumerate(rows, start=1)]


def _lines(text: str, where: str) -> list[tuple[str, Any]]:
    objects = []
    for n, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            at = f"{where}, line {n}"
            objects.append((at, read_json(line, what=at)))
    return objects


def _prompt(item: Any, where: str) -> tuple[dict[str, Any], str | None]:
    """Fields of `presets.Prompt`, and the session of a genai-perf line."""
    if isinstance(item, list) and len(item) == 1:
        item = item[0]
    if isinstance(item, str):
        item = {"text": item}
    if not isinstance(item, dict):
        raise ConfigError(f"{where} must be an object, got {item!r:.60}: {_LAYOUTS}.")
    if "payload" in item:
        return _prompt(item["payload"], where)
    row = _Row.parse(item, where=where)
    prompt: dict[str, Any] = {"id": row.name, "category": (row.category or "chat")[:MAX_CATEGORY]}
    if row.turns is not None:
        return {**prompt, "turns": row.turns}, None
    if row.messages is not None:
        *history, last = row.messages
        if last.role != "user":
            raise ConfigError(f"{where}: the last message must be the user's.")
        before = [message.model_dump() for message in history]
        return {**prompt, "turns": [last.content], "history": before}, None
    if row.prompt is not None:
        raw = bool(_HUMANEVAL & set(item))
        prompt["category"] = (row.category or ("code" if raw else "chat"))[:MAX_CATEGORY]
        return {**prompt, "turns": [row.prompt], "raw": raw}, None
    text = row.text_input or row.text or " ".join(filter(None, (row.input, row.instruction)))
    if not text:
        raise ConfigError(f"{where} has the keys {', '.join(map(str, item))}; {_LAYOUTS}.")
    return {**prompt, "turns": [text]}, row.session_id
