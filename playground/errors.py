"""Turns exceptions into sentences, for the page and for the command line."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import current_thread, main_thread
from typing import TypeVar

from anyio.to_thread import run_sync

from engine.errors import PlaygroundError
from engine.safe_text import disk_is_full, write_error_text
from storage import StorageError

Result = TypeVar("Result")
DRAFTER_FILE = str(Path(__file__).parents[1] / "engine" / "drafters" / "user_provided.py")
"""The module that calls users' own drafters."""
MAX_FRAMES = 6
"""Innermost frames of a traceback that are shown."""
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Fault:
    """What to tell the user instead of a result.

    Attributes:
        expected: False for a bug: its traceback is in the server's log under `where`.
        kind: the class of what was raised; the error itself would keep the tensors of its frames.
    """

    sentence: str
    expected: bool
    kind: type[BaseException] = PlaygroundError


def attempt(work: Callable[[], Result], *, where: str) -> Result | Fault:
    """The result of `work`, or the fault that stopped it.

    Messages of the playground's own errors are shown unchanged. Any other error except a full disk
    is a bug: it is logged with its traceback, and the message says under which name.
    """
    try:
        return work()
    except BaseException as error:  # a library may panic, a user's drafter may call exit
        if isinstance(error, KeyboardInterrupt) and current_thread() is main_thread():
            raise
        return fault_of(error, where=where)


async def attempt_aside(work: Callable[[], Result], *, where: str) -> Result | Fault:
    """`attempt` on a thread of its own, so that `work` does not block the event loop."""
    return await run_sync(partial(attempt, work, where=where))


def _in_users_code(error: BaseException) -> str:
    """The traceback of an error in a user's own drafter, from its call on; empty for others."""
    frames = traceback.extract_tb(error.__traceback__)
    call = next((i for i, f in reversed([*enumerate(frames)]) if f.filename == DRAFTER_FILE), None)
    if call is None or call + 1 == len(frames):
        return ""
    theirs = traceback.format_list(frames[call + 1 :][-MAX_FRAMES:])
    return "".join([*theirs, *traceback.format_exception_only(error)]).rstrip()


def fault_of(error: BaseException, *, where: str) -> Fault:
    """The fault to show for an exception."""
    if isinstance(error, PlaygroundError | StorageError):
        return Fault(str(error), True, type(error))
    if disk_is_full(error):
        place = getattr(error, "filename", None) or f"A file of {where}"
        return Fault(write_error_text(place, error), True, type(error))
    logger.exception("unexpected error in %s", where, exc_info=error)
    if theirs := _in_users_code(error):
        return Fault(f"Your drafter failed in {where}.\n{theirs}", False, type(error))
    return Fault(
        f"Something broke in {where}. The details are in the server's log; the rest of the "
        "page still works.",
        False,
        type(error),
    )
