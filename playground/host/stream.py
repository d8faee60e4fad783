"""Messages to the browser during a run, and what a panel requests afterwards.

A stream sends about twenty idempotent batches a second for one to four runs. A message holds
`stream` (which stream), `seq` (its place in it), the runs' metas, and per run: new events, status,
figures and, once, how it ended. Losing one is repaired by `History.since`.

An event is `[run, n, pieces, accepted, kind, rejected, drafted, ms]`, the last being milliseconds
by part of a `TimeSplit`. n counts a run's events from the prefill (0), so that the panel ignores
repeated events and requests missing ones. Events travel as JSON text: Gradio sends a yielded value
as edits of the one before, and its edits of lists inside lists remove the wrong items when several
of them shrink.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, astuple, fields
from operator import attrgetter
from typing import Any

import presets
from engine import formats
from engine.errors import ConfigError, VocabularyError
from engine.interop.trees.buffers import tree_buffers
from engine.metrics import TimeSplit, measure, stored_figures
from engine.model.random_weights import notes_of
from engine.steps import BYPASSES, Prefill, Step
from engine.tree import TreeShape
from playground.host.live import Finish, First, LiveRun, LiveRuns
from playground.host.methods import stored_badge
from playground.host.plain import PLAIN, PlainStep, plain_step_of
from playground.host.result import (
    figure_texts,
    result_of,
    steps_text,
    too_short,
    warning_of,
)
from playground.host.trace import chrome_trace
from storage import Figure, RunDetail, RunLog, StepRow, names_of

Event = list[Any]
_STEP_VALUES = attrgetter(*(field.name for field in fields(Step)))
PREFILL, BONUS, RECOVERED = 0, 1, 2
MAX_REJECTED = 8
"""Rejected labels in an event; the step itself has all of them."""
REASON_WORDS = {
    "eos": "done · end of text",
    "stop": "done · stop string or token",
    "length": "done · length limit",
    "context": "done · context full",
    "cancelled": "stopped",
}
TICK_S = 0.05
FIRST_TICK_S, SOON_S, HOLD_S = 0.01, 1.0, 0.1
"""The first token of a warm run arrives within a second; it is sent at once. A page takes 30 ms for
a message, so the first message waits for the first token."""
PARENT = "parent"
"""Label of a run in the log: the run that wrote the answer before it in its chat."""
MAX_TURNS = 50
MAX_EVENTS = 2000
"""Of one answer to `since`."""
NO_EVENTS = "[]"
Message = dict[str, Any]


# ---- one run's events and steps


def step_event(run_id: str, row: StepRow) -> Event:
    """A step for text and timeline: its pieces, rejected drafts, times."""
    kind = RECOVERED if _recovered(row) else BONUS
    return [
        run_id,
        row.index + 1,
        list(row.committed_texts),
        len(row.accepted),
        kind,
        _rejected(row),
        len(row.tokens) - 1,
        [round(1000 * seconds, 3) for seconds in astuple(TimeSplit.of(row))],
    ]


def _last_accepted(row: StepRow) -> int:
    return row.accepted[-1] if row.accepted else 0


def _recovered(row: StepRow) -> bool:
    """Whether the target's own token follows a rejection, not a fully accepted path."""
    return _last_accepted(row) in row.parents


def _rejected(row: StepRow) -> list[str]:
    """The first-ranked path below the last accepted node, which the target rejected."""
    labels: list[str] = []
    node = _last_accepted(row)
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
    more = {"recovered": _recovered(row), "buffers": buffers, "bypass": bypass}
    return {**asdict(row), **more, "split": formats.time_split(TimeSplit.of(row).ms)}


def end_of(num_events: int, finish: Finish) -> dict[str, Any]:
    """How a text ended; `units` is its length as the browser counts (UTF-16)."""
    return {
        "n": num_events,
        "reason": finish.reason,
        "units": len(finish.text.encode("utf-16-le", "surrogatepass")) // 2,
        "tail": finish.text[-16:],
    }


def figures_of(
    metrics: Mapping[str, Any], plain: PlainStep | None, meta: Mapping[str, Any], *, over: bool
) -> dict[str, Any]:
    """The figures of a run as numbers and as texts, and the sentence of its result.

    Args:
        over: whether no more steps will come.
    """
    figures = stored_figures(metrics)
    figures.pop("plain", None)
    is_plain = meta.get("decoding_type") == PLAIN
    result = result_of(metrics, plain, is_plain=is_plain) or (too_short(metrics) if over else None)
    return {**figures, "texts": figure_texts(figures), "result": result}


