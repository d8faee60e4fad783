"""Functions that the page's modules call: a question checked by pydantic, an answer as JSON."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from pydantic import Field

from engine.config import Settings
from playground.errors import Fault, attempt
from playground.experiments.compare.race import MAX_RUNS, race_clocks
from playground.host.live import RunId
from playground.host.runner import EngineHost
from playground.host.stream import History

Index = Annotated[int, Field(ge=0, le=10_000_000)]
Answer = dict[str, Any]
Served = Callable[[Any], Answer]
"""A function that a module calls as `server.name(question)`."""
Question = TypeVar("Question", bound=Settings)


class RunPart(Settings):
    """A run, and what of it: the events after `have`, a step, or steps up to `last`."""

    run: RunId
    have: Index = 0
    index: Index = 0
    first: Index = 0
    last: Index = 0


def serve(
    name: str, question: type[Question], answer: Callable[[Question], Answer], *, where: str
) -> Served:
    """A function under a name; it returns a fault as `{"error": sentence}`."""

    def call(raw: Any) -> Answer:
        return answered(lambda: answer(question.parse(raw)), where=where)

    call.__name__ = name
    return call


def answered(read: Callable[[], Answer], *, where: str) -> Answer:
    """What `read` returns, or its fault as `{"error": sentence}`."""
    answer = attempt(read, where=where)
    return {"error": answer.sentence} if isinstance(answer, Fault) else answer


def panel_functions(history: History) -> list[Served]:
    """Functions of token panels: `since` for lost events, `step`, `steps`, `trace`."""
    read: dict[str, tuple[Callable[[RunPart], Answer], str]] = {
        "since": (lambda q: history.since(q.run, q.have), "reading a run"),
        "step": (lambda q: history.step(q.run, q.index), "reading a step"),
        "steps": (lambda q: history.steps(q.run, q.first, q.last), "reading steps"),
        "trace": (lambda q: history.trace(q.run), "exporting a run"),
    }
    return [serve(name, RunPart, one, where=where) for name, (one, where) in read.items()]


class RunsOf(Settings):
    """Runs of one race."""

    runs: list[RunId] = Field(min_length=1, max_length=MAX_RUNS)


def race_functions(host: EngineHost, history: History) -> list[Served]:
    """Functions of the race: `clocks`, the times of commits, and `metas`, the facts for panels."""

    def clocks(question: RunsOf) -> Answer:
        return {"clocks": race_clocks(host.runs, host.log, question.runs)}

    def metas(question: RunsOf) -> Answer:
        return {"runs": [meta for run in question.runs for meta in history.opened(run)["runs"]]}

    return [
        serve("clocks", RunsOf, clocks, where="reading the clocks"),
        serve("metas", RunsOf, metas, where="opening runs"),
    ]
