"""Text of strangers as plain data: bounded before it is parsed, and shown short in sentences.

Whoever reads a file, a form or a request reads it here (YAML: `presets.reading`), so that nothing
behind has to think of nesting without end, numbers of a thousand digits, or half surrogate pairs,
which no answer, no terminal and no tokenizer can carry. The other way: what is written of it
(`visible`, `json_text`, `csv_line`, `file_name`) commands no terminal, turns no line around and
leaves no folder.
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
"""Integers of 64 bits have 20; tokenizers without a limit say 10^30."""
_STRING = re.compile(r'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_LONG_INTEGER = re.compile(rf"(?<![.\d])\d{{{MAX_DIGITS + 1}}}")
_HALF = re.compile(r"\\u[dD][89a-fA-F]")
_CONTROL = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]|\r(?!\n)"
)
_FULL = ("no space left on device", "disk is full", "disk full", "storagefull", "quota exceeded")
"""As libraries say it that pass on no error number."""
MAX_FILE_NAME_BYTES = 150
_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")
_SIGNS = {"[": 1, "{": 1, "]": -1, "}": -1}


def read_text(path: Path, *, most: int = MAX_CHARS, what: str = "") -> str:
    """The text of a file; a mark of its byte order is left out.

    Args:
        what: its name in sentences; empty = the whole path.

    Raises ConfigError: unreadable, no UTF-8, or larger than `most` bytes.
    """
    try:
        with path.open("rb") as file:
            content = file.read(most + 1)
    except (OSError, ValueError) as error:  # a NUL in the name is a ValueError
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{what or path} could not be read: {reason}.") from error
    return as_text(content, what=what or str(path), most=most).removeprefix("\ufeff")


def cpuinfo(key: str) -> str:
    """First value of a key in Linux's list of processors; empty elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((ln.partition(":")[2].strip() for ln in lines if ln.startswith(key)), "")


def cpu_flags() -> list[str]:
    """What the processor can do, as Linux names it; empty on what is neither Linux nor Apple's."""
    if (platform.system(), platform.machine()) == ("Darwin", "arm64"):
        return ["asimd", "asimddp"]
    return (cpuinfo("flags") or cpuinfo("Features")).split()


def as_text(content: str | bytes, *, what: str, most: int = MAX_CHARS) -> str:
    """Text that can be written again.

    Raises ConfigError: it is no UTF-8, has half a surrogate pair, or is longer than `most`.
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
    """Plain data of JSON.

    Args:
        what: the text in the sentence of a fault, e.g. a file's name.
        object_hook: as in `json.loads`; what it returns must be plain, too.

    Raises ConfigError: malformed, or larger, deeper or with longer integers than anybody writes.
    """
    text = as_text(text, what=what)
    bare = _STRING.sub("", text)
    if _depth(bare) > MAX_DEPTH:
        raise ConfigError(f"{what} nests deeper than {MAX_DEPTH}.")
    if _LONG_INTEGER.search(bare):
        raise ConfigError(f"{what} has an integer of more than {MAX_DIGITS} digits.")
    try:
        value = json.loads(text, object_hook=object_hook)
        if _HALF.search(text):
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
    """Looks at no more of a value than it shows, however often a part occurs in it."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring, self.maxother = 4, 200, 200

    def repr_int(self, x: int, level: int) -> str:
        return repr(x) if x.bit_length() <= 256 else f"an integer of {x.bit_length()} bits"


_short = _Short()


def short(value: object, most: int = 80) -> str:
    """A value as a sentence shows it: its repr, cut to `most` characters."""
    text = _short.repr(value)
    return text if len(text) <= most else text[: most - 3] + "..."


def visible(text: str) -> str:
    """Text of others to be read: its control characters are shown, not obeyed."""
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


def visible_value(value: Any) -> Any:
    """`visible` of a text that is no HTML yet; for `finalize` of templates."""
    return visible(value) if isinstance(value, str) and not hasattr(value, "__html__") else value


def json_text(value: Any, indent: int | None = None) -> str:
    """JSON that people read in any script; control characters are escaped, as JSON has it."""
    text = json.dumps(value, ensure_ascii=False, indent=indent)
    return _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def file_name(name: str) -> str:
    """A name of others as that of a file or folder: one for each name, within its folder.

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
    """Whether an error, or what it came of, says that there is no room to write."""
    while True:
        number, text = getattr(error, "errno", None), str(error).lower()
        if number in (errno.ENOSPC, errno.EDQUOT) or any(sign in text for sign in _FULL):
            return True
        if error.__cause__ is None:
            return False
        error = error.__cause__


def unwritable(place: object, error: BaseException) -> str:
    """The sentences about what could not be written, and why."""
    if disk_is_full(error):
        return f"{place} cannot be written: the disk is full. Make room there, or write elsewhere."
    reason = getattr(error, "strerror", None) or next(iter(str(error).splitlines()), "")
    return f"{place} cannot be written: {reason or type(error).__name__}. Give another place."


def csv_line(values: Iterable[Any]) -> str:
    """A line of CSV; text that a spreadsheet would run as a formula begins with an apostrophe."""
    stream = io.StringIO()
    csv.writer(stream, lineterminator="\n").writerow([_cell(value) for value in values])
    return stream.getvalue()


def _cell(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    whole = visible(value)
    return f"'{whole}" if whole.startswith(_FORMULA_STARTS) else whole
