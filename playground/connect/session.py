"""A measurement of a running engine: each concurrency with drafting, and without it if possible.

Answers are stored as runs of the log, like the playground's own.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass

from anyio.to_thread import run_sync

from engine.metrics import mat, ratio, tok_s
from playground.connect.client import Client, Reply
from playground.connect.replay import Level, Load, Outcome, measure_level
from playground.connect.report import Report
from storage import EXTERNAL, NewRun, RunLog

FINISH_REASONS = {"stop": "eos", "length": "length"}


@dataclass(frozen=True, slots=True)
class Address:
    """Addresses of an engine, and of one without drafting (a playground needs no second one)."""

    url: str
    key: str = ""
    model: str = ""
    plain_url: str = ""


async def measure(address: Address, load: Load, log: RunLog | None) -> AsyncIterator[Report]:
    """Yield a report after every concurrency; the last one is complete.

    Plain decoding is measured first at each concurrency, within minutes of drafting.

    Raises EngineError, ConfigError: the engine cannot be reached or is not supported.
    """
    async with AsyncExitStack() as stack:
        connection = Client.connect(address.url, address.key, address.model)
        client = await stack.enter_async_context(connection)
        plain_client = await _plain_client(client, address, stack)
        replay_id = secrets.token_hex(8)
        drafting: list[Level] = []
        plain: list[Level] = []
        for concurrency in load.concurrencies:
            for one, levels in ((plain_client, plain), (client, drafting)):
                if one is None:
                    continue
                outcomes: list[Outcome] = []
                try:
                    levels.append(await measure_level(one, load, concurrency, outcomes))
                finally:  # if the measurement is stopped, too
                    if log is not None:
                        kind = "" if levels is drafting else ", plain decoding"
                        title = f"{one.engine.title}{kind} · concurrency {concurrency}"
                        labels = {"concurrency": str(concurrency)}
                        await run_sync(_store, log, one, outcomes, title, replay_id, labels)
            yield Report(client.engine, tuple(drafting), tuple(plain))


async def _plain_client(client: Client, address: Address, stack: AsyncExitStack) -> Client | None:
    """The client of an engine that does not draft; None if there is no such engine."""
    is_playground = client.engine.name == "playground"
    if not address.plain_url and not is_playground:
        return None
    url = address.plain_url or address.url
    model = "" if address.plain_url else f"{client.model.partition(':')[0]}:plain"
    return await stack.enter_async_context(Client.connect(url, address.key, model))


def _store(
    log: RunLog,
    client: Client,
    outcomes: list[Outcome],
    title: str,
    replay_id: str,
    labels: dict[str, str],
) -> None:
    """Write answers to the log."""
    for outcome in outcomes:
        prompt, reply = outcome.prompt, outcome.reply
        run_id = log.begin(
            NewRun(
                target=client.model,
                method={"decoding_type": EXTERNAL, "engine": client.engine.name, "url": client.url},
                method_title=title,
                lossless=None,
                sampling={"temperature": 0.0},
                limits={},
                prompt_ids=(),
                prompt_text=prompt.turns[0],
                messages=({"role": "user", "content": prompt.turns[0]},),
                device=client.url,
                experiment_id=replay_id,
                kind="replay",
                labels={
                    **labels,
                    "suite": prompt.suite,
                    "prompt": prompt.id,
                    "category": prompt.category,
                },
            )
        )
        log.finish(
            run_id,
            status="failed" if reply is None else "completed",
            output_ids=(),
            text=reply.text if reply else "",
            finish_reason=FINISH_REASONS.get(reply.finish_reason or "") if reply else None,
            metrics=_metrics(reply) if reply else {},
            error=outcome.error or None,
            external=True,
        )


def _metrics(reply: Reply) -> dict[str, object]:
    """The figures of `engine.metrics.Metrics` that can be measured from outside."""
    num_new_tokens = reply.num_new_tokens
    metrics: dict[str, object] = {
        "num_prompt_tokens": reply.num_prompt_tokens,
        "num_new_tokens": num_new_tokens,
        "decode_s": reply.decode_s,
        "at_least": (),
        "ttft_s": reply.ttft_s,
        "tok_s": tok_s([(num_new_tokens, reply.decode_s)] if num_new_tokens > 1 else []),
    }
    if draft := reply.drafting:  # else the steps are unknown
        metrics |= {"num_steps": draft.steps, "num_drafted": draft.drafted}
        metrics |= {"num_accepted": draft.accepted, "mat": mat(draft.accepted, draft.steps)}
        metrics["draft_acceptance"] = ratio(draft.accepted, draft.drafted)
    return metrics
