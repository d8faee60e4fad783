"""Runs on show: what a run has produced so far, kept in memory while someone may look at it."""

from __future__ import annotations

import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator

from engine.metrics import Metrics
from storage import StepRow

if TYPE_CHECKING:  # it decodes, and the log is listed without torch
    from playground.host.plain import PlainStep

State = Literal["queued", "loading", "prefill", "running", "completed", "cancelled", "failed"]
Message = dict[str, str]
"""One turn of a conversation: `role` and `content`."""
MAX_RUN_ID_CHARS = 64


def _check_run_id(value: str) -> str:
    if not (0 < len(value) <= MAX_RUN_ID_CHARS and value.isascii() and value.isprintable()):
        raise ValueError(
            f"a run's id must be 1 to {MAX_RUN_ID_CHARS} printable ASCII characters, got "
            f"{value[:MAX_RUN_ID_CHARS]!r}"
        )
    return value


RunId = Annotated[str, AfterValidator(_check_run_id)]
"""An id as it may stand in a link; whether there is such a run is the log's to say."""


@dataclass(frozen=True, slots=True)
class First:
    """The first token, committed by the prefill."""

    token_id: int
    text: str
    num_prompt_tokens: int
    ttft_s: float
    num_cached: int = 0


@dataclass(frozen=True, slots=True)
class Finish:
    """How a run's text ended.

    Attributes:
        text: the whole output; what streamed may be longer (a stop string is left out of it) or
            shorter by an incomplete character at its end.
    """

    reason: str | None
    text: str


@dataclass(slots=True, eq=False)
class LiveRun:
    """One job of the host, from the queue to its end.

    One thread at a time writes (host's worker until decoding, then the recorder); any may read,
    and rows are only ever appended.
    """

    owner: str
    """The browser tab that asked for it, or that found it where nobody watched it any more."""
    id: str = field(default_factory=lambda: secrets.token_urlsafe(12))
    meta: dict[str, Any] = field(default_factory=dict)
    """What the panel shows of the run besides its text; see `stream.run_meta`."""
    messages: list[Message] = field(default_factory=list)
    """The conversation up to and including the prompt; empty for a raw completion."""
    state: State = "queued"
    activity: str = ""
    """What is being done, in a few words."""
    progress: float | None = None
    error: str | None = None
    refused: bool = False
    """Whether it could not begin because of what was asked for."""
    result: dict[str, Any] | None = None
    """What submitted work brought, for the page that asked for it."""
    log_id: str | None = None
    """Its id in the run log, once it is there."""
    first: First | None = None
    rows: list[StepRow] = field(default_factory=list)
    metrics: Metrics | None = None
    finish: Finish | None = None
    plain: PlainStep | None = None
    """What it is compared with, once that is known."""
    notes: tuple[str, ...] = ()
    """Remarks for people: how the draft's size was chosen, how drafter and target fit."""
    watchers: int = 0
    """Pages that its messages go to."""
    cancel_asked: threading.Event = field(default_factory=threading.Event)
    over: threading.Event = field(default_factory=threading.Event)
    touched_s: float = field(default_factory=time.monotonic)
    withdraw: Callable[[], None] = lambda: None
    """Ends it at once if it still waits in the host's queue."""
    _end_turn: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def cancel(self) -> None:
        """Ask it to end: at once if it waits in a queue, else within one step."""
        self.cancel_asked.set()
        self.withdraw()

    def end(self, state: State, *, error: str | None = None) -> None:
        """Nothing more will come; what ended already stays as it is."""
        with self._end_turn:
            if not self.over.is_set():
                self.error, self.progress, self.state = error, None, state
                self.over.set()

    @property
    def num_events(self) -> int:
        """The prefill and every step so far."""
        return len(self.rows) + (self.first is not None)

    def pieces(self, start: int = 0) -> list[str]:
        """The text of every event from number `start` on; all of it is in the log."""
        if self.first is None:
            return []
        rows = self.rows[max(0, start - 1) :]
        return [self.first.text] * (start == 0) + ["".join(row.committed_texts) for row in rows]


class LiveRuns:
    """The runs that can still be read without the log: newest `max_runs`, for `ttl_s` seconds.

    Finished runs go first when there are too many, or too many steps in all; a run that is not
    over is never dropped.
    """

    def __init__(
        self,
        *,
        max_runs: int = 64,
        max_steps: int = 200_000,
        ttl_s: float = 3600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_runs = max_runs
        self._max_steps = max_steps
        self._ttl_s = ttl_s
        self._clock = clock
        self._lock = threading.Lock()
        self._runs: OrderedDict[str, LiveRun] = OrderedDict()

    def add(self, run: LiveRun) -> None:
        with self._lock:
            run.touched_s = self._clock()
            self._runs[run.id] = run
            self._evict()

    def get(self, run_id: str) -> LiveRun | None:
        """The run under either of its ids, now counted as used."""
        with self._lock:
            run = self._runs.get(run_id)
            if run is None:
                run = next((r for r in self._runs.values() if r.log_id == run_id), None)
            if run is not None:
                run.touched_s = self._clock()
                self._runs.move_to_end(run.id)
            return run

    def owned_by(self, owner: str) -> list[LiveRun]:
        """The owner's runs that are not over."""
        with self._lock:
            return [r for r in self._runs.values() if r.owner == owner and not r.over.is_set()]

    def all(self) -> list[LiveRun]:
        with self._lock:
            return list(self._runs.values())

    def _evict(self) -> None:
        oldest = self._clock() - self._ttl_s
        steps = sum(len(run.rows) for run in self._runs.values())
        for run in list(self._runs.values()):
            crowded = len(self._runs) > self._max_runs or steps > self._max_steps
            if run.over.is_set() and (crowded or run.touched_s < oldest):
                steps -= len(run.rows)
                del self._runs[run.id]
