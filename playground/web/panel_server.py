"""What the token panels ask the server for: missing events, and single steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine.errors import ConfigError
from playground.errors import Fault, attempt
from playground.host.request import read_count, read_run_id
from playground.host.stream import History

MAX_INDEX = 10_000_000


def panel_server(
    history: History,
) -> tuple[Callable[[Any], dict[str, Any]], Callable[[Any], dict[str, Any]]]:
    """The functions `since` and `step` over a history; a fault comes back as `{"error": …}`."""

    def since(asked: Any) -> dict[str, Any]:
        def read() -> dict[str, Any]:
            run, have = _fields(asked, "run", "have")
            return history.since(read_run_id(run), read_count("have", have, most=MAX_INDEX))

        return answer(read, where="reading a run")

    def step(asked: Any) -> dict[str, Any]:
        def read() -> dict[str, Any]:
            run, index = _fields(asked, "run", "index")
            return history.step(read_run_id(run), read_count("index", index, most=MAX_INDEX))

        return answer(read, where="reading a step")

    return since, step


def answer(read: Callable[[], dict[str, Any]], *, where: str) -> dict[str, Any]:
    """What `read` returns, or its fault as `{"error": sentence}`."""
    result = attempt(read, where=where)
    return {"error": result.sentence} if isinstance(result, Fault) else result


def _fields(asked: Any, *names: str) -> tuple[Any, ...]:
    if not isinstance(asked, dict):
        raise ConfigError(f"The request must have {' and '.join(names)}, got {asked!r:.80}.")
    return tuple(asked.get(name) for name in names)
