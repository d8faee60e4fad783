"""Text that a person, a file or a program sends: plain data, or one sentence, soon."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import ConfigError
from engine.safe_text import MAX_DIGITS, read_json, read_text, short
from presets.reading import MAX_NODES, parse_yaml
from tests.hostile.watch import MOST_S, Watch, shared_lists

LETTERS = "abcdefghijklm"
"""Each names the one before it nine times."""
BOMB = "a: &a [1]\n" + "".join(
    f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in zip(LETTERS, LETTERS[1:], strict=False)
)
MERGED = "a: &a {k: 1}\n" + "".join(
    f"{b}: &{b} {{<<: [{', '.join([f'*{a}'] * 9)}]}}\n"
    for a, b in zip(LETTERS, LETTERS[1:], strict=False)
)

BAD_YAML: dict[str, Any] = {
    "flow without end": "[" * 40_000,
    "mappings without end": "{a: " * 40_000,
    "sequences without end": "- " * 40_000,
    "keys without end": "? " * 40_000,
    "indents without end": "\n".join(" " * depth + "a:" for depth in range(2000)),
    "aliases": BOMB,
    "merges": MERGED,
    "itself": "&a [*a]",
    "nothing named": "*a",
    "named twice": "[&a 1, &a 2]",
    "values": "[" + "1," * (MAX_NODES + 1) + "]",
    "characters": "a" * (4 << 20) + "a",
    "no digits": "0x_",
    "no digits, binary": "0b_",
    "many digits": "1" * 5000,
    "many hexadecimal digits": "0x" + "f" * 5000,
    "many sixties": "1" + ":59" * 5000,
    "empty integer": '!!int ""',
    "integer of words": "!!int abc",
    "float of words": "!!float abc",
    "truth of words": "!!bool abc",
    "timestamp": "!!timestamp foo",
    "bytes": "!!binary a",
    "set": "!!set {a, b}",
    "object": "!!python/object/apply:os.system [id]",
    "long tag": "!!" + "a" * 500 + " b",
    "list as key": "? [1]\n: 2",
    "half a pair": "a: \ud800",
    "half a pair, escaped": '"\\ud800"',
    "control character": "a: \x1b[2J",
    "nul": "a\x00b",
    "two documents": "a\n---\nb",
    "other version": "%YAML 3.0\n--- a",
    "unclosed": "a: [1",
    "merge of a number": "<<: 1",
}
BAD_JSON: dict[str, Any] = {
    "lists without end": "[" * 100_000,
    "objects without end": '{"a":' * 100_000,
    "deep and closed": "[" * 100 + "]" * 100,
    "many digits": "1" * 5000,
    "more digits": "[1, " + "1" * (MAX_DIGITS + 1) + "]",
    "half a pair": '["a\\ud800"]',
    "half a pair as key": '{"\\udfff": 1}',
    "half a pair, raw": '"\ud800"',
    "pair turned round": '"\\ude00\\ud83d"',
    "empty": "",
    "quotes": '"' * 1_000_000,
    "escaped quotes": '"' + '\\"' * 1_000_000,
    "unclosed": "[1",
    "backslash": '"\\',
    "comma": "[1,]",
    "latin": b'"\xe9"',
    "two bytes a character": '"a"'.encode("utf-16"),
}


def refusal(read: Callable[[], object]) -> str:
    """The sentence, which must come soon."""
    watch = Watch()
    with pytest.raises(ConfigError) as refused:
        read()
    assert watch.took_s < MOST_S
    sentence = str(refused.value)
    assert "\n" not in sentence and len(sentence) < 600 and sentence.endswith(".")
    sentence.encode()
    return sentence


@pytest.mark.parametrize("case", BAD_YAML)
def test_bad_yaml_is_refused_in_one_sentence(case: str) -> None:
    assert refusal(lambda: parse_yaml(BAD_YAML[case], where="it")).startswith("it")


@pytest.mark.parametrize("case", BAD_JSON)
def test_bad_json_is_refused_in_one_sentence(case: str) -> None:
    assert refusal(lambda: read_json(BAD_JSON[case], what="it")).startswith("it")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2020-13-45", "2020-13-45"),
        ("2001-12-14", "2001-12-14"),
        ("=", "="),
        ("1e-3", 0.001),
        ("-2E5", -200000.0),
        ("0x1f", 31),
        ("[&a 1, *a, *a]", [1, 1, 1]),
        ("{<<: {a: 1}, b: 2}", {"a": 1, "b": 2}),
        ("", None),
        ("- a\n- [b, {c: null}]", ["a", ["b", {"c": None}]]),
    ],
)
def test_yaml_is_read_as_what_json_can_say(text: str, value: object) -> None:
    assert parse_yaml(text, where="it") == value


def test_whole_pairs_and_written_backslashes_are_no_halves() -> None:
    assert read_json('["\\ud83d\\ude00", "\\\\ud800"]', what="it") == ["😀", "\\ud800"]
    assert read_json('"' + "[" * 1000 + "1" * 1000 + '"', what="it") == "[" * 1000 + "1" * 1000


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=12,
)


@given(PLAIN)
@settings(max_examples=150, deadline=None)
def test_json_is_read_as_the_standard_library_reads_it(value: Any) -> None:
    for ascii in (True, False):
        text = json.dumps(value, ensure_ascii=ascii)
        assert read_json(text, what="it") == value


@given(st.text(st.characters(), max_size=60))
@settings(max_examples=300, deadline=None)
def test_any_text_is_plain_data_or_a_sentence(text: str) -> None:
    for read in (lambda: parse_yaml(text, where="it"), lambda: read_json(text, what="it")):
        try:
            json.dumps(read(), ensure_ascii=False).encode()
        except ConfigError as error:
            assert str(error).startswith("it")


def test_files_are_read_no_further_than_they_may_be_long(tmp_path: Path) -> None:
    for path in (Path("/dev/zero"), tmp_path, tmp_path / "none", tmp_path / "a\0b"):
        refusal(lambda path=path: read_text(path, most=1000))  # type: ignore[misc]
    file = tmp_path / "latin.txt"
    file.write_bytes("é".encode("latin-1"))
    assert "latin.txt must be UTF-8" in refusal(lambda: read_text(file))


def test_a_value_in_a_sentence_is_never_built_whole() -> None:
    watch = Watch()
    assert len(short(shared_lists())) <= 80 and len(short(10**6000)) <= 80
    assert watch.took_s < 1
    assert short("a\x1bb\ud800") == "'a\\x1bb\\ud800'"
