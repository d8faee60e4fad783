"""`specdec connect`: a running engine's drafting, live or under load."""

from __future__ import annotations

import asyncio
import time

from engine.formats import DASH
from playground.cli.commands import ConnectOptions
from playground.cli.inputs import open_log
from playground.cli.streams import echo, note
from playground.cli.terminal import print_wide, table
from playground.connect.client import Client
from playground.connect.readings import Reading, between
from playground.connect.replay import Load, read_concurrencies
from playground.connect.report import COLUMNS, Report, reading_figures
from playground.connect.session import Address, measure
from playground.experiments.prompts import find_suite, first_turns
from storage import RunLog


def connect(options: ConnectOptions) -> None:
    """Watch a running engine's drafting, or measure it with and without."""
    address = Address(options.url, options.key, options.model, options.plain)
    if options.replay:
        _replay(options, address)
    else:
        asyncio.run(_watch(options, address))


async def _watch(options: ConnectOptions, address: Address) -> None:
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
    figures = reading_figures(reading, seconds)
    return "  ".join(f"{title} {text}" for title, text, _ in figures if text[0] != DASH)


def _replay(options: ConnectOptions, address: Address) -> None:
    suite = find_suite(options.suite)
    load = Load(
        first_turns(suite, options.prompts),
        read_concurrencies(options.concurrency),
        options.max_new_tokens,
        options.seconds,
    )
    with open_log(options) as log:
        report = asyncio.run(_measure(address, load, log))
    print_wide(
        table(f"{report.engine.title}, {len(load.prompts)} prompts", [*COLUMNS][1:], report.rows())
    )
    echo("\n".join(report.sentences()))


async def _measure(address: Address, load: Load, log: RunLog) -> Report:
    """The complete report; every level is announced."""
    async for report in measure(address, load, log):
        note(f"… concurrency {report.drafting[-1].concurrency} measured")
    return report
