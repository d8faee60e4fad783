"""Finds the choice tree inside a YAML, JSON or pbtxt file; lines and columns stay as they were."""

from __future__ import annotations

import json
import re

from engine.errors import TreeError
from engine.interop.brackets import Place

TREE_KEYS = (
    "medusa_choices",
    "eagle_choices",
    "recycling_choices",
    "speculative_token_tree",
    "candidates",
    "choices",
    "tree",
)
"""Keys under which YAML, JSON and pbtxt files keep a tree."""
_KEYS = "|".join(TREE_KEYS)
_YAML_KEY = re.compile(rf"^([ \t]*)(?:- )?[\"']?({_KEYS})[\"']?[ \t]*:(?=\s)(.*)$", re.MULTILINE)
_PBTXT = re.compile(
    rf"key\s*:\s*\"({_KEYS})\"\s*,?\s*value\s*:?\s*\{{\s*string_value\s*:\s*\"([^\"]*)\""
)
_NESTED = re.compile(r"^( *)-( +)-( +)(.*)$")
_DASH = re.compile(r"^( *)-( +)(.*)$")


OWN_KEYS = ("candidates", "choices", "tree")
"""Keys of files of this playground's own."""


def yaml_key(text: str) -> str | None:
    """The key under which a line gives a tree, if one does."""
    found = _YAML_KEY.search(text)
    return None if found is None else found[2]


def is_pbtxt(text: str) -> bool:
    """Whether the text is a Triton config or a parameter of one."""
    return "string_value" in text or re.search(r"\bparameters\s*:?\s*\{", text) is not None


def tree_in_pbtxt(text: str) -> str:
    """The braces of the one tree parameter that is filled in.

    Raises:
        TreeError: there is none, or two.
    """
    filled = [(key, value) for key, value in _PBTXT.findall(text) if "$" not in value]
    filled = [(key, value) for key, value in filled if value.strip()]
    if len(filled) != 1:
        found = " and ".join(key for key, _ in filled) or "none that is filled in"
        raise TreeError(
            "A config.pbtxt must have one parameter with a tree, medusa_choices or eagle_choices, "
            f'such as string_value: "{{0}}, {{0, 0}}"; got {found}.'
        )
    key: str = filled[0][0]
    value: str = filled[0][1]
    start = next(m.start(2) for m in _PBTXT.finditer(text) if m[1] == key and m[2] == value)
    line_start = text.rfind("\n", 0, start) + 1
    return "\n" * text[:start].count("\n") + " " * (start - line_start) + value


def read_json(text: str) -> dict[str, object]:
    """A JSON object.

    Raises:
        TreeError: malformed, or no object; names the place.
    """
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        place = Place(error.lineno, error.colno)
        raise TreeError(f"Malformed JSON at {place}: {error.msg}.") from error
    except (RecursionError, ValueError) as error:
        raise TreeError("The JSON nests too deep, or its numbers are too long.") from error
    if not isinstance(values, dict):
        raise TreeError("A tree in JSON must be an object with a key such as choices.")
    return values


def tree_in_json(text: str) -> str:
    """The list under one of the keys, at the top or under speculative_config.

    Raises:
        TreeError: malformed, or no such key.
    """
    values = read_json(text)
    inner = values.get("speculative_config", values)
    for key in TREE_KEYS:
        value = inner.get(key) if isinstance(inner, dict) else None
        if value is not None:
            return value if isinstance(value, str) else json.dumps(value)
    raise TreeError(f"The JSON must have one of the keys {', '.join(TREE_KEYS)}; it has none.")


def tree_in_yaml(text: str) -> str:
    """The value under one of the keys as a list in flow style, whatever style it is in.

    Raises:
        TreeError: no such key, or several.
    """
    found = list(_YAML_KEY.finditer(text))
    if not found:
        raise TreeError(f"The YAML must have one of the keys {', '.join(TREE_KEYS)}; it has none.")
    if len(found) > 1:
        keys = ", ".join(match[2] for match in found)
        raise TreeError(f"The YAML has {len(found)} trees ({keys}). Paste one.")
    (key,) = found
    rest = text[key.start(3) :]
    before = "\n" * text[: key.start(3)].count("\n")
    if key[3].split("#")[0].strip():
        return before + " " * (key.start(3) - key.start()) + _flow(rest)
    return before + _block(rest, key[2])


def _flow(rest: str) -> str:
    """As much of a text as its brackets or quotes need; what follows belongs to other keys."""
    lead = len(rest) - len(rest.lstrip())
    if rest[lead] in "\"'":
        end = rest.find(rest[lead], lead + 1)
        return rest[:lead] + " " + rest[lead + 1 : end if end > 0 else None]
    depth = 0
    for at, sign in enumerate(rest):
        depth += (sign in "[({") - (sign in "])}")
        if depth <= 0 and sign in "])}":
            return rest[: at + 1]
        if depth == 0 and sign == "\n":
            return rest[:at]
    return rest


def _block(rest: str, key: str) -> str:
    """Lines `- [0]`, or `- - 0` with `  - 0` below, as one list: dashes become commas."""
    written, base, opened = ["["], None, False
    comma = " "
    for line in rest.split("\n")[1:]:
        body = line.split("#")[0].rstrip()
        nested, dash = _NESTED.match(body), _DASH.match(body)
        if not body:
            written.append("")
            continue
        if dash is None or (base is not None and len(dash[1]) < base):
            break
        base = len(dash[1]) if base is None else base
        if nested:
            written[-1] += "]" if opened else ""
            written.append(f"{nested[1]}{comma}{nested[2]}[{nested[3]}{nested[4]}")
            opened = True
        elif len(dash[1]) > base and opened:
            written.append(f"{dash[1]},{dash[2]}{dash[3]}")
        else:
            written[-1] += "]" if opened else ""
            written.append(f"{dash[1]}{comma}{dash[2]}{dash[3]}")
            opened = False
        comma = ","
    if base is None:
        raise TreeError(f"{key} must have a list below it such as - [0, 0], got nothing.")
    return "\n".join(written) + ("]" if opened else "") + "]"
