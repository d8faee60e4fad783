"""`app.py connect`: a running engine's drafting, live or under load."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.plain import figure
from playground.cli.options import JsonOptions, LogOptions, argument, option, say, takes

if TYPE_CHECKING:
    from playground.connect.readings import Reading
    from playground.connect.session import Address


@dataclass(kw_only=True)
class ConnectOptions(LogOptions, JsonOptions):
    url: str = argument(
        ..., "Address of a vLLM, SGLang, TensorRT-LLM, llama-server or playground server."
    )
    key: str = option("", "Its API key.", envvar="OPENAI_API_KEY")
    model: str = option("", "Model to use; default: the first that it lists.")
    plain: str = option("", "Address of the same model without speculation.", metavar="URL")
    replay: bool = option(False, "Send prompts instead of reading its counters.", "--replay")
    suite: str = option("tasks", "Prompts to send: a suite or a file.")
    prompts: int = option(12, "Number of prompts.", min=1, max=1000)
    concurrency: str = option("1,2,4,8,16", "Concurrency levels, run one after another.")
    max_new_tokens: int = option(128, "Maximum number of new tokens per answer.", min=1)
    seconds: float = option(300.0, "Maximum number of seconds per level.", min=1.0)
    every: float = option(2.0, "Seconds between two readings.", min=0.1)
    readings: int = option(0, "Number of readings; 0 = until Ctrl+C.", min=0)


@takes(ConnectOptions)
def connect(options: ConnectOptions) -> None:
    """Watch a running engine's drafting, or measure it with and without."""
    from playground.connect.session import Address

    address = Address(options.url, options.key, options.model, options.plain)
    work = _replay(options, address) if options.replay else _watch(options, address)
    asyncio.run(work)


async def _watch(options: ConnectOptions, address: Address) -> None:
    from playground.connect.client import Client
    from playground.connect.readings import between

    async with Client.at(address.url, address.key) as client:
        engine = await client.find(address.model)
        before = await client.read()
        say(f"{engine.title} at {client.url}, {client.model}")
        say(f"since its start: {_line(before, None)}")
        began, taken = time.monotonic(), 0
        while options.readings == 0 or taken < options.readings:
            await asyncio.sleep(options.every)
            now, after = time.monotonic(), await client.read()
            grown, restarted = between(before, after)
            note = "  (it was restarted)" if restarted else ""
            say(_line(grown, now - began) + note)
            began, before, taken = now, after, taken + 1


def _line(reading: Reading, seconds: float | None) -> str:
    rates = " ".join(f"{rate:.2f}" for rate in reading.position_rates)
    speed = ""
    if seconds and reading.generated is not None:
        speed = f"{reading.generated / seconds:.1f} tok/s  "
    accepted = reading.draft_acceptance
    share = figure(None if accepted is None else 100 * accepted, 0, " %")
    mat, running = figure(reading.mat), figure(reading.running, 0)
    rated = f"  position rates {rates}" if rates else ""
    waiting = figure(reading.waiting, 0)
    return f"{speed}MAT {mat}  accepted {share}  running {running}  waiting {waiting}{rated}"


async def _replay(options: ConnectOptions, address: Address) -> None:
    import json

    from playground.cli.tables import print_wide, table
    from playground.connect.replay import Load, asked_of, read_concurrencies
    from playground.connect.report import COLUMNS
    from playground.connect.session import visit
    from playground.experiments.public import known_suites
    from playground.experiments.suites import choose_suite
    from storage import RunLog

    suite = choose_suite(options.suite, known_suites())
    load = Load(
        tuple(asked_of(suite, options.prompts)),
        read_concurrencies(options.concurrency),
        options.max_new_tokens,
        options.seconds,
    )
    with RunLog.open(options.log_url) as log:
        async for report in visit(address, load, log):
            say(f"… {report.drafting[-1].concurrency} at a time measured", err=True)
    if options.as_json:
        say(json.dumps(report.to_dict(), indent=2))
        return
    print_wide(
        table(f"{report.engine.title}, {len(load.asked)} prompts", [*COLUMNS][1:], report.rows())
    )
    say("\n".join(report.sentences()))
