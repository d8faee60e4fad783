"""Files in the layouts of Spec-Bench, HumanEval and genai-perf, and how they are cut."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

import presets
from engine.errors import ConfigError
from playground.experiments import prompts
from playground.experiments.prompts import (
    GROUPS,
    choose_items,
    first_turns,
    group_of,
    items_of,
    read_suite_file,
    read_suite_text,
)
from tests.commands import invoke


def write(path: Path, *rows: Any) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n", encoding="utf-8")
    return path


KINDS = {
    "writing roleplay reasoning math coding extraction stem humanities": "chat",
    "summarization": "summarisation",
    "math_reasoning": "maths",
    "rag retrieval-grounded": "rag",
    "translation": "translation",
    "QA question_answering": "qa",
    "own": "own",
}


def test_categories_map_onto_the_kinds_of_task() -> None:
    for categories, group in KINDS.items():
        assert {group_of(category) for category in categories.split()} == {group}
    assert (group_of("question answering"), group_of("my own")) == ("qa", "my own")


SYSTEM = {"role": "system", "content": "Be brief."}
PARTS = [{"type": "text", "text": "Hi, "}, {"type": "text", "text": "you."}]
Facts = tuple[str, str, tuple[str, ...]]
LAYOUTS: dict[str, tuple[list[Any], list[Facts]]] = {
    "Spec-Bench": (
        [
            {"question_id": 81, "category": "writing", "turns": ["One.", "Two."]},
            {"question_id": 161, "category": "translation", "turns": ["Hallo"], "reference": []},
            {"question_id": 401, "category": "math_reasoning", "turns": ["1 + 1?"]},
            {"question_id": 401, "turns": ["Again."]},
        ],
        [
            ("81", "chat", ("One.", "Two.")),
            ("161", "translation", ("Hallo",)),
            ("401", "maths", ("1 + 1?",)),
            ("401#2", "chat", ("Again.",)),
        ],
    ),
    "HumanEval": (
        [{"task_id": "HumanEval/0", "prompt": "def add(a):\n", "entry_point": "add", "test": "…"}],
        [("HumanEval/0", "code", ("def add(a):\n",))],
    ),
    "genai-perf": (
        [
            {"text_input": "First."},
            {"text": "Second."},
            {"session_id": "a", "text": "Turn one."},
            {"session_id": "b", "text": "Alone."},
            {"session_id": "a", "delay": 1, "text": "Turn two."},
        ],
        [
            ("1", "chat", ("First.",)),
            ("2", "chat", ("Second.",)),
            ("a", "chat", ("Turn one.", "Turn two.")),
            ("b", "chat", ("Alone.",)),
        ],
    ),
    "inputs.json": (
        [
            {
                "data": [
                    {"payload": [{"messages": [SYSTEM, {"role": "user", "content": "Hi."}]}]},
                    {"payload": [{"prompt": ["Once upon"]}]},
                    {"text_input": ["Plain."], "stream": [True]},
                ]
            }
        ],
        [("1", "chat", ("Hi.",)), ("2", "chat", ("Once upon",)), ("3", "chat", ("Plain.",))],
    ),
    "OpenAI and TensorRT-LLM": (
        [
            {"id": None, "messages": [{"role": "user", "content": PARTS}]},
            {"input": "One two.", "instruction": "Count.", "output": "2"},
            {"input": "", "instruction": "Write.", "output": "…"},
        ],
        [
            ("1", "chat", ("Hi, you.",)),
            ("2", "chat", ("One two. Count.",)),
            ("3", "chat", ("Write.",)),
        ],
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_keeps_ids_kinds_of_task_turns_and_history(tmp_path: Path, layout: str) -> None:
    rows, expected = LAYOUTS[layout]
    items = items_of(read_suite_file(write(tmp_path / "q.jsonl", *rows)))
    assert [(item.id, item.group, item.turns) for item in items] == expected
    assert {item.suite for item in items} == {"q"}
    assert all(item.raw == (layout == "HumanEval") for item in items), "HumanEval is continued"
    assert items[0].history == ((SYSTEM,) if layout == "inputs.json" else ())
    assert not any(item.history for item in items[1:])


@pytest.fixture
def own_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))


@pytest.mark.usefixtures("own_data")
def test_humaneval_is_fetched_once_and_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = [
        {"task_id": f"HumanEval/{n}", "prompt": f"def f{n}():\n", "entry_point": "f"}
        for n in range(7)
    ]
    packed = [gzip.compress("\n".join(map(json.dumps, tasks)).encode())]

    def get(url: str, **options: Any) -> httpx.Response:
        if not packed:
            raise httpx.ConnectError("nobody is there")
        return httpx.Response(200, content=packed.pop(), request=httpx.Request("GET", url))

    monkeypatch.setattr(httpx, "get", get)
    prompts.fetch_suite("humaneval")
    suite = prompts.known_suites()["humaneval"]
    assert suite.title == "HumanEval" and all(prompt.raw for prompt in suite.prompts)
    assert [prompt.turns[0] for prompt in suite.prompts] == [task["prompt"] for task in tasks]
    with pytest.raises(ConfigError, match="could not be fetched: .* give it with --file"):
        prompts.fetch_suite("humaneval")
    inputs = prompts.input_lines(suite, "genai-perf", 64)
    again = read_suite_text(inputs, "inputs.jsonl", where="inputs")
    assert [p.turns for p in again.prompts] == [p.turns for p in suite.prompts]


@pytest.mark.usefixtures("own_data")
def test_a_copy_may_be_packed_and_must_have_prompts(tmp_path: Path) -> None:
    copy = tmp_path / "copy.jsonl.gz"
    question = {"question_id": 81, "category": "writing", "turns": ["One.", "Two."]}
    copy.write_bytes(gzip.compress(json.dumps(question).encode()))
    assert prompts.fetch_suite("spec-bench", copy).prompts[0].turns == ("One.", "Two.")
    copy.write_bytes(copy.read_bytes()[:-9])
    for file, words in ((copy, "cannot be read"), (write(tmp_path / "x.jsonl"), "no prompts")):
        with pytest.raises(ConfigError, match=words):
            prompts.fetch_suite("humaneval", file)
    listed = invoke("suites", "list").stdout
    assert "spec-bench      Spec-Bench: 1 prompts" in listed and "suites fetch humaneval" in listed
    asked = ["suites", "export", "spec-bench", "--to", "trtllm-bench", "--max-new-tokens", "9"]
    line = json.loads(invoke(*asked).stdout)
    assert line == {"task_id": 0, "prompt": "One.", "output_tokens": 9}
    with pytest.raises(ConfigError, match="must be one of humaneval, spec-bench"):
        prompts.fetch_suite("mt-bench")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"turns": ["a"]}\n{"turns": [', "line 2 is not valid JSON"),
        ('{"turns": []}\n', "turns"),
        ('{"question": "x"}\n', "has the keys question"),
        ('{"turns": [3]}\n', "must be text, got 3"),
        ("", "no prompts"),
        ("[1, 2]", "must be an object"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "must be the user's"),
        ('{"data": 5}', "list of prompts"),
    ],
)
def test_a_file_in_no_layout_says_where_and_what(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words) as caught:
        read_suite_file(file)
    assert "bad.jsonl" in str(caught.value)


def test_a_limit_takes_from_the_categories_of_a_group_in_turn(tmp_path: Path) -> None:
    rows = [{"category": c, "turns": [c, "?"]} for c in ["writing"] * 5 + ["stem"] * 5 + ["qa"] * 2]
    suite = read_suite_file(write(tmp_path / "q.jsonl", *rows))
    items = choose_items([suite], limit_per_category=3)
    assert [item.category for item in items] == ["writing", "writing", "stem", "qa", "qa"]
    first = [item.turns for item in first_turns(suite, 4)]
    assert first == [("writing",), ("writing",), ("stem",), ("qa",)], "without their second turns"
    assert {i.category for i in choose_items([suite], categories=["chat"])} == {"writing", "stem"}
    assert {i.category for i in choose_items([suite], categories=["stem"])} == {"stem"}
    with pytest.raises(ConfigError, match="categories must be one of"):
        choose_items([suite], categories=["maths"])


@pytest.mark.parametrize(
    "prompts", ["x", "[]", "{chat: null}", "{chat: [[[]]]}", "{chat: [{1: 2}]}", "{5: [a]}"]
)
def test_prompts_by_category_of_another_form_are_refused(prompts: str) -> None:
    with pytest.raises(ConfigError, match="prompts"):
        read_suite_text(f"prompts: {prompts}", "mine.yaml", where="mine.yaml")


def test_built_in_suites_have_twenty_prompts_of_each_kind() -> None:
    suites = presets.suites()
    tasks, code, quick = (items_of(suites[name]) for name in ("tasks", "code", "quick"))
    counts = {group: sum(item.group == group for item in tasks) for group in GROUPS}
    assert counts.pop("code") == 0 and min(counts.values()) >= 20
    assert sum(len(item.turns) > 1 for item in tasks if item.group == "chat") >= 20
    assert {item.group for item in code} == {"code"} and len(code) >= 20
    assert {item.group for item in quick} == set(GROUPS)
    texts = [i.turns[0] for name in ("tasks", "code", "quick") for i in items_of(suites[name])]
    assert len(set(texts)) == len(texts)
    long = [i for i in tasks if i.group == "summarisation" if len(i.turns[0].split()) >= 250]
    assert len(long) >= 8
