"""Live runs: the output of a run so far, in memory while a page may display it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from engine.metrics import Metrics
from playground.host.task import Task
from storage import RunLog, StepRow

if TYPE_CHECKING:  # it decodes, and the log is listed without torch
    from playground.host.plain import PlainStep

Message = dict[str, Any]
"""One turn of a conversation, as `engine.model.chat_template.Message`."""
PARENT = "parent"
"""Label of a run in the log: the run of the previous turn of its chat."""
REASON_WORDS = {
    "eos": "done · end of text",
    "stop": "done · stop string or token",
    "length": "done · length limit",
    "context": "done · context full",
    "cancelled": "stopped",
}
API_OWNER = "api/"
"""How the owner of an API request's run begins; each request is an owner of its own."""
MAX_RUNS = 64
MAX_STEP_BYTES = 64_000_000
"""Memory for the steps of a run."""
BYTES_PER_STEP, BYTES_PER_NODE = 1500, 200
"""Upper bounds of the memory of a step, and of each node of its tree."""
RunId = Annotated[str, Field(pattern=r"^[ -~]{1,64}$")]
"""A well-formed id; the log may have no such run."""


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The first token, committed by the prefill."""

    text: str
    ttft_s: float


@dataclass(frozen=True, slots=True)
class Finish:
    """How a run's text ended.

    Attributes:
        text: the whole output. The streamed text may be longer by a stop string, or shorter by an
            incomplete character at its end.
    """

    reason: str | None
    text: str


class RecentSteps:
    """The newest steps of a run that fit in memory; the log has them all.

    One thread adds, any thread reads.

    Attributes:
        num_bytes: memory of these steps.
        longest: largest number of draft tokens of a step.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rows: list[StepRow] = []
        self.first = 0
        """Index of the first step in memory."""
        self.num_bytes = self.longest = 0

    def __len__(self) -> int:
        with self._lock:
            return self.first + len(self._rows)

    def extend(self, rows: Sequence[StepRow]) -> None:
        with self._lock:
            self._rows += rows
            self.num_bytes += sum(map(_bytes_of, rows))
            self.longest = max(self.longest, *(len(row.tokens) - 1 for row in rows))
        if self.num_bytes > MAX_STEP_BYTES:
            self.drop(self.num_bytes - MAX_STEP_BYTES * 3 // 4)

    def drop(self, num_bytes: int) -> None:
        """Drop the oldest steps until this much memory is freed."""
        with self._lock:
            freed = num = 0
            while freed < num_bytes and num < len(self._rows):
                freed += _bytes_of(self._rows[num])
                num += 1
            del self._rows[:num]
            self.first += num
            self.num_bytes -= freed

    def read(self, start: int, stop: int | None = None) -> list[StepRow] | None:
        """Steps `start` ≤ index < `stop`; None where some of them are only in the log."""
        with self._lock:
            if start < self.first:
                return None
            return self._rows[start - self.first : None if stop is None else stop - self.first]


def _bytes_of(row: StepRow) -> int:
    return BYTES_PER_STEP + BYTES_PER_NODE * len(row.tokens)


@dataclass(slots=True, eq=False)
class LiveRun(Task):
    """A task that may write a text: its output so far, written by the worker until decoding, then
    by the recorder."""

    meta: dict[str, Any] = field(default_factory=dict)
    """The facts that a panel shows besides the text; see `stream.run_meta`."""
    messages: list[Message] = field(default_factory=list)
    """The conversation up to and including the prompt; empty for a raw completion."""
    refused: bool = False
    """Whether it could not begin because its request is at fault."""
    unavailable: bool = False
    """Whether it failed because the run log is locked or out of reach."""
    log_id: str | None = None
    """Its id in the run log, once it is there."""
    first: FirstToken | None = None
    rows: RecentSteps = field(default_factory=RecentSteps)
    metrics: Metrics | None = None
    finish: Finish | None = None
    plain: PlainStep | None = None
    """The baseline it is compared with, once that is measured."""
    experts: tuple[int, int] | None = None
    """As `Target.experts`, once the target is loaded."""
    notes: tuple[str, ...] = ()
    """Remarks for display: how the draft's size was chosen, how drafter and target fit."""

    @property
    def num_events(self) -> int:
        """Number of events so far: the prefill and every step."""
        return len(self.rows) + (self.first is not None)

    def pieces(self, start: int = 0) -> list[str]:
        """The text of every event from number `start` on; empty where some are only in the log."""
        rows = self.rows.read(max(0, start - 1))
        if self.first is None or rows is None:
            return []
        return [self.first.text] * (start == 0) + ["".join(row.committed_texts) for row in rows]


def pieces(log: RunLog, run_id: str) -> list[str]:
    """A stored run's text, one piece per token; empty if there is no such run."""
    run = log.get(run_id)
    first = [] if run is None else [run.first_text]
    return first + [piece for row in log.steps(run_id) for piece in row.committed_texts]


class LiveRuns:
    """The runs in memory: all unfinished ones, and others up to `MAX_RUNS`.

    The least recently used finished run is dropped first. When a run is added, finished ones drop
    their steps, which the log has.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs: OrderedDict[str, LiveRun] = OrderedDict()

    def add(self, run: LiveRun) -> None:
        with self._lock:
            self._runs[run.id] = run
            for other in [one for one in self._runs.values() if one.over.is_set()]:
                other.rows.drop(other.rows.num_bytes)
                if len(self._runs) > MAX_RUNS:
                    del self._runs[other.id]

    def get(self, run_id: str) -> LiveRun | None:
        """The run under either of its ids; marks it as used."""
        with self._lock:
            run = self._runs.get(run_id)
            if run is None:
                run = next((r for r in self._runs.values() if r.log_id == run_id), None)
            if run is not None:
                self._runs.move_to_end(run.id)
            return run

    def logged_id(self, run_id: str | None) -> str | None:
        """The id in the log of a run; one in memory may have none yet."""
        run = self.get(run_id) if run_id else None
        return run.log_id if run else run_id

    def owned_by(self, owner: str) -> list[LiveRun]:
        """The owner's runs that are not over."""
        with self._lock:
            return [r for r in self._runs.values() if r.owner == owner and not r.over.is_set()]

    def all(self) -> list[LiveRun]:
        with self._lock:
            return list(self._runs.values())