def run_meta(
    run_id: str,
    *,
    title: str,
    target: str,
    badge: str,
    method: Mapping[str, Any],
    prompt: str,
    messages: Sequence[dict[str, str]],
    parent: str | None = None,
    temperature: float = 0.0,
) -> dict[str, Any]:
    """A run's facts for a panel; without messages it is a raw completion.

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
    def __init__(self, runs: Sequence[LiveRun], ahead_of: Callable[[LiveRun], int]) -> None:
        self._runs = list(runs)
        self._ahead_of = ahead_of
        self._stream = secrets.token_urlsafe(9)
        self._seq = -1
        self._began_s = time.monotonic()
        self._sent = {run.id: 0 for run in runs}
        self._last: dict[str, Any] = {}
        self.done = False

    @contextmanager
    def watched(self) -> Iterator[None]:
        """While a page receives its messages."""
        for run in self._runs:
            run.watchers += 1
        try:
            yield
        finally:
            for run in self._runs:
                run.watchers -= 1

    def awaits_first(self, within_s: float) -> bool:
        """Whether no run has an event yet, and the stream is younger than this."""
        young = time.monotonic() - self._began_s < within_s
        return young and all(run.first is None and not run.over.is_set() for run in self._runs)

    def next(self) -> Message | None:
        """The next message; None when nothing has changed since the last."""
        over = [run for run in self._runs if run.over.is_set()]
        news = {
            "ev": json.dumps([event for run in self._runs for event in self._new_events(run)]),
            "status": {run.id: status_of(run, self._ahead_of(run)) for run in self._runs},
            "figures": {run.id: live_figures(run) for run in self._runs if run.metrics},
            "ends": {run.id: end for run in over if (end := _end(run)) is not None},
        }
        self.done = len(over) == len(self._runs)
        if news == self._last and not self.done:
            return None
        self._last = {**news, "ev": NO_EVENTS}
        self._seq += 1
        return {
            "stream": self._stream,
            "seq": self._seq,
            "runs": [run.meta for run in self._runs if run.meta],
            "chat": _chat_head(self._runs[-1]),
            **news,
        }

    def _new_events(self, run: LiveRun) -> list[Event]:
        events = events_of(run, self._sent[run.id], MAX_EVENTS)
        if events is None:  # the page requests what it has missed
            self._sent[run.id] = run.rows.first + 1
            events = events_of(run, self._sent[run.id], MAX_EVENTS) or []
        self._sent[run.id] += len(events)
        return events


def _chat_head(run: LiveRun) -> str | None:
    """The run that a next turn continues; one without an answer is skipped."""
    is_empty = run.over.is_set() and run.finish is None
    return run.meta.get("parent") if is_empty else run.id


def _end(run: LiveRun) -> dict[str, Any] | None:
    return None if run.finish is None else end_of(run.num_events, run.finish)


def events_of(run: LiveRun, start: int, most: int) -> list[Event] | None:
    """Events from number `start` on; None where some of them are only in the log."""
    first = run.first
    if first is None:
        return []
    rows = run.rows.read(max(0, start - 1), max(0, start - 1) + most)
    return None if rows is None else _events(run.id, first if start == 0 else None, rows)


def _events(run_id: str, first: First | None, rows: Iterable[StepRow]) -> list[Event]:
    prefill = [] if first is None else [[run_id, 0, [first.text], 0, PREFILL, [], 0, []]]
    return prefill + [step_event(run_id, row) for row in rows]


def status_of(run: LiveRun, ahead: int) -> dict[str, Any]:
    """A run's state for the panel's header."""
    over = run.over.is_set()
    return {
        "state": run.state,
        "text": run.doing(ahead),
        "progress": run.progress,
        "error": run.error,
        "by_text": VocabularyError.BY_TEXT in (run.error or ""),
        "warning": warning_of(asdict(run.metrics), run.meta) if over and run.metrics else None,
        "log_id": run.log_id,
        "notes": run.notes,
        "badge": run.meta.get("badge"),  # known once the target is loaded, after the meta is sent
    }


def bare(**more: Any) -> Message:
    """A message about no run, of a new stream."""
    nothing = {"seq": 0, "runs": [], "chat": None, "ev": NO_EVENTS}
    return {"stream": secrets.token_urlsafe(9), **nothing, **more}


def refusal(sentence: str, chat: object) -> Message:
    """A message that shows an error and leaves the panel's text unchanged."""
    status = {"state": "failed", "text": "", "progress": None, "error": sentence, "log_id": None}
    return bare(chat=chat if isinstance(chat, str) else None, status={"": status})


