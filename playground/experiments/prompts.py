"""Prompts of an experiment: suites by name or file, their kinds of task, and samples of them.

Files are our YAML, or of one of these layouts:

| layout | one prompt looks like |
|---|---|
| Spec-Bench, EAGLE, MT-Bench | `{"question_id": 81, "category": "writing", "turns": ["…", "…"]}` |
| HumanEval | `{"task_id": "HumanEval/0", "prompt": "def f(…", "entry_point": "f", …}` |
| genai-perf input file | `{"text": "…"}` or `{"text_input": "…"}`, with `session_id` a turn of it |
| genai-perf inputs.json | `{"data": [{"payload": [{"messages": […]}]}, {"text_input": ["…"]}]}` |
| OpenAI | `{"messages": [{"role": "user", "content": "…"}]}`: the last one is the user's |
| TensorRT-LLM input_data.json | `{"input": "…", "instruction": "…", "output": "…"}`: joined so |
"""

from __future__ import annotations

import gzip
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict

import presets
from engine.config import Settings
from engine.errors import ConfigError, did_you_mean, validate_choice
from engine.model.sources import writing
from engine.safe_text import MAX_CHARS, as_text, json_text, read_json, read_text
from playground.experiments.plan import TYPED, Item
from playground.host import paths
from playground.host.request import Mode
from presets import PromptSuite
from presets.reading import parse_yaml

GROUPS: dict[str, str] = {
    "chat": "Multi-turn conversation",
    "translation": "Translation",
    "summarisation": "Summarisation",
    "qa": "Question answering",
    "maths": "Mathematical reasoning",
    "rag": "Retrieval-grounded",
    "code": "Code",
}
"""Titles of Spec-Bench's six kinds of task, and of code, in the order of the tables."""
_CHAT = "writing roleplay reasoning math coding extraction stem humanities multi-turn mt_bench"
_MEMBERS: dict[str, str] = {
    "chat": _CHAT,
    "translation": "wmt",
    "summarisation": "summarization summary",
    "qa": "question_answering question-answering",
    "maths": "math_reasoning maths_reasoning gsm8k",
    "rag": "retrieval retrieval-grounded retrieval_grounded",
    "code": "humaneval completion instruction",
}
_GROUP_OF = {name: group for group, names in _MEMBERS.items() for name in names.split()}


def group_of(category: str) -> str:
    """The group of a category as spelled in a file; an unknown category is its own group.

    MT-Bench's eight categories, including `math` and `coding`, are Spec-Bench's conversations.
    """
    name = category.strip().lower().replace(" ", "_")
    return name if name in GROUPS else _GROUP_OF.get(name, category.strip())


def in_order(groups: Iterable[str]) -> list[str]:
    """Groups in the order of the tables, then those of files' own categories."""
    present = set(groups)
    return [group for group in GROUPS if group in present] + sorted(present - set(GROUPS))


def find_suite(name: str) -> PromptSuite:
    """A shipped or fetched suite by its name, or a file of prompts."""
    suites = known_suites()
    if name in suites:
        return suites[name]
    path = Path(name).expanduser()
    if path.is_file():
        return read_suite_file(path)
    hint = did_you_mean(name, suites) or "Or give a file of prompts."
    return suites[validate_choice("--suite", name, suites, hint)]


def choose_items(
    suites: Sequence[PromptSuite],
    *,
    categories: Sequence[str] = (),
    limit_per_category: int | None = None,
) -> tuple[Item, ...]:
    """The selected prompts of some suites.

    Args:
        categories: groups, or categories as spelled in the files; empty = all.
        limit_per_category: largest number of prompts of each group of each suite.
    """
    if len({suite.name for suite in suites}) < len(suites):
        raise ConfigError("Two suites have the same name. Give each file once, or rename one.")
    items = [item for suite in suites for item in items_of(suite)]
    kinds = {item.category for item in items} | {item.group for item in items}
    for name in categories:
        validate_choice("categories", name, sorted(kinds))
    kinds = set(categories) or kinds
    matching = [item for item in items if kinds & {item.category, item.group}]
    if limit_per_category is None:
        return tuple(matching)
    members: dict[tuple[str, str], list[Item]] = {}
    for item in matching:
        members.setdefault((item.suite, item.group), []).append(item)
    chosen = {id(i) for group in members.values() for i in sample_evenly(group, limit_per_category)}
    return tuple(item for item in matching if id(item) in chosen)


