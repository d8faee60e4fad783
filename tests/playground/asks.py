"""What the page's components would hold, as the handlers get it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from playground.host.live import LiveRun
from playground.host.request import read_request
from playground.host.runner import MAX_WAITING, EngineHost
from storage import RunDetail

WAIT_S = 240.0


def ask(**changes: Any) -> dict[str, Any]:
    """The raw payload of a short run; `method`, `sampling` and `limits` set fields of the form."""
    values = {
        "method": changes.pop("settings", {}),
        "sampling": changes.pop("sampling", {}),
        "limits": {"max_new_tokens": "24", "ignore_eos": True, **changes.pop("limits", {})},
    }
    raw = {
        "target": "tiny",
        "dtype": "float32",
        "method": "scripted",
        "mode": "chat",
        "system": "",
        "prompt": "Say hello.",
        "form": {"values": values},
    }
    return {**raw, **changes}


def start(host: EngineHost, *, owner: str = "tab", **changes: Any) -> LiveRun:
    """A queued run."""
    return host.generate(read_request(host.catalog, ask(**changes)), owner=owner)


def until(true: Callable[[], Any]) -> None:
    """Wait until this is true."""
    deadline = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < deadline, "never came true"
        time.sleep(0.02)


def finished(run: LiveRun) -> LiveRun:
    """The run, once it is over."""
    assert run.over.wait(WAIT_S), f"run still {run.state}: {run.activity}"
    return run


def stored(host: EngineHost, run: LiveRun) -> RunDetail:
    """The run in the log."""
    detail = host.log.get(run.log_id or "")
    assert detail is not None, run.error
    return detail


@contextmanager
def busy(host: EngineHost, *, full: bool = False) -> Iterator[None]:
    """The engine does something that no Stop ends, and where `full`, its queue is full besides."""
    hold = threading.Event()

    def work(run: LiveRun) -> None:
        hold.wait()
        run.end("completed")

    runs = [host.submit(work, owner="busy")]
    until(lambda: not host.occupancy[1])
    try:
        runs += [host.submit(work, owner=f"busy {n}") for n in range(MAX_WAITING * full)]
        yield
    finally:
        hold.set()
    for run in runs:
        finished(run)
