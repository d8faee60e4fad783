"""What the Compare page's panels are sent: every round as it runs, then the round to race.

A message is one of `playground.host.stream` with two texts added, both JSON: `compare`, where the
comparison is, and `report`, what came of it so far. A new round is a new stream: the panels begin
again.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Mapping
from typing import Any

from engine.drafters.method import MethodConfig
from playground.experiments.compare.board import Board, stored_board
from playground.experiments.compare.job import Comparison
from playground.experiments.compare.report import report_text
from playground.host.stream import NO_EVENTS, TICK_S, History, Message, RunStream, follow, run_meta
from storage import RunLog


async def stream(
    comparison: Comparison, history: History, tick_s: float = TICK_S
) -> AsyncIterator[Message]:
    """All messages of a comparison, in time; the last shows its last whole round, to be raced."""
    shown, last = 0, ""
    waiting = {**_bare(), "runs": _planned(comparison)}
    while True:
        over, now = comparison.over, comparison.round
        if now is not None and now.number > shown:
            shown = now.number
            async for message in follow(RunStream(now.runs, lambda run: 0), tick_s):
                yield {**message, **_texts(comparison)}
            continue
        if over:
            break
        texts = _texts(comparison)
        if shown == 0 and texts["compare"] != last:
            yield {**waiting, **texts}
            last = texts["compare"]
        await asyncio.sleep(tick_s)
    yield closing(comparison, history)


def closing(comparison: Comparison, history: History) -> Message:
    """The message that ends a stream: the last whole round from the log, and the whole report."""
    board = comparison.board
    metas = [] if board is None or not board.runs else _metas(board, history)
    return {**_bare(), "runs": metas, "resync": True, **_texts(comparison, final=True)}


def reopened(
    compare_id: str, history: History, log: RunLog, types: Mapping[str, type[MethodConfig]]
) -> Message:
    """A message that shows a comparison of the log.

    Raises:
        ConfigError: the log has no such comparison.
    """
    board = stored_board(log, compare_id, types)
    state = _state(compare_id, "completed", final=True)
    texts = {"compare": json.dumps(state), "report": report_text(log, board)}
    return {**_bare(), "runs": _metas(board, history), "resync": True, **texts}


def fault_message(sentence: str, shown: object = None) -> Message:
    """A message that shows an error, and leaves alone what is on show.

    Args:
        shown: the message that the board holds; it comes from the browser and only goes back.
    """
    state = {**_state("", "failed", final=True), "error": sentence}
    kept = shown if isinstance(shown, dict) and shown.get("stream") else None
    return {**(kept or {**_bare(), "report": ""}), "compare": json.dumps(state)}


def _texts(comparison: Comparison, *, final: bool = False) -> dict[str, str]:
    whole = comparison.whole
    ahead = comparison.ahead()
    words = f"waiting for the engine, {ahead} ahead" if whole.state == "queued" else whole.words
    state = {
        **_state(comparison.id, whole.state, final=final),
        "words": words,
        "progress": whole.progress,
        "error": whole.error,
    }
    return {"compare": json.dumps(state), "report": comparison.report}


def _state(compare_id: str, state: str, *, final: bool) -> dict[str, Any]:
    """`final`: the panels hold a round of the log, which can be raced."""
    nothing = {"words": "", "progress": None, "error": None}
    return {"id": compare_id, "state": state, **nothing, "final": final}


def _metas(board: Board, history: History) -> list[dict[str, Any]]:
    """The last whole round's runs, as panels take them."""
    prompt, repeat = _last_whole_round(board)
    runs = [board.runs.get((prompt, repeat, entry.name)) for entry in board.entries]
    return [meta for run in runs if run is not None for meta in history.opened(run)["runs"]]


def _planned(comparison: Comparison) -> list[dict[str, Any]]:
    """Panels for the first prompt, before anything runs; one message after another is the same."""
    plan, item = comparison.plan, comparison.plan.items[0]
    history = [dict(message) for message in item.history]
    return [
        run_meta(
            f"{comparison.id}/{i}",
            title=configuration.title,
            target=plan.target.title or plan.target.name,
            lossless=configuration.config.lossless,
            prompt=item.turns[0],
            messages=[] if item.raw else [*history, {"role": "user", "content": item.turns[0]}],
        )
        for i, configuration in enumerate(plan.configurations)
    ]


def _last_whole_round(board: Board) -> tuple[str, int]:
    """Prompt and repeat of the last round that as many configurations finished as any other."""
    rounds = dict.fromkeys((prompt, repeat) for prompt, repeat, _ in board.runs)
    finished = {key: 0 for key in rounds}
    for run in board.measured:
        finished[run.prompt, run.repeat] += 1
    most = max(finished.values())
    return [key for key in rounds if finished[key] == most][-1]


def _bare() -> Message:
    """A message about no run, of a new stream."""
    return {
        "stream": secrets.token_urlsafe(9),
        "seq": 0,
        "runs": [],
        "chat": None,
        "ev": NO_EVENTS,
        "status": {},
    }