def sample_evenly(items: Sequence[Item], most: int) -> list[Item]:
    """At most `most` items, taken round-robin from their categories, in their original order."""
    seen: Counter[str] = Counter()
    ranked = []
    for place, item in enumerate(items):
        seen[item.category] += 1
        ranked.append((seen[item.category], place))
    return [items[place] for place in sorted(place for _, place in sorted(ranked)[:most])]


def first_turns(suite: PromptSuite, most: int) -> list[Item]:
    """The first turn of prompts of a suite, taken round-robin from its categories."""
    return [replace(item, turns=item.turns[:1]) for item in sample_evenly(items_of(suite), most)]


def typed_item(mode: Mode, system: str, prompt: str) -> Item:
    """A typed prompt as an item."""
    system = system.strip() if mode == "chat" else ""
    history = ({"role": "system", "content": system},) if system else ()
    return Item(TYPED, "1", TYPED, TYPED, (prompt,), mode == "raw", history)


def items_of(suite: PromptSuite) -> tuple[Item, ...]:
    seen: Counter[str] = Counter()
    items = []
    for place, prompt in enumerate(suite.prompts, start=1):
        name = prompt.id or str(place)
        seen[name] += 1
        items.append(
            Item(
                suite.name,
                name if seen[name] == 1 else f"{name}#{seen[name]}",
                prompt.category,
                group_of(prompt.category),
                prompt.turns,
                prompt.raw,
                prompt.history,
            )
        )
    return tuple(items)


# ---- files

MAX_NAME = 80
MAX_CATEGORY = 64
_HUMANEVAL = {"task_id", "entry_point", "canonical_solution"}
_LAYOUTS = (
    "a prompt needs `turns` (Spec-Bench), `prompt` (HumanEval), `text` or `text_input` "
    "(genai-perf), `messages` (OpenAI) or `input` (TensorRT-LLM), or `data` around them"
)


def _text(value: Any) -> str:
    """A text, or the joined texts of a list or of a chat message's parts."""
    parts = value if isinstance(value, list) else [value]
    parts = [part.get("text", "") if isinstance(part, dict) else part for part in parts]
    if not all(isinstance(part, str) for part in parts) or not "".join(parts).strip():
        raise ValueError(f"a prompt must be text, got {value!r:.60}")
    return "".join(parts)


Text = Annotated[str, BeforeValidator(_text)]


class _Message(Settings):
    model_config = ConfigDict(extra="ignore")

    role: str
    content: Text


class _Row(Settings):
    """One prompt in any of the layouts."""

    model_config = ConfigDict(extra="ignore", coerce_numbers_to_str=True, strict=False)

    question_id: str = ""
    task_id: str = ""
    id: str = ""
    session_id: str = ""
    category: str = ""
    turns: list[Text] = []
    messages: list[_Message] = []
    prompt: Text | None = None
    text_input: Text | None = None
    text: Text | None = None
    input: str = ""
    instruction: str = ""


def read_suite_file(path: Path) -> PromptSuite:
    return read_suite_text(read_text(path), path.name, where=str(path))


def read_suite_text(text: str, file_name: str, *, where: str) -> PromptSuite:
    """A suite from the text of a file, which is YAML if its name says so."""
    stem, _, ending = file_name.rpartition(".")
    name = (stem or file_name)[:MAX_NAME]
    if ending in ("yaml", "yml"):
        values = parse_yaml(text, where=where)
        if not isinstance(values, dict):
            raise ConfigError(f"{where} must be a mapping with prompts, got {values!r:.60}.")
        return PromptSuite.parse({"name": name, "title": name, **values}, where=where)
    prompts: list[dict[str, Any]] = []
    sessions: dict[str, dict[str, Any]] = {}
    for at, row in _rows(text, where):
        prompt, session = _prompt(row, at)
        if session in sessions:
            sessions[session]["turns"] += prompt["turns"]
            continue
        prompts.append(prompt)
        if session:
            sessions[session] = prompt
    if not prompts:
        raise ConfigError(f"{where} has no prompts: {_LAYOUTS}.")
    head = {"name": name, "title": file_name, "examples": False}
    return PromptSuite.parse({**head, "prompts": prompts}, where=where)


def _rows(text: str, where: str) -> list[tuple[str, Any]]:
    """Every object of a file, from a list or one per line, with its position in words."""
    try:
        whole = read_json(text, what=where)
    except ConfigError:  # JSON lines; an error then names the line
        lines = [(f"{where}, line {n}", line) for n, line in enumerate(text.split("\n"), start=1)]
        return [(at, read_json(line, what=at)) for at, line in lines if line.strip()]
    rows = whole.get("data", [whole]) if isinstance(whole, dict) else whole
    if not isinstance(rows, list):
        raise ConfigError(f"{where} must hold a list of prompts: {_LAYOUTS}.")
    return [(f"{where}, prompt {n}", row) for n, row in enumerate(rows, start=1)]


