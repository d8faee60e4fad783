"""Notes what blocks an event loop: databases, files, sleeps and long texts, where our code is to
blame. The loop that answers one request answers all of them, so none of these belongs there.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import sqlalchemy as sa

ROOT = Path(__file__).parents[1]
TESTS = str(ROOT / "tests")
OURS = tuple(str(ROOT / room) for room in ("playground", "engine", "storage", "presets"))
FILES = {"open", "os.listdir", "os.scandir", "os.mkdir", "os.remove", "os.rename"}
ASYNC = inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR | inspect.CO_ITERABLE_COROUTINE
LONG = 100_000
"""Characters of JSON that take a millisecond."""
NOTED: list[str] = []


def note(what: str) -> None:
    """Remember that this was done on a running loop, unless a test or a library did it."""
    if asyncio._get_running_loop() is None:
        return
    frame: FrameType | None = sys._getframe(1)
    ours = ""
    while frame is not None:
        file, code = frame.f_code.co_filename, frame.f_code
        if file.endswith("/linecache.py"):  # the traceback of a bug shows its lines
            return
        if file.startswith(OURS):
            ours = f"{file.removeprefix(str(ROOT))}:{frame.f_lineno} {code.co_name}"
        if file.startswith(TESTS) and file != __file__:
            return
        if code.co_flags & ASYNC:
            break
        frame = frame.f_back
    if ours:
        NOTED.append(f"{what} on the event loop at {ours}")


def install() -> None:
    """From now on, for the whole process: an audit hook cannot be taken back."""

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        is_codec = event == "open" and "/encodings/" in str(arguments[0])  # Python loads them late
        if event in FILES and not is_codec:
            note(f"{event} {str(arguments[:1]):.120}")

    sys.addaudithook(audit)
    sa.event.listen(sa.engine.Engine, "engine_connect", lambda _: note("a database"))
    time.sleep = _noting(time.sleep, lambda *_: True, "a sleep")
    json.JSONDecoder.decode = _noting(  # type: ignore[method-assign]
        json.JSONDecoder.decode, lambda _, text, *__: len(text) > LONG, "long JSON"
    )


def _noting(function: Callable[..., Any], matters: Callable[..., bool], what: str) -> Any:
    @functools.wraps(function)
    def noted(*arguments: Any, **options: Any) -> Any:
        if matters(*arguments):
            note(what)
        return function(*arguments, **options)

    return noted


@contextmanager
def none_noted() -> Iterator[None]:
    """Fails at its end where a loop was blocked meanwhile."""
    NOTED.clear()
    yield
    noted, NOTED[:] = list(dict.fromkeys(NOTED)), []
    assert not noted, "\n".join(noted)
