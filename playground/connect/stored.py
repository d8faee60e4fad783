"""Answers of running engines as runs of the log, beside one's own."""

from __future__ import annotations

import secrets
from typing import Any

from engine.metrics import draft_acceptance, mat, tok_s
from playground.connect.client import Client
from playground.connect.replay import Answered, Level
from storage import EXTERNAL, NewRun, RunLog

REASONS = {"stop": "eos", "length": "length"}


def new_replay() -> str:
    """An id that keeps the runs of one replay together."""
    return secrets.token_hex(8)


def store(log: RunLog, client: Client, level: Level, *, replay: str, drafting: bool) -> None:
    """Write every answer of a level down.

    Args:
        drafting: whether the engine drafted, as far as was asked.
    """
    for answered in level.answered:
        _store(log, client, level.concurrency, answered, replay, drafting)


def _store(
    log: RunLog,
    client: Client,
    concurrency: int,
    answered: Answered,
    replay: str,
    drafting: bool,
) -> None:
    asked, reply = answered.asked, answered.reply
    title = client.engine.title if drafting else f"{client.engine.title}, plain decoding"
    run_id = log.begin(
        NewRun(
            target=client.model,
            method={"decoding_type": EXTERNAL, "engine": client.engine.name, "url": client.url},
            method_title=f"{title} · concurrency {concurrency}",
            lossless=None,
            sampling={"temperature": 0.0},
            limits={},
            prompt_ids=(),
            prompt_text=asked.text,
            messages=tuple(asked.messages),
            device=client.url,
            labels={
                "replay": replay,
                "suite": asked.suite,
                "prompt": asked.name,
                "category": asked.category,
                "concurrency": str(concurrency),
            },
        )
    )
    log.finish(
        run_id,
        status="failed" if reply is None else "completed",
        output_ids=(),
        text="" if reply is None else reply.text,
        finish_reason=None if reply is None else REASONS.get(reply.finish_reason or ""),
        metrics={} if reply is None else _metrics(answered),
        error=answered.error or None,
    )


def _metrics(answered: Answered) -> dict[str, Any]:
    """The figures of `engine.metrics.Metrics` that can be had from outside."""
    reply = answered.reply
    assert reply is not None
    draft = reply.drafting
    tokens = reply.num_new_tokens
    return {
        "num_prompt_tokens": reply.num_prompt_tokens,
        "num_new_tokens": tokens,
        "num_steps": draft.steps if draft else max(0, tokens - 1),
        "num_drafted": draft.drafted if draft else 0,
        "num_accepted": draft.accepted if draft else 0,
        "decode_s": reply.decode_s,
        "at_least": (),
        "mat": mat(draft.accepted, draft.steps) if draft else None,
        "position_rates": (),
        "draft_acceptance": draft_acceptance(draft.accepted, draft.drafted) if draft else None,
        "ttft_s": reply.ttft_s,
        "tok_s": tok_s([(tokens, reply.decode_s)] if tokens > 1 else []),
        "itl_ms": None,
        "step_p50_ms": None,
        "step_p95_ms": None,
        "time_split": None,
    }
