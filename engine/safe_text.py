"""Untrusted text as plain data: bounded before parsing, escaped before output.

All files, forms and requests are read here (YAML: `presets.reading`), so that no other code has to
expect endless nesting, numbers of a thousand digits, or lone surrogates, which no response, no
terminal and no tokenizer can encode. On output, `visible`, `json_text`, `csv_line` and `file_name`
keep it from controlling a terminal, reversing a line or leaving a folder.
"""

from __future__ import annotations

import csv
import errno
import hashlib
import io
import json
import platform
import re
import reprlib
from collections.abc import Callable, Iterable
from itertools import accumulate
from pathlib import Path
from typing import Any
from urllib.parse import quote

from engine.errors import ConfigError

MAX_CHARS = 64 << 20
MAX_DEPTH = 64
MAX_DIGITS = 40
"""64-bit integers have 20; tokenizers without a length limit declare 10^30."""
_STRING = re.compile(r'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_LONG_INTEGER = re.compile(rf"(?<![.\d])\d{{{MAX_DIGITS + 1}}}")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_CONTROL = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]|\r(?!\n)"
)
_FULL = ("no space left on device", "disk is full", "disk full", "storagefull", "quota exceeded")
"""Messages of libraries that do not pass on an error number."""
MAX_FILE_NAME_BYTES = 150
_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")
_SIGNS = {"[": 1, "{": 1, "]": -1, "}": -1}


def read_text(path: Path, *, most: int = MAX_CHARS, what: str = "") -> str:
    """The text of a file, without a byte order mark.

    Args:
        what: its name in error messages; empty = the whole path.

    Raises ConfigError: unreadable, not UTF-8, or larger than `most` bytes.
    """
    try:
        with path.open("rb") as file:
            content = file.read(most + 1)
    except (OSError, ValueError) as error:  # a NUL in the name is a ValueError
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{what or path} could not be read: {reason}.") from error
    return as_text(content, what=what or str(path), most=most).removeprefix("\ufeff")


def cpuinfo(key: str) -> str:
    """First value of a key in /proc/cpuinfo; empty where there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((ln.partition(":")[2].strip() for ln in lines if ln.startswith(key)), "")


def cpu_flags() -> list[str]:
    """The processor's features, as Linux names them; empty except on Linux and Apple silicon."""
    if (platform.system(), platform.machine()) == ("Darwin", "arm64"):
        return ["asimd", "asimddp"]
    return (cpuinfo("flags") or cpuinfo("Features")).split()


def as_text(content: str | bytes, *, what: str, most: int = MAX_CHARS) -> str:
    """Valid Unicode text.

    Raises ConfigError: it is not UTF-8, has a lone surrogate, or is longer than `most`.
    """
    if len(content) > most:
        raise ConfigError(f"{what} has more than {most} characters; no more is read.")
    try:
        return content.decode() if isinstance(content, bytes) else content.encode().decode()
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise ConfigError(f"{what} must be UTF-8 text; place {error.start} is not.") from error


def read_json(
    text: str | bytes, *, what: str, object_hook: Callable[[dict[str, Any]], Any] | None = None
) -> Any:
    """Plain data from JSON.

    Args:
        what: the text's name in error messages, e.g. a file name.
        object_hook: as in `json.loads`; must return plain data.

    Raises ConfigError: malformed, or too large, too deep or with integers that are too long.
    """
    text = as_text(text, what=what)
    bare = _STRING.sub("", text)
    if _depth(bare) > MAX_DEPTH:
        raise ConfigError(f"{what} nests deeper than {MAX_DEPTH}.")
    if _LONG_INTEGER.search(bare):
        raise ConfigError(f"{what} has an integer of more than {MAX_DIGITS} digits.")
    try:
        value = json.loads(text, object_hook=object_hook)
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        at = f"line {error.lineno}, column {error.colno}"
        raise ConfigError(f"{what} is not valid JSON: {error.msg} ({at}).") from error
    except UnicodeEncodeError as error:
        raise ConfigError(f"{what} has half a surrogate pair in a text.") from error
    return value


def _depth(bare: str) -> int:
    if bare.count("[") + bare.count("{") <= MAX_DEPTH:
        return 0
    return max(accumulate(_SIGNS[sign] for sign in bare if sign in _SIGNS))


class _Short(reprlib.Repr):
    """Visits no more of a value than it shows, however large or repetitive it is."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring, self.maxother = 4, 200, 200

    def repr_int(self, x: int, level: int) -> str:
        return repr(x) if x.bit_length() <= 256 else f"an integer of {x.bit_length()} bits"


_short = _Short()


def short(value: object, most: int = 80) -> str:
    """A value for an error message: its repr, cut to `most` characters."""
    text = _short.repr(value)
    return text if len(text) <= most else text[: most - 3] + "..."


def visible(text: str) -> str:
    """Untrusted text for display: control characters are shown as escapes."""
    return _CONTROL.sub(lambda match: ascii(match[0])[1:-1], text)


def visible_value(value: Any) -> Any:
    """`visible` of text that is not marked as HTML; for `finalize` of templates."""
    return visible(value) if isinstance(value, str) and not hasattr(value, "__html__") else value


def json_text(value: Any, indent: int | None = None) -> str:
    """JSON with readable non-ASCII text; control characters are escaped."""
    text = json.dumps(value, ensure_ascii=False, indent=indent)
    return _CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def file_name(name: str) -> str:
    """An untrusted name as a file name: unique for each name, and within its folder.

    Example: `a/b` → `a%2Fb`, `..` → `%2E.`
    """
    safe = quote(name.encode("utf-8", "surrogatepass"), safe=" +,=()")
    if safe[:1] in (".", "-", " ", ""):
        safe = f"%{ord(safe[0]):02X}{safe[1:]}" if safe else "%"
    if len(safe) > MAX_FILE_NAME_BYTES:
        digest = hashlib.sha256(safe.encode()).hexdigest()[:16]
        safe = f"{safe[: MAX_FILE_NAME_BYTES - 17]}%{digest}"
    return safe


def disk_is_full(error: BaseException) -> bool:
    """Whether an error, or its cause, says that the disk is full."""
    while True:
        number, text = getattr(error, "errno", None), str(error).lower()
        if number in (errno.ENOSPC, errno.EDQUOT) or any(sign in text for sign in _FULL):
            return True
        if error.__cause__ is None:
            return False
        error = error.__cause__


def write_error_text(place: object, error: BaseException) -> str:
    """The error message for a file that could not be written."""
    if disk_is_full(error):
        return f"{place} cannot be written: the disk is full. Make room there, or write elsewhere."
    reason = getattr(error, "strerror", None) or next(iter(str(error).splitlines()), "")
    return f"{place} cannot be written: {reason or type(error).__name__}. Give another place."


def csv_line(values: Iterable[Any]) -> str:
    """A line of CSV; text that a spreadsheet would run as a formula gets an apostrophe."""
    stream = io.StringIO()
    csv.writer(stream, lineterminator="\n").writerow([_cell(value) for value in values])
    return stream.getvalue()


def _cell(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    text = visible(value)
    return f"'{text}" if text.startswith(_FORMULA_STARTS) else text
