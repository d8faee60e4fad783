"""What the page's components would hold, as the handlers get it."""

from __future__ import annotations

from typing import Any

from playground.host.live import LiveRun
from playground.host.request import read_request
from playground.host.runner import EngineHost

WAIT_S = 60.0


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


def finished(run: LiveRun) -> LiveRun:
    """The run, once it is over."""
    assert run.over.wait(WAIT_S), f"run still {run.state}: {run.activity}"
    return run
