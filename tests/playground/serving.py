"""The page on a free port of this machine, over a tiny target; for HTTP and browser tests."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import gradio as gr

from playground.host.catalog import Catalog
from playground.host.runner import EngineHost
from playground.web.security import launch_options
from playground.web.server import quiet_gradio
from storage import RunLog


@dataclass(frozen=True)
class Served:
    """A running page."""

    url: str
    host: EngineHost
    log: RunLog


@contextmanager
def serving(catalog: Catalog, log: RunLog, cache_dir: Path) -> Iterator[Served]:
    """Serve until the block ends."""
    quiet_gradio()
    host = EngineHost(log, catalog, cache_dir=cache_dir, device="cpu")
    with ThreadPoolExecutor(1) as thread:
        page, url = thread.submit(lambda: asyncio.run(_launched(host, log))).result()
    try:
        yield Served(url.rstrip("/"), host, log)
    finally:
        page.close(verbose=False)
        host.close()


async def _launched(host: EngineHost, log: RunLog) -> tuple[gr.Blocks, str]:
    """The page, serving. Gradio leaves event loops unclosed unless one is running."""
    from playground.web.shell import build_shell

    page = build_shell(host, log)
    page.queue(default_concurrency_limit=None, max_size=64)
    options = launch_options("127.0.0.1")
    _, url, _ = page.launch(server_port=free_port(), prevent_thread_lock=True, **options)
    return page, url


def free_port() -> int:
    """A port that nobody listens on; Gradio, looking for one itself, leaves sockets unclosed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
