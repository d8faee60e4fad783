"""Functions that the page's modules call: questions validated by pydantic, answers as JSON."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from pydantic import Field

from engine.config import Settings
from playground.errors import Fault, attempt
from playground.experiments.comparison import MAX_RUNS, race_clocks
from playground.host.live import RunId
from playground.host.runner import EngineHost
from playground.host.stream import History

Index = Annotated[int, Field(ge=0, le=10_000_000)]
Answer = dict[str, Any]
ServerFunction = Callable[[Any], Answer]
"""A function that a module calls as `server.name(question)`."""
Question = TypeVar("Question", bound=Settings)


class RunQuestion(Settings):
    """A run; its events after the first `have`, the step `index`, or steps `first` to `last`."""

    run: RunId
    have: Index = 0
    index: Index = 0
    first: Index = 0
    last: Index = 0


def server_function(
    name: str, question: type[Question], answer: Callable[[Question], Answer], *, where: str
) -> ServerFunction:
    """A function that modules call by this name; a fault is the answer `{"error": sentence}`."""

    def call(raw: Any) -> Answer:
        result = attempt(lambda: answer(question.parse(raw)), where=where)
        return {"error": result.sentence} if isinstance(result, Fault) else result

    call.__name__ = name
    return call


def panel_functions(history: History) -> list[ServerFunction]:
    """Functions for token panels: `since` (events that were lost), `step`, `steps`, `trace`."""
    functions: dict[str, tuple[Callable[[RunQuestion], Answer], str]] = {
        "since": (lambda q: history.since(q.run, q.have), "reading a run"),
        "step": (lambda q: history.step(q.run, q.index), "reading a step"),
        "steps": (lambda q: history.steps(q.run, q.first, q.last), "reading steps"),
        "trace": (lambda q: history.trace(q.run), "exporting a run"),
    }
    return [
        server_function(name, RunQuestion, answer, where=where)
        for name, (answer, where) in functions.items()
    ]


class RaceQuestion(Settings):
    """The runs of a race."""

    runs: list[RunId] = Field(min_length=1, max_length=MAX_RUNS)


def race_functions(host: EngineHost, history: History) -> list[ServerFunction]:
    """Functions for the race: `clocks` (times of commits) and `metas` (facts for the panels)."""

    def clocks(question: RaceQuestion) -> Answer:
        return {"clocks": race_clocks(host.runs, host.log, question.runs)}

    def metas(question: RaceQuestion) -> Answer:
        return {"runs": [meta for run in question.runs for meta in history.show(run)["runs"]]}

    return [
        server_function("clocks", RaceQuestion, clocks, where="reading the clocks"),
        server_function("metas", RaceQuestion, metas, where="opening runs"),
    ]
