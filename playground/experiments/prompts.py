"""Prompts for an experiment: suites by name or file, their kinds of task, and how they are cut.

Files are our YAML, or of one of these layouts:

| layout | one prompt looks like |
|---|---|
| Spec-Bench, EAGLE, MT-Bench | `{"question_id": 81, "category": "writing", "turns": ["…", "…"]}` |
| HumanEval | `{"task_id": "HumanEval/0", "prompt": "def f(…", "entry_point": "f", …}` |
| genai-perf input file | `{"text": "…"}` or `{"text_input": "…"}`, with `session_id` a turn of it |
| TensorRT-LLM input_data.json | `{"input": "…", "instruction": "…", "output": "…"}`: joined so |
| genai-perf inputs.json | `{"data": [{"payload": [{"messages": […]}]}, {"text_input": ["…"]}]}` |
"""

from __future__ import annotations

import difflib
import gzip
import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field

import presets
from engine.config import Settings
from engine.errors import ConfigError, one_of
from engine.model.sources import writing
from engine.safe_text import MAX_CHARS, as_text, json_text, read_json, read_text
from playground.experiments.plan import TYPED, Item
from playground.host import paths
from playground.host.request import GenerateRequest
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
"""Spec-Bench's six kinds of task, and code → their titles, in the order of the tables."""
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
    """The group of a category as a file spells it; one that is in none is a group of its own.

    MT-Bench's eight categories, `math` and `coding` among them, are Spec-Bench's conversations.
    """
    name = category.strip().lower().replace(" ", "_")
    return name if name in GROUPS else _GROUP_OF.get(name, category.strip())


def in_order(groups: Iterable[str]) -> list[str]:
    """Groups in the order of the tables; those of a file's own come last."""
    present = set(groups)
    return [group for group in GROUPS if group in present] + sorted(present - set(GROUPS))


def choose_suite(name: str, known: Mapping[str, PromptSuite]) -> PromptSuite:
    if name in known:
        return known[name]
    path = Path(name).expanduser()
    if path.is_file():
        return read_suite_file(path)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    hint = f"Did you mean {near[0]}?" if near else ""
    raise ConfigError(
        f"--suite must be one of {', '.join(known)}, or a file of prompts, got {name!r:.80}. {hint}"
    )


def choose_items(
    suites: Sequence[PromptSuite],
    *,
    categories: Sequence[str] = (),
    limit_per_category: int | None = None,
) -> tuple[Item, ...]:
    """The prompts of some suites, cut.

    Args:
        categories: groups, or categories as the files have them; empty = all.
        limit_per_category: at most so many prompts of each group of each suite.
    """
    if len({suite.name for suite in suites}) < len(suites):
        raise ConfigError("Two suites have the same name. Give each file once, or rename one.")
    if limit_per_category is not None and limit_per_category < 1:
        raise ConfigError(f"limit_per_category must be at least 1, got {limit_per_category}.")
    items = [item for suite in suites for item in items_of(suite)]
    known = {item.category for item in items} | {item.group for item in items}
    for name in categories:
        one_of("categories", name, sorted(known))
    chosen_kinds = set(categories) or known
    matching = [item for item in items if chosen_kinds & {item.category, item.group}]
    if limit_per_category is None:
        return tuple(matching)
    members: dict[tuple[str, str], list[Item]] = {}
    for item in matching:
        members.setdefault((item.suite, item.group), []).append(item)
    chosen = {id(i) for group in members.values() for i in evenly(group, limit_per_category)}
    return tuple(item for item in matching if id(item) in chosen)


def evenly(items: Sequence[Item], most: int) -> list[Item]:
    """At most so many items, taken from their categories in turn and left in their order."""
    seen: Counter[str] = Counter()
    ranked = []
    for place, item in enumerate(items):
        seen[item.category] += 1
        ranked.append((seen[item.category], place))
    return [items[place] for place in sorted(place for _, place in sorted(ranked)[:most])]


def first_turns(suite: PromptSuite, most: int) -> list[Item]:
    """The first turn of a suite's first prompts, from its categories in turn."""
    return [replace(item, turns=item.turns[:1]) for item in evenly(items_of(suite), most)]


