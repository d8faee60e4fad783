"""Messages to the browser during a run: what a panel shows of it, in a format of JSON.

A stream sends about twenty idempotent messages a second for one to four runs. A message has
`stream` (its stream's id), `seq` (its number), the runs' metas, and a batch per run: new events,
status, figures and, once, how it ended. A lost message is repaired by a batch that the panel
requests; `playground.runs.reading` answers it, from memory or from the log.

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
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, astuple
from typing import Any

import presets
from engine.errors import VocabularyError
from engine.metrics import TimeSplit
from engine.model.chat_template import message_text
from playground.host.live import LiveRun
from playground.host.result import figure_texts, result_of, too_short, warning_of
from storage import PLAIN, RunLog, StepRow

Event = list[Any]
PREFILL, BONUS, RECOVERED = 0, 1, 2
MAX_REJECTED = 8
"""Rejected tokens in an event; the step itself has all of them."""
TICK_S = 0.05
FIRST_TICK_S, SOON_S, HOLD_S = 0.01, 1.0, 0.1
"""The first token of a warm run arrives within a second and is sent at once. A message takes a page
30 ms, so the first one waits for the first token."""
MAX_EVENTS = 2000
"""Of one batch."""
Batch = dict[str, Any]
StreamMessage = dict[str, Any]


# ---- one run's events and steps


def step_event(row: StepRow) -> Event:
    """A step for text and timeline: its pieces, rejected drafts, times."""
    return [
        row.index + 1,
        list(row.committed_texts),
        len(row.accepted),
        RECOVERED if is_recovered(row) else BONUS,
        _rejected(row),
        len(row.tokens) - 1,
        [round(1000 * seconds, 3) for seconds in astuple(TimeSplit.of(row))],
        row.at_s,
    ]


def is_recovered(row: StepRow) -> bool:
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
    result = result_of(metrics, run.plain, is_plain=is_plain, experts=run.experts)
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
    messages: Sequence[Mapping[str, Any]],
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
        "history": [{"role": m["role"], "content": message_text(m)} for m in messages[:-1]],
        "parent": parent,
        "temperature": temperature,
    }


# ---- the stream to one browser tab


class RunStream:
    def __init__(self, runs: Sequence[LiveRun], *, earlier: Sequence[str] = ()) -> None:
        """`earlier`: the runs of the chat's earlier answers, for a page without them."""
        self.runs = list(runs)
        self._earlier = earlier
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
        batches = {run.id: batch_of(run, self._sent[run.id]) for run in self.runs}
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


def batch_of(
    run: LiveRun,
    start: int,
    *,
    log: RunLog | None = None,
    metrics: Mapping[str, Any] | None = None,
) -> Batch:
    """What a panel shows of a run, with its events from `start` on; no figures before the first.

    Args:
        log: has the events that are no longer in memory.
        metrics: of a run that is only in the log.
    """
    end = _end(run)  # before the events: a run that has ended gets no more
    events = events_of(run, start, log)
    if metrics is None:
        metrics = asdict(run.metrics) if run.metrics else {}
    figures = figures_of(run, metrics) if metrics else None
    status = status_of(run, metrics)
    return {"events": events, "status": status, "figures": figures, "end": end}


def status_of(run: LiveRun, metrics: Mapping[str, Any]) -> dict[str, Any]:
    """A run's state for the panel's header."""
    return {
        **run.status,
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