async def follow(
    stream: RunStream, tick_s: float = TICK_S, *, resync: bool = False
) -> AsyncIterator[Message]:
    """All messages of a stream as they arise; the runs go on when the page is closed.

    Args:
        resync: the runs began before this page, which lacks their first events. Every message
            says so: a page that is still loading does not see the first ones.
    """
    with stream.watched():
        while stream.awaits_first(HOLD_S):
            await asyncio.sleep(FIRST_TICK_S)
        while not stream.done:
            message = stream.next()
            if message is not None:
                yield {**message, "resync": True} if resync else message
            if not stream.done:
                soon = stream.awaits_first(SOON_S)
                await asyncio.sleep(min(FIRST_TICK_S, tick_s) if soon else tick_s)


def adopt(run: LiveRun, owner: str) -> None:
    """Give a run without watchers to the page that follows it."""
    if not run.watchers:
        run.owner = owner


def stored_run(log: RunLog, run_id: str) -> RunDetail:
    """Raises ConfigError: there is no such run."""
    run = log.get(run_id)
    if run is None:
        raise ConfigError(
            f"No run {run_id!s:.80} is in the log. It may have been deleted, or be in another log."
        )
    return run


class History:
    """Runs for the panel, from memory while they are live and from the log after that."""

    def __init__(self, runs: LiveRuns, log: RunLog) -> None:
        self._runs = runs
        self._log = log

    def unfinished(self, run_id: str) -> LiveRun | None:
        """The run under either of its ids, if it goes on, for a page that lacks its chat."""
        run = self._runs.get(run_id)
        if run is None or run.over.is_set():
            return None
        run.meta = {**run.meta, "answered_by": self._earlier(run_id)}
        return run

    def since(self, run_id: str, have: int) -> dict[str, Any]:
        """Events from number `have` on, and the state and figures of the run.

        Raises ConfigError: there is no such run.
        """
        live = self._runs.get(run_id)
        if live is None:
            return self._since_in_log(stored_run(self._log, run_id), have)
        events = events_of(live, have, MAX_EVENTS)
        if events is None:
            events = self._events_in_log(live.log_id or "", live.first, have)
        return {
            "ev": [[run_id, *event[1:]] for event in events],
            "more": have + len(events) < live.num_events,
            "status": status_of(live, 0),
            "figures": live_figures(live),
            "end": _end(live) if live.over.is_set() else None,
        }

    def step(self, run_id: str, index: int) -> dict[str, Any]:
        """One step with its draft tree. Raises ConfigError: there is no such run or step."""
        rows = self._rows(run_id, index, index + 1)
        if not rows:
            raise ConfigError(f"Run {run_id} has no step {index + 1}.")
        return step_detail(rows[0])

    def _rows(self, run_id: str, start: int, stop: int) -> Sequence[StepRow]:
        """Steps `start` ≤ index < `stop` of a run, from memory where they are there."""
        live = self._runs.get(run_id)
        rows = live.rows.read(start, stop) if live is not None else None
        if rows is None:
            return self._log.steps(run_id if live is None else live.log_id or "", start, stop)
        return rows

    def steps(self, run_id: str, first: int, last: int) -> dict[str, str]:
        """The sums over steps `first` ≤ index ≤ `last` as text; empty without any.

        Raises ConfigError: there is no such run.
        """
        live = self._runs.get(run_id)
        before = max(0, first - 1)
        if live is not None:
            ttft_s = live.first and live.first.ttft_s
        else:
            ttft_s = stored_run(self._log, run_id).ttft_s
        rows = self._rows(run_id, before, last + 1)
        if not rows[first - before :]:
            return {"text": ""}
        began_s = rows[0].at_s if first else ttft_s or 0.0
        steps = (Step(*_STEP_VALUES(row)) for row in rows[first - before :])
        return {"text": steps_text(asdict(measure([Prefill(0, 0, began_s), *steps])))}

    def trace(self, run_id: str) -> dict[str, str]:
        """A file with the run's Chrome trace. Raises ConfigError: it is not in the log (yet)."""
        live = self._runs.get(run_id)
        stored = self._log.read_whole(run_id if live is None else live.log_id or "")
        if stored is None:
            raise ConfigError("This run is not in the log. Wait until it has begun.")
        return {"name": f"run-{stored.run.id}.trace.json", "text": chrome_trace(stored)}

    def opened(self, run_id: str) -> Message:
        """A message that makes a panel show a run of the log; it requests the text by `since`.

        Raises ConfigError: there is no such run.
        """
        live = self._runs.get(run_id)
        meta = live.meta if live is not None else {}
        meta = meta or _stored_meta(stored_run(self._log, run_id))
        more = {"id": run_id, "parent": None, "answered_by": self._earlier(run_id)}
        return bare(runs=[{**meta, **more}], resync=True)

    def _earlier(self, run_id: str) -> list[str]:
        """The runs that wrote the earlier answers of a run's chat, oldest first."""
        runs: list[str] = []
        while (parent := self._parent(run_id)) and parent not in runs and len(runs) < MAX_TURNS:
            runs.insert(0, parent)
            run_id = parent
        return runs

    def _parent(self, run_id: str) -> str | None:
        live = self._runs.get(run_id)
        if live is None:
            stored = self._log.get(run_id)
            return None if stored is None else stored.labels.get(PARENT)
        parent = live.meta.get("parent")
        before = self._runs.get(parent) if parent else None
        return before.log_id if before else parent

    def _since_in_log(self, detail: RunDetail, have: int) -> dict[str, Any]:
        first = _stored_first(detail)
        events = self._events_in_log(detail.id, first, have)
        num_events = detail.num_steps + (first is not None)
        over = detail.status != "running"
        finish = Finish(detail.finish_reason, detail.text)
        return {
            "ev": events,
            "more": have + len(events) < num_events,
            "status": _stored_status(detail),
            "figures": self._stored_figures(detail),
            "end": end_of(num_events, finish) if over else None,
        }

    def _events_in_log(self, run_id: str, first: First | None, have: int) -> list[Event]:
        start = max(0, have - 1)
        rows = self._log.steps(run_id, start, start + MAX_EVENTS)
        return _events(run_id, first if have == 0 else None, rows)

    def _stored_figures(self, detail: RunDetail) -> dict[str, Any]:
        """A run's figures; for an interrupted one, those that the log counted while it streamed."""
        if detail.metrics:
            # The speedup of an experiment's runs is in its report.
            plain = None if detail.experiment else plain_step_of(self._log, detail)
            over = detail.status != "running"
            return figures_of(detail.metrics, plain, _stored_meta(detail), over=over)
        figures = {name: getattr(detail, name) for name in names_of(Figure)}
        return {**figures, "texts": figure_texts(figures)}


