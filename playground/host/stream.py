"""Messages to the browser during a run, and the data that a panel requests afterwards.

A stream sends about twenty idempotent messages a second for one to four runs. A message has
`stream` (its stream's id), `seq` (its number), the runs' metas, and a batch per run: new events,
status, figures and, once, how it ended. A lost message is repaired by `History.since`, whose
answer is a batch, too.

An event is `[n, pieces, accepted, kind, rejected, drafted, ms, at_s]`: `ms` has the milliseconds of
each part of a `TimeSplit`, `at_s` is the time since the request. n counts a run's events from the
prefill (0), so that the panel can ignore repeated events and request missing ones. The batches of
a message are sent as JSON text: Gradio sends a yielded value as edits of the previous one, and its
edits of nested lists remove the wrong items when several of them shrink.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import asdict, astuple, fields
from operator import attrgetter
from typing import Any, get_args

import presets
from engine import formats
from engine.errors import ConfigError, VocabularyError
from engine.metrics import TimeSplit, measure
from engine.model.random_weights import notes_of
from engine.steps import BYPASSES, Prefill, Step
from engine.tree import TreeShape, tree_buffers
from playground.host.live import Finish, FirstToken, LiveRun, LiveRuns
from playground.host.methods import stored_badge
from playground.host.plain import stored_plain_step
from playground.host.result import (
    figure_texts,
    result_of,
    steps_text,
    too_short,
    warning_of,
)
from playground.host.trace import chrome_trace
from storage import PLAIN, Figure, RunDetail, RunLog, StepRow

Event = list[Any]
_STEP_VALUES = attrgetter(*(field.name for field in fields(Step)))
PREFILL, BONUS, RECOVERED = 0, 1, 2
MAX_REJECTED = 8
"""Rejected tokens in an event; the step itself has all of them."""
REASON_WORDS = {
    "eos": "done · end of text",
    "stop": "done · stop string or token",
    "length": "done · length limit",
    "context": "done · context full",
    "cancelled": "stopped",
}
TICK_S = 0.05
FIRST_TICK_S, SOON_S, HOLD_S = 0.01, 1.0, 0.1
"""The first token of a warm run arrives within a second and is sent at once. A message takes a page
30 ms, so the first one waits for the first token."""
PARENT = "parent"
"""Label of a run in the log: the run of the previous turn of its chat."""
MAX_TURNS = 50
MAX_EVENTS = 2000
"""Of one answer to `since`."""
Batch = dict[str, Any]
StreamMessage = dict[str, Any]


# ---- one run's events and steps


def step_event(row: StepRow) -> Event:
    """A step for text and timeline: its pieces, rejected drafts, times."""
    return [
        row.index + 1,
        list(row.committed_texts),
        len(row.accepted),
        RECOVERED if _is_recovered(row) else BONUS,
        _rejected(row),
        len(row.tokens) - 1,
        [round(1000 * seconds, 3) for seconds in astuple(TimeSplit.of(row))],
        row.at_s,
    ]


def _is_recovered(row: StepRow) -> bool:
    """Whether the target's own token follows a rejection, rather than a fully accepted path."""
    return (0, *row.accepted)[-1] in row.parents


def _rejected(row: StepRow) -> list[str]:
    """The first-ranked path below the last accepted node, which the target rejected."""
    labels: list[str] = []
    node = (0, *row.accepted)[-1]
    while len(labels) < MAX_REJECTED:
        children = [i for i, parent in enumerate(row.parents) if i and parent == node]
        if not children:
            return labels
        node = min(children, key=lambda i: (row.ranks[i], i))
        labels.append(row.token_texts[node])
    return labels


def step_detail(row: StepRow) -> dict[str, Any]:
    """One step's draft tree for display: its row, its tables, and `bypass` as a sentence."""
    bypass = None if row.bypass is None else BYPASSES.get(row.bypass, row.bypass)
    buffers = tree_buffers(TreeShape(row.parents))
    more = {"recovered": _is_recovered(row), "buffers": buffers, "bypass": bypass}
    return {**asdict(row), **more, "split": formats.time_split(TimeSplit.of(row).ms)}


def _end(run: LiveRun) -> dict[str, Any] | None:
    """How a text ended; `units` is its length in UTF-16 code units, as JavaScript counts."""
    if not run.over.is_set() or (finish := run.finish) is None:
        return None
    return {
        "n": run.num_events,
        "reason": finish.reason,
        "units": len(finish.text.encode("utf-16-le", "surrogatepass")) // 2,
        "tail": finish.text[-16:],
    }


