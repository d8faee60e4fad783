"""Serves the page; contacts no other machine."""

from __future__ import annotations

import ctypes
import dataclasses
import logging
import os
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import gettempdir

from engine.drafters import parse_method
from engine.errors import ConfigError
from engine.model.sources import partial_folder
from playground.host import paths
from playground.host.catalog import OWN_DRAFTERS, Catalog
from playground.host.methods import register_drafter
from playground.host.runner import EngineHost
from playground.web.access import Access
from presets import MethodPreset
from storage import RunLog

QUEUE_POLL_S = 0.02
"""Interval of Gradio's event loop; its default of 1 ms takes a tenth of the engine's core."""
FIRST_DRAW_S = 2.0
"""Delay before heavy imports, in which the browser draws the page."""
TRIM_S = 30.0
"""Interval between attempts to return memory to the system."""
M_ARENA_MAX = -8
"""glibc's number for the option of that name, in malloc.h."""
CLOSE_S = 1.0
"""Longest wait for the current job at shutdown; loading a model cannot be stopped."""


def serve(
    *,
    access: Access,
    port: int,
    db: str,
    cache_dir: Path,
    catalog: Catalog,
    device: str = "auto",
) -> None:
    """Serve the page until interrupted, its start included. The first run loads the target.

    Raises:
        ConfigError: the port is in use, or permission is denied.
    """
    share_heaps()
    quiet_gradio()
    with suppress(KeyboardInterrupt), ExitStack() as stack:
        # Before Gradio is imported; its default folder is shared by processes.
        private = partial_folder(Path(gettempdir()), prefix="playground-uploads-")
        os.environ["GRADIO_TEMP_DIR"] = str(stack.enter_context(private))
        from playground.api.routes import api_routes
        from playground.web.security import launch
        from playground.web.shell import build_shell

        log = RunLog.open(db)
        stack.callback(log.close)
        engine = EngineHost(log, catalog, cache_dir=cache_dir, device=device)
        page = build_shell(engine, paths.training())
        page.queue(default_concurrency_limit=None, max_size=64)
        page._queue.sleep_when_free = QUEUE_POLL_S
        stack.callback(page.close, verbose=False)
        stack.callback(engine.close, CLOSE_S)  # before the page, so that streams end
        # Streams that do not end by then are cut off, which is not an error at shutdown.
        stack.callback(logging.getLogger("uvicorn.error").setLevel, logging.CRITICAL)
        try:
            launch(page, access, port, api_routes(engine))
        except OSError as error:
            raise ConfigError(
                f"Cannot listen on port {port} of {access.address}: it is in use, or permission is "
                "denied. Choose another one with --port."
            ) from error
        if not access.is_loopback:
            print(f"Warning: {access.address} is no loopback address: others can reach the page.")
        url = access.url(port)
        print(f"Speculative decoding playground on {url}  (Ctrl+C ends it)", flush=True)
        print(
            f"For programs: {access.base_url(port)}/v1 (OpenAI), /v2 (Triton), /metrics", flush=True
        )
        threading.Event().wait(FIRST_DRAW_S)
        import_models()
        while True:
            threading.Event().wait(TRIM_S)
            if engine.occupancy == (0, 0):  # trimming would pause a run
                trim_memory()


def share_heaps() -> None:
    """Let threads share two heaps: glibc keeps up to eight per core, each at its largest size."""
    if sys.platform == "linux" and hasattr(ctypes.CDLL(None), "mallopt"):
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, 2)


def trim_memory() -> None:
    """Return freed memory to the system: a heap of glibc does not shrink from its middle."""
    if sys.platform == "linux" and hasattr(ctypes.CDLL(None), "malloc_trim"):
        ctypes.CDLL(None).malloc_trim(0)


def import_models() -> None:
    """Import what the first target needs, which takes seconds, while the user reads the page."""
    import transformers

    transformers.PreTrainedModel  # noqa: B018  # transformers imports by attribute


def quiet_gradio() -> None:
    """Switch off Gradio's analytics, which it reads from the environment when imported."""
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    os.environ.setdefault("GRADIO_ANALYTICS_CACHE_FREQUENCY", "100000")


def with_own_drafters(catalog: Catalog, drafters: Sequence[str]) -> Catalog:
    """The catalog with the user's own drafters among its presets. Imports their modules.

    Raises:
        DrafterError: there is no such class.
    """
    own = {}
    for place in drafters:
        values = {"decoding_type": OWN_DRAFTERS, "drafter": register_drafter(place)}
        config = parse_method(values, where="--drafter")
        own[place] = MethodPreset(name=place, title=place, config=config)
    return dataclasses.replace(catalog, presets={**catalog.presets, **own})
