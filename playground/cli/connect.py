"""`specdec connect`: a running engine's drafting, live or under load."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.formats import DASH
from playground.cli.options import LogOptions, argument, command, option
from playground.cli.streams import echo, note

if TYPE_CHECKING:
    from playground.connect.readings import Reading
    from playground.connect.replay import Load
    from playground.connect.report import Report
    from playground.connect.session import Address
    from storage import RunLog


@dataclass(kw_only=True)
class ConnectOptions(LogOptions):
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


@command(ConnectOptions)
def connect(options: ConnectOptions) -> None:
    """Watch a running engine's drafting, or measure it with and without."""
    from playground.connect.session import Address

    address = Address(options.url, options.key, options.model, options.plain)
    if options.replay:
        _replay(options, address)
    else:
        asyncio.run(_watch(options, address))


async def _watch(options: ConnectOptions, address: Address) -> None:
    from playground.connect.client import Client
    from playground.connect.readings import between

    async with Client.connect(address.url, address.key, address.model) as client:
        before = await client.read()
        echo(f"{client.engine.title} at {client.url}, {client.model}")
        echo(f"since its start: {_line(before, None)}")
        last_s, num_readings = time.monotonic(), 0
        while options.readings == 0 or num_readings < options.readings:
            await asyncio.sleep(options.every)
            now_s, after = time.monotonic(), await client.read()
            growth, restarted = between(before, after)
            restart = "  (the engine was restarted)" if restarted else ""
            echo(_line(growth, now_s - last_s) + restart)
            last_s, before, num_readings = now_s, after, num_readings + 1


def _line(reading: Reading, seconds: float | None) -> str:
    from playground.connect.report import reading_figures

    figures = reading_figures(reading, seconds)
    return "  ".join(f"{title} {text}" for title, text, _ in figures if text[0] != DASH)


def _replay(options: ConnectOptions, address: Address) -> None:
    from playground.cli.terminal import print_wide, table
    from playground.connect.replay import Load, read_concurrencies
    from playground.connect.report import COLUMNS
    from playground.experiments.prompts import find_suite, first_turns

    suite = find_suite(options.suite)
    load = Load(
        first_turns(suite, options.prompts),
        read_concurrencies(options.concurrency),
        options.max_new_tokens,
        options.seconds,
    )
    with options.open_log() as log:
        report = asyncio.run(_measure(address, load, log))
    print_wide(
        table(f"{report.engine.title}, {len(load.prompts)} prompts", [*COLUMNS][1:], report.rows())
    )
    echo("\n".join(report.sentences()))


async def _measure(address: Address, load: Load, log: RunLog) -> Report:
    """The complete report; every level is announced."""
    from playground.connect.session import measure

    async for report in measure(address, load, log):
        note(f"… concurrency {report.drafting[-1].concurrency} measured")
    return report
