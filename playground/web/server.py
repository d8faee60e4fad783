"""Serves the page on this machine; nothing is sent anywhere else."""

from __future__ import annotations

import ctypes
import dataclasses
import logging
import os
import sys
import threading
import webbrowser
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from engine.drafters import parse_method
from engine.errors import ConfigError
from playground.host.catalog import OWN_DRAFTERS, Catalog
from playground.host.methods import register_own
from playground.host.runner import EngineHost
from playground.web.door import Access
from presets import MethodPreset
from storage import RunLog

QUEUE_LOOK_S = 0.02
"""How often Gradio looks for events; its own millisecond costs a tenth of the engine's core."""
DRAWN_S = 2.0
"""After this the first page has been drawn, and nobody waits for the program's start."""
TRIM_S = 30.0
"""Between two looks whether memory can be given back."""
END_S = 1.0
"""Most seconds that ending waits for what is under way: a load cannot be stopped."""


def serve(
    *,
    access: Access,
    port: int,
    db: str,
    cache_dir: Path,
    catalog: Catalog,
    device: str = "auto",
    open_browser: bool = False,
) -> None:
    """Serve the page until interrupted, its start included. The first run loads the target.

    Raises:
        ConfigError: the port is taken, or not ours to take.
    """
    quiet_gradio()
    files = private_files()  # before Gradio is imported
    from playground.api.routes import api_routes
    from playground.web.security import launch
    from playground.web.shell import build_shell

    with suppress(KeyboardInterrupt), ExitStack() as stack:
        stack.callback(files.cleanup)
        log = RunLog.open(db)
        stack.callback(log.close)
        engine = EngineHost(log, catalog, cache_dir=cache_dir, device=device)
        page = build_shell(engine, log)
        page.queue(default_concurrency_limit=None, max_size=64)
        page._queue.sleep_when_free = QUEUE_LOOK_S
        stack.callback(page.close, verbose=False)
        stack.callback(engine.close, END_S)  # before the page: streams end by themselves
        # Those that do not are cut off after a second, which is no error then.
        stack.callback(logging.getLogger("uvicorn.error").setLevel, logging.CRITICAL)
        try:
            launch(page, access, port, Path(files.name), api_routes(engine, log))
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
        if open_browser:
            webbrowser.open(url)
        threading.Event().wait(DRAWN_S)
        import_models()
        while True:
            threading.Event().wait(TRIM_S)
            if engine.occupancy == (0, 0):  # it takes a moment, in which a run would stand still
                trim_memory()


def trim_memory() -> None:
    """Give back what was freed: glibc keeps a heap per thread, each as large as it ever was."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if libc is not None and hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def import_models() -> None:
    """Import what the first target needs: seconds in which a person reads the page."""
    import transformers

    transformers.PreTrainedModel  # noqa: B018  # transformers imports by attribute


def quiet_gradio() -> None:
    """Switch off what Gradio would send out, which it decides when it is imported."""
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    os.environ.setdefault("GRADIO_ANALYTICS_CACHE_FREQUENCY", "100000")


def private_files() -> TemporaryDirectory[str]:
    """A folder of this process alone for uploads and downloads; Gradio's own is everybody's.

    To be called before Gradio is imported, and cleaned up after it.
    """
    folder = TemporaryDirectory(prefix="playground-files-", ignore_cleanup_errors=True)
    os.environ["GRADIO_TEMP_DIR"] = folder.name
    return folder


def with_own_drafters(catalog: Catalog, drafters: Sequence[str]) -> Catalog:
    """The catalog with the user's own drafters among its presets. Runs the code they name.

    Raises:
        DrafterError: there is no such class.
    """
    own = {}
    for place in drafters:
        values = {"decoding_type": OWN_DRAFTERS, "drafter": register_own(place)}
        config = parse_method(values, where="--drafter")
        own[place] = MethodPreset(name=place, title=place, config=config)
    return dataclasses.replace(catalog, presets={**catalog.presets, **own})