def typed_item(request: GenerateRequest) -> Item:
    """A prompt that was typed."""
    system = request.system.strip() if request.mode == "chat" else ""
    history = ({"role": "system", "content": system},) if system else ()
    return Item(TYPED, "1", TYPED, TYPED, (request.prompt,), request.mode == "raw", history)


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


# ---- public suites: fetched once, or read from a copy

ROWS = "https://datasets-server.huggingface.co/rows"
"""Source: the hub's documentation of its dataset viewer, /rows; at most 100 rows an answer."""
HUMANEVAL = {"dataset": "openai/openai_humaneval", "config": "openai_humaneval", "split": "test"}
SPEC_BENCH = (
    "https://raw.githubusercontent.com/hemingkx/Spec-Bench/main/data/spec_bench/question.jsonl"
)
PAGE = 100
TIMEOUT_S = 30
GZIP_MAGIC = b"\x1f\x8b"


class _ServedRow(Settings):
    model_config = ConfigDict(extra="ignore")

    row: dict[str, Any]


class _Page(Settings):
    """An answer of the dataset server."""

    model_config = ConfigDict(extra="ignore")

    rows: list[_ServedRow]
    num_rows_total: int


def _get(url: str, **params: Any) -> bytes:
    """Raises ConfigError: there is no answer, or another one than the file."""
    import httpx

    try:
        answer = httpx.get(url, params=params or None, timeout=TIMEOUT_S, follow_redirects=True)
        return answer.raise_for_status().content
    except httpx.HTTPError as error:
        where = url.split("/")[2]
        raise ConfigError(
            f"{where} did not send the file: {error}. Download it yourself and give it with --file."
        ) from error


def _humaneval() -> bytes:
    """Its rows as lines of JSON, in the layout of its own file."""
    lines: list[str] = []
    while True:
        raw = _get(ROWS, **HUMANEVAL, offset=len(lines), length=PAGE)
        page = _Page.parse(read_json(raw, what=ROWS), where=ROWS)
        lines += [json.dumps(one.row) for one in page.rows]
        if not page.rows or len(lines) >= page.num_rows_total:
            return "\n".join(lines).encode()


PUBLIC: dict[str, tuple[str, Callable[[], bytes]]] = {
    "humaneval": ("HumanEval", _humaneval),
    "spec-bench": ("Spec-Bench", lambda: _get(SPEC_BENCH)),
}
"""Title, and how it is fetched."""


def fetch_suite(name: str, file: Path | None = None) -> PromptSuite:
    """A public suite, kept from now on under its name.

    Args:
        file: a copy of it, perhaps packed with gzip; None = from the network.

    Raises ConfigError: no such suite, it cannot be fetched or read, or has no prompts.
    """
    one_of("The suite", name, PUBLIC)
    try:
        raw = PUBLIC[name][1]() if file is None else file.read_bytes()
        raw = gzip.decompress(raw) if raw.startswith(GZIP_MAGIC) else raw
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
    """The shipped suites, then the public ones that were fetched."""
    suites = dict(presets.suites())
    for name, (title, _) in PUBLIC.items():
        file = paths.suites() / f"{name}.jsonl"
        if file.is_file():
            suites[name] = read_suite_file(file).replace(title=title)
    return suites


INPUTS: dict[str, Callable[[int, str, int], dict[str, Any]]] = {
    "genai-perf": lambda number, text, tokens: {"text": text},
    "trtllm-bench": lambda n, text, tokens: {"task_id": n, "prompt": text, "output_tokens": tokens},
}
"""A prompt as the input file of a benchmark has it."""


def input_lines(suite: PromptSuite, tool: str, tokens: int) -> str:
    """A suite as a benchmark's input file, a line per prompt: its first turn.

    Raises ConfigError: no such tool.
    """
    one_of("--to", tool, INPUTS)
    rows = [INPUTS[tool](n, prompt.turns[0], tokens) for n, prompt in enumerate(suite.prompts)]
    return "".join(json_text(row) + "\n" for row in rows)