def live_figures(run: LiveRun) -> dict[str, Any] | None:
    """A live run's figures; None before the first."""
    if run.metrics is None:
        return None
    return figures_of(asdict(run.metrics), run.plain, run.meta, over=run.over.is_set())


def _stored_first(detail: RunDetail) -> First | None:
    if detail.first_token_id is None:
        return None
    ttft_s = detail.ttft_s or 0.0
    return First(detail.first_token_id, detail.first_text, detail.num_prompt_tokens, ttft_s)


def _stored_status(detail: RunDetail) -> dict[str, Any]:
    over = detail.status != "running"
    words = REASON_WORDS.get(detail.finish_reason or "", detail.status)
    return {
        "state": detail.status,
        "text": words if detail.status == "completed" else detail.status,
        "progress": None,
        "error": detail.error,
        "by_text": VocabularyError.BY_TEXT in (detail.error or ""),
        "warning": warning_of(detail.metrics, _stored_meta(detail)) if over else None,
        "log_id": detail.id,
        "notes": list(notes_of(detail.environment)),
    }


def _stored_meta(detail: RunDetail) -> dict[str, Any]:
    return run_meta(
        detail.id,
        title=detail.method_title,
        target=detail.target,
        badge=stored_badge(detail.method, detail.environment, lossless=detail.lossless),
        method=detail.method,
        prompt=detail.prompt_text,
        messages=[dict(message) for message in detail.messages],
        temperature=detail.sampling.get("temperature") or 0.0,
    )