def figures_of(run: LiveRun, metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of a run as numbers and as texts, and the sentence of its result."""
    figures = {name: value for name, value in metrics.items() if name != "plain"}
    is_plain = run.meta.get("decoding_type") == PLAIN
    result = result_of(metrics, run.plain, is_plain=is_plain)
    if result is None and run.over.is_set():
        result = too_short(metrics)
    return {**figures, "texts": figure_texts(figures), "result": result}


def run_meta(
    run_id: str,
    *,
    title: str,
    target: str,
    badge: str,
    method: Mapping[str, Any],
    prompt: str,
    messages: Sequence[Mapping[str, str]],
    parent: str | None = None,
    temperature: float = 0.0,
) -> dict[str, Any]:
    """The facts of a run that a panel shows; without messages, it is a raw completion.

    Args:
        badge: as `run_badge` computes it; the method's until the target is loaded.
        method: its settings as plain JSON.
    """
    return {
        "id": run_id,
        "title": title,
        "target": target,
        "badge": badge,
        "decoding_type": method.get("decoding_type"),
        "trained": presets.is_trained(method),
        "mode": "chat" if messages else "raw",
        "prompt": prompt,
        "history": [dict(message) for message in messages[:-1]],
        "parent": parent,
        "temperature": temperature,
    }


# ---- the stream to one browser tab


class RunStream:
    def __init__(
        self,
        runs: Sequence[LiveRun],
        ahead_of: Callable[[LiveRun], int],
        *,
        earlier: Sequence[str] = (),
    ) -> None:
        """`earlier`: the runs of the chat's earlier answers, for a page without them."""
        self.runs = list(runs)
        self._ahead_of, self._earlier = ahead_of, earlier
        self._stream = secrets.token_urlsafe(9)
        self._seq = -1
        self._began_s = time.monotonic()
        self._sent = {run.id: 0 for run in runs}
        self._last: dict[str, Any] = {}
        self.done = False

    def awaits_first(self, within_s: float) -> bool:
        """Whether no run has an event yet, and the stream is younger than this."""
        young = time.monotonic() - self._began_s < within_s
        return young and all(run.first is None and not run.over.is_set() for run in self.runs)

    def next(self) -> StreamMessage | None:
        """The next message; None when nothing has changed since the last."""
        self.done = all(run.over.is_set() for run in self.runs)  # no more events will come
        batches = {
            run.id: _batch_of(run, self._sent[run.id], ahead=self._ahead_of(run))
            for run in self.runs
        }
        if batches == self._last and not self.done:
            return None
        self._last = {run_id: {**batch, "events": []} for run_id, batch in batches.items()}
        for run_id, batch in batches.items():
            if batch["events"]:
                self._sent[run_id] = batch["events"][-1][0] + 1
        self._seq += 1
        last = self.runs[-1]
        unanswered = last.over.is_set() and last.finish is None
        return {
            "stream": self._stream,
            "seq": self._seq,
            "runs": [{**run.meta, "answered_by": self._earlier} for run in self.runs if run.meta],
            # The run that a next turn continues; one without an answer is skipped.
            "chat": last.meta.get("parent") if unanswered else last.id,
            "batches": json.dumps(batches),
        }


def events_of(run: LiveRun, start: int, log: RunLog | None = None) -> list[Event]:
    """At most `MAX_EVENTS` events from number `start` on, from memory or else from the log.

    Without a log, those that are no longer in memory are skipped: the page requests them.
    """
    if run.first is None:
        return []
    at = max(0, start - 1)
    rows: Sequence[StepRow] | None = run.rows.read(at, at + MAX_EVENTS)
    if rows is None and log is not None:
        rows = log.steps(run.log_id or "", at, at + MAX_EVENTS)
    elif rows is None:
        start = run.rows.first + 1
        rows = run.rows.read(start - 1, start - 1 + MAX_EVENTS) or ()
    first, steps = run.first, [step_event(row) for row in rows]
    prefill = [0, [first.text], 0, PREFILL, [], 0, [], first.ttft_s]
    return steps if start else [prefill, *steps]


def _batch_of(
    run: LiveRun,
    start: int,
    *,
    ahead: int = 0,
    log: RunLog | None = None,
    stored: RunDetail | None = None,
) -> Batch:
    """What a panel shows of a run, with its events from `start` on; no figures before the first.

    Args:
        stored: the run as it is in the log, if it is only there.
    """
    end = _end(run)  # before the events: a run that has ended gets no more
    events = events_of(run, start, log)
    metrics = stored.metrics if stored else asdict(run.metrics) if run.metrics else {}
    figures = figures_of(run, metrics) if metrics else None
    if stored and not metrics:  # of an interrupted run, the log has some from its steps
        figures = {name: getattr(stored, name) for name in get_args(Figure)}
        figures["texts"] = figure_texts(figures)
    status = status_of(run, ahead, metrics)
    return {"events": events, "status": status, "figures": figures, "end": end}


def status_of(run: LiveRun, ahead: int, metrics: Mapping[str, Any]) -> dict[str, Any]:
    """A run's state for the panel's header."""
    return {
        "state": run.state,
        "text": run.status_text(ahead),
        "progress": run.progress,
        "error": run.error,
        "by_text": VocabularyError.BY_TEXT in (run.error or ""),
        "warning": warning_of(metrics, run.meta) if run.over.is_set() else None,
        "log_id": run.log_id,
        "notes": run.notes,
        "badge": run.meta.get("badge"),  # known once the target is loaded, after the meta is sent
    }


def initial_message(**more: Any) -> StreamMessage:
    """The first message of a new stream, without runs unless `more` has some."""
    nothing = {"seq": 0, "runs": [], "chat": None, "batches": "{}"}
    return {"stream": secrets.token_urlsafe(9), **nothing, **more}


def refusal(sentence: str, chat: object) -> StreamMessage:
    """A message that shows an error, but leaves the panel's text unchanged."""
    status = {"state": "failed", "text": "", "progress": None, "error": sentence, "log_id": None}
    batches = json.dumps({"": {"status": status}})
    return initial_message(chat=chat if isinstance(chat, str) else None, batches=batches)


async def follow(stream: RunStream, *, resync: bool = False) -> AsyncIterator[StreamMessage]:
    """All messages of a stream as they arise; the runs continue when the page is closed.

    Args:
        resync: the runs began before this page, which therefore lacks their first events. Every
            message says so: a page that is still loading misses the first ones.
    """
    for run in stream.runs:
        run.watchers += 1
    try:
        while stream.awaits_first(HOLD_S):
            await asyncio.sleep(FIRST_TICK_S)
        while not stream.done:
            message = stream.next()
            if message is not None:
                yield {**message, "resync": True} if resync else message
            if not stream.done:
                soon = stream.awaits_first(SOON_S)
                await asyncio.sleep(FIRST_TICK_S if soon else TICK_S)
    finally:
        for run in stream.runs:
            run.watchers -= 1


def stored_run(log: RunLog, run_id: str) -> RunDetail:
    """Raises ConfigError: there is no such run."""
    run = log.get(run_id)
    if run is None:
        raise ConfigError(
            f"No run {run_id!s:.80} is in the log. It may have been deleted, or be in another log."
        )
    return run


def pieces(log: RunLog, run_id: str) -> list[str]:
    """A stored run's text, one piece per token; empty if there is no such run."""
    run = log.get(run_id)
    first = [] if run is None else [run.first_text]
    return first + [piece for row in log.steps(run_id) for piece in row.committed_texts]


class History:
    """Runs for the panel, from memory while they are live, later from the log."""

    def __init__(self, runs: LiveRuns, log: RunLog) -> None:
        self._runs = runs
        self._log = log

    def unfinished(self, run_id: str) -> LiveRun | None:
        """The run under either of its ids while it is unfinished."""
        run = self._runs.get(run_id)
        return None if run is None or run.over.is_set() else run

    def since(self, run_id: str, have: int) -> Batch:
        """A batch with the events from number `have` on; `more`: whether there are further ones.

        Raises ConfigError: there is no such run.
        """
        live, stored = self._runs.get(run_id), None
        if live is None:
            stored = stored_run(self._log, run_id)
            live = _restored(stored)
        batch = _batch_of(live, have, log=self._log, stored=stored)
        return {**batch, "more": have + len(batch["events"]) < live.num_events}

    def step(self, run_id: str, index: int) -> dict[str, Any]:
        """One step with its draft tree. Raises ConfigError: there is no such run or step."""
        rows = self._rows(self._run(run_id), index, index + 1)
        if not rows:
            raise ConfigError(f"Run {run_id} has no step {index + 1}.")
        return step_detail(rows[0])

    def steps(self, run_id: str, first: int, last: int) -> dict[str, str]:
        """Sums over the steps `first` ≤ index ≤ `last` as text; empty if there are none.

        Raises ConfigError: there is no such run.
        """
        run, before = self._run(run_id), max(0, first - 1)
        rows = self._rows(run, before, last + 1)
        if run.first is None or not rows[first - before :]:
            return {"text": ""}
        began_s = rows[0].at_s if first else run.first.ttft_s
        steps = (Step(*_STEP_VALUES(row)) for row in rows[first - before :])
        return {"text": steps_text(asdict(measure([Prefill(0, 0, began_s), *steps])))}

    def _run(self, run_id: str) -> LiveRun:
        """The run; one that is only in the log has no steps in memory.

        Raises ConfigError: there is no such run.
        """
        live = self._runs.get(run_id)
        return live if live and live.meta else _restored(stored_run(self._log, run_id))

    def _rows(self, run: LiveRun, start: int, stop: int) -> Sequence[StepRow]:
        """Steps `start` ≤ index < `stop` of a run, from memory if possible, else from the log."""
        rows = run.rows.read(start, stop)
        return self._log.steps(run.log_id or "", start, stop) if rows is None else rows

    def trace(self, run_id: str) -> dict[str, str]:
        """A file with the run's Chrome trace. Raises ConfigError: it is not in the log (yet)."""
        live = self._runs.get(run_id)
        stored = self._log.read_whole(run_id if live is None else live.log_id or "")
        if stored is None:
            raise ConfigError("This run is not in the log. Wait until it has begun.")
        return {"name": f"run-{stored.run.id}.trace.json", "text": chrome_trace(stored)}

    def show(self, run_id: str) -> StreamMessage:
        """A message that makes a panel show a stored run; the panel requests its text by `since`.

        Raises ConfigError: there is no such run.
        """
        meta = self._run(run_id).meta
        more = {"id": run_id, "parent": None, "answered_by": self.earlier_runs(run_id)}
        return initial_message(runs=[{**meta, **more}], resync=True)

    def earlier_runs(self, run_id: str) -> list[str]:
        """The runs that wrote the earlier answers of a run's chat, oldest first."""
        earlier: list[str] = []
        while (run := find_run(self._runs, self._log, run_id)) and len(earlier) < MAX_TURNS:
            parent = parent_id(self._runs, run)
            if parent is None or parent in earlier:
                break
            earlier.insert(0, run_id := parent)
        return earlier


def find_run(runs: LiveRuns, log: RunLog, run_id: str) -> LiveRun | None:
    """A run from memory, or from the log without its steps and metrics."""
    if (live := runs.get(run_id)) is not None:
        return live
    return None if (stored := log.get(run_id)) is None else _restored(stored)


def parent_id(runs: LiveRuns, run: LiveRun) -> str | None:
    """Id in the log of the run of the previous turn of a run's chat."""
    parent = run.meta.get("parent")
    before = runs.get(parent) if parent else None
    return before.log_id if before else parent


def _restored(stored: RunDetail) -> LiveRun:
    """A stored run as it was in memory, without its steps and metrics."""
    words = REASON_WORDS.get(stored.finish_reason or "", stored.status)
    run = LiveRun(
        owner="",
        id=stored.id,
        meta=_stored_meta(stored),
        messages=[dict(message) for message in stored.messages],
        state=stored.status,
        activity=words if stored.status == "completed" else stored.status,
        error=stored.error,
        log_id=stored.id,
        finish=Finish(stored.finish_reason, stored.text),
        notes=notes_of(stored.environment),
        # The speedup of an experiment's runs is in its report.
        plain=None if stored.experiment else stored_plain_step(stored.metrics),
    )
    if stored.first_token_id is not None:
        run.first = FirstToken(stored.first_text, stored.ttft_s or 0.0)
    run.rows.first = stored.num_steps
    if stored.status != "running":
        run.over.set()
    return run


def _stored_meta(detail: RunDetail) -> dict[str, Any]:
    return run_meta(
        detail.id,
        title=detail.method_title,
        target=detail.target,
        badge=stored_badge(detail.method, detail.environment, lossless=detail.lossless),
        method=detail.method,
        prompt=detail.prompt_text,
        messages=detail.messages,
        parent=detail.labels.get(PARENT),
        temperature=detail.sampling.get("temperature") or 0.0,
    )
