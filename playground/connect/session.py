"""One visit to a running engine: found, read, asked, compared with itself without drafts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial

from anyio.to_thread import run_sync

from playground.connect.client import Client
from playground.connect.replay import Level, Load, replay
from playground.connect.report import Report
from playground.connect.stored import new_replay, store
from storage import RunLog

PLAIN = "plain"


@dataclass(frozen=True, slots=True)
class Address:
    """Where an engine listens.

    Attributes:
        plain_url: the same model in an engine that does not draft; a playground is asked for its
            own plain decoding.
    """

    url: str
    key: str = ""
    model: str = ""
    plain_url: str = ""


async def visit(address: Address, load: Load, log: RunLog | None) -> AsyncIterator[Report]:
    """Replay; a report after every level, the last one is whole.

    Levels without drafts come first at each concurrency, so that both are of the same minutes.

    Raises EngineError, ConfigError: the engine cannot be reached or is not known.
    """
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(Client.at(address.url, address.key))
        engine = await client.find(address.model)
        without = await _without(client, address, stack)
        replay_id = new_replay()
        drafting: list[Level] = []
        plain: list[Level] = []
        for concurrency in load.concurrencies:
            one = replace(load, concurrencies=(concurrency,))
            for asked, levels in ((without, plain), (client, drafting)):
                if asked is None:
                    continue
                async for level in replay(asked, one):
                    levels.append(level)
                    if log is not None:
                        is_drafting = levels is drafting
                        await run_sync(
                            partial(
                                store, log, asked, level, replay=replay_id, drafting=is_drafting
                            )
                        )
            yield Report(engine, tuple(drafting), tuple(plain))


async def _without(client: Client, address: Address, stack: AsyncExitStack) -> Client | None:
    """Who is asked without drafts; None where nobody can be."""
    is_own = client.engine.name == "playground"
    if not address.plain_url and not is_own:
        return None
    url = address.plain_url or address.url
    other = await stack.enter_async_context(Client.at(url, address.key))
    await other.find("" if address.plain_url else f"{client.model.partition(':')[0]}:{PLAIN}")
    return other