def _prompt(item: Any, where: str) -> tuple[dict[str, Any], str]:
    """Fields of `presets.Prompt`, and the session of a genai-perf line."""
    if isinstance(item, dict) and "payload" in item:
        item = item["payload"]
        item = item[0] if isinstance(item, list) and len(item) == 1 else item
    if not isinstance(item, dict):
        raise ConfigError(f"{where} must be an object, got {item!r:.60}: {_LAYOUTS}.")
    row = _Row.parse({k: v for k, v in item.items() if v is not None}, where=where)
    raw = row.prompt is not None and bool(_HUMANEVAL & set(item))
    chat = [message.model_dump() for message in row.messages]
    if chat and chat[-1]["role"] != "user":
        raise ConfigError(f"{where}: the last message must be the user's.")
    text = chat[-1]["content"] if chat else row.prompt or row.text_input or row.text
    text = text or " ".join(filter(None, (row.input, row.instruction)))
    turns = row.turns or ([text] if text else [])
    if not turns:
        raise ConfigError(f"{where} has the keys {', '.join(map(str, item))}; {_LAYOUTS}.")
    name = row.question_id or row.task_id or row.id or row.session_id
    category = row.category or ("code" if raw else "chat")
    prompt = {"id": name[:MAX_CATEGORY], "category": category[:MAX_CATEGORY], "turns": turns}
    if chat:
        return {**prompt, "history": chat[:-1]}, ""
    return {**prompt, "raw": raw and not row.turns}, row.session_id


# ---- public suites: downloaded once, or read from a copy

PUBLIC: dict[str, tuple[str, str]] = {
    "humaneval": (
        "HumanEval",
        "https://raw.githubusercontent.com/openai/human-eval/master/data/HumanEval.jsonl.gz",
    ),
    "spec-bench": (
        "Spec-Bench",
        "https://raw.githubusercontent.com/hemingkx/Spec-Bench/main/data/spec_bench/question.jsonl",
    ),
}
"""Title and address."""
TIMEOUT_S = 30
GZIP_MAGIC = b"\x1f\x8b"


def fetch_suite(name: str, file: Path | None = None) -> PromptSuite:
    """Fetch a public suite and store it under its name.

    Args:
        file: a copy of it, possibly gzipped; None = download it.

    Raises ConfigError: no such suite, it cannot be fetched or read, or has no prompts.
    """
    import httpx

    _, url = PUBLIC[validate_choice("The suite", name, PUBLIC)]
    try:
        if file is None:
            answer = httpx.get(url, timeout=TIMEOUT_S, follow_redirects=True)
            raw = answer.raise_for_status().content
        else:
            raw = file.read_bytes()
        raw = gzip.decompress(raw) if raw.startswith(GZIP_MAGIC) else raw
    except httpx.HTTPError as error:
        raise ConfigError(
            f"{url} could not be fetched: {error}. Download it yourself and give it with --file."
        ) from error
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"--file: {file} cannot be read: {error}.") from error
    text = as_text(raw, what=str(file or name), most=MAX_CHARS)
    suite = read_suite_text(text, f"{name}.jsonl", where=str(file or name))
    folder = paths.suites()
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    return suite


def known_suites() -> dict[str, PromptSuite]:
    """The shipped suites, then the fetched public ones."""
    suites = dict(presets.suites())
    for name, (title, _) in PUBLIC.items():
        file = paths.suites() / f"{name}.jsonl"
        if file.is_file():
            suites[name] = read_suite_file(file).replace(title=title)
    return suites


def input_lines(suite: PromptSuite, tool: str, tokens: int) -> str:
    """A suite as the input file of another benchmark, one line per prompt with its first turn.

    Raises ConfigError: no such tool.
    """
    validate_choice("--to", tool, ("genai-perf", "trtllm-bench"))
    texts = [prompt.turns[0] for prompt in suite.prompts]
    rows: list[dict[str, Any]] = [{"text": text} for text in texts]
    if tool == "trtllm-bench":
        rows = [
            {"task_id": n, "prompt": text, "output_tokens": tokens} for n, text in enumerate(texts)
        ]
    return "".join(json_text(row) + "\n" for row in rows)
