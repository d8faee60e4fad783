"""Where exceptions become sentences, for the page and for the command line."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from threading import current_thread, main_thread
from typing import TypeVar

from anyio.to_thread import run_sync

from engine.errors import PlaygroundError
from engine.safe_text import disk_is_full, unwritable
from storage import StorageError

Result = TypeVar("Result")
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Fault:
    """What to tell the user instead of a result.

    `expected` is False for a bug: its traceback is in the server's log under `where`.
    """

    sentence: str
    expected: bool


def attempt(work: Callable[[], Result], *, where: str) -> Result | Fault:
    """What `work` returns, or the fault that stopped it.

    Our own errors are written for the user and pass through as they are. Anything else is a bug:
    it is logged with its traceback, and the page learns under which name to look for it. A
    full disk is no bug.
    """
    try:
        return work()
    except BaseException as error:  # a library may panic, a drafter of one's own call exit
        if isinstance(error, KeyboardInterrupt) and current_thread() is main_thread():
            raise
        return fault_of(error, where=where)


async def attempt_aside(work: Callable[[], Result], *, where: str) -> Result | Fault:
    """The same on a thread of its own: whoever shares this event loop does not wait for `work`."""
    return await run_sync(partial(attempt, work, where=where))


def fault_of(error: BaseException, *, where: str) -> Fault:
    """An exception as the user is told of it."""
    if isinstance(error, PlaygroundError | StorageError):
        return Fault(str(error), expected=True)
    if disk_is_full(error):
        place = getattr(error, "filename", None) or f"A file of {where}"
        return Fault(unwritable(place, error), expected=True)
    logger.exception("unexpected error in %s", where, exc_info=error)
    return Fault(
        f"Something broke in {where}. The details are in the server's log; the rest of the "
        "page still works.",
        expected=False,
    )
