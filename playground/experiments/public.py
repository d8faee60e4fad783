"""Public sets of prompts: fetched once, or read from a copy, and then suites like the shipped ones.

HumanEval comes row by row from the hub's dataset server, Spec-Bench as the file of its repository.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import ConfigDict

import presets
from engine.config import Settings
from engine.errors import ConfigError, one_of
from engine.model.sources import writing
from engine.safe_text import MAX_CHARS, as_text, json_text, read_json
from playground.experiments.prompt_files import read_suite_file, read_suite_text
from playground.host import paths
from presets import PromptSuite

ROWS = "https://datasets-server.huggingface.co/rows"
"""Source: the hub's documentation of its dataset viewer, /rows; at most 100 rows an answer."""
HUMANEVAL = {"dataset": "openai/openai_humaneval", "config": "openai_humaneval", "split": "test"}
SPEC_BENCH = (
    "https://raw.githubusercontent.com/hemingkx/Spec-Bench/main/data/spec_bench/question.jsonl"
)
PAGE = 100
TIMEOUT_S = 30
GZIP_MAGIC = b"\x1f\x8b"


class _Row(Settings):
    model_config = ConfigDict(extra="ignore")

    row: dict[str, Any]


class _Page(Settings):
    """An answer of the dataset server."""

    model_config = ConfigDict(extra="ignore")

    rows: list[_Row]
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


def fetch(name: str, file: Path | None = None) -> PromptSuite:
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
