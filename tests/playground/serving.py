"""The page on a free port of this machine, over a tiny target; for HTTP and browser tests."""

from __future__ import annotations

import asyncio
import atexit
import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import gradio as gr
import httpx

from playground.host.catalog import Catalog
from playground.host.runner import EngineHost
from playground.web.access import Access
from playground.web.server import quiet_gradio
from storage import RunLog
from tests.playground.tiny import save_tiny_llama, tiny_catalog

TOKEN = "known-to-tests"
KNOWN = Access(token=TOKEN)
Made = TypeVar("Made")


@dataclass(frozen=True)
class Served:
    """A running page."""

    url: str
    host: EngineHost
    log: RunLog

    def client(self, **options: Any) -> httpx.Client:
        """A program that knows the token."""
        headers = {"authorization": f"Bearer {TOKEN}", **options.pop("headers", {})}
        return httpx.Client(base_url=self.url, headers=headers, timeout=60, **options)


def with_token(url: str) -> str:
    """An address as the program prints it."""
    return f"{url}{'&' if '?' in url else '?'}token={TOKEN}"


@contextmanager
def serving(
    catalog: Catalog, log: RunLog, cache_dir: Path, access: Access = KNOWN
) -> Iterator[Served]:
    """Serve until the block ends."""
    quiet_gradio()
    host = EngineHost(log, catalog, cache_dir=cache_dir, device="cpu")
    with ThreadPoolExecutor(1) as thread:
        page, url = thread.submit(lambda: asyncio.run(_launched(host, log, access))).result()
    try:
        yield Served(url.rstrip("/"), host, log)
    finally:
        page.close(verbose=False)
        host.close()


async def _launched(host: EngineHost, log: RunLog, access: Access) -> tuple[gr.Blocks, str]:
    """The page, serving. Gradio leaves event loops unclosed unless one is running."""
    from playground.api.routes import api_routes
    from playground.web.security import launch
    from playground.web.shell import build_shell

    _files()
    page = build_shell(host, host.cache_dir.parent / "training")
    page.queue(default_concurrency_limit=None, max_size=64)
    port = free_port()
    launch(page, access, port, api_routes(host))
    return page, access.url(port).partition("?")[0]


def built(make: Callable[[], Made]) -> Made:
    """What is made within a page. Gradio leaves event loops unclosed unless one is running."""

    async def building() -> Made:
        with gr.Blocks(analytics_enabled=False):
            return make()

    return asyncio.run(building())


@cache
def _files() -> Path:
    """Where the pages of this process keep uploads; its name is in the environment: one for all."""
    folder = TemporaryDirectory(prefix="test-uploads-", ignore_cleanup_errors=True)
    os.environ["GRADIO_TEMP_DIR"] = folder.name
    atexit.register(folder.cleanup)
    return Path(folder.name)


def free_port() -> int:
    """A port that nobody listens on; Gradio, looking for one itself, leaves sockets unclosed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serving_tiny(
    folder: Path, access: Access = KNOWN, adapt: Callable[[Catalog], Catalog] = lambda tiny: tiny
) -> Iterator[Served]:
    """The page over a tiny target, with a log of its own; all in a folder.

    Args:
        adapt: changes the catalog.
    """
    catalog = adapt(tiny_catalog(save_tiny_llama(folder / "tiny")))
    with (
        RunLog.open(str(folder / "runs.db")) as log,
        serving(catalog, log, folder / "cache", access) as served,
    ):
        yield served
