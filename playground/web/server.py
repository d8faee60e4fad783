"""Serves the page on this machine; nothing is sent anywhere else."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from engine.drafters import parse_method
from engine.errors import ConfigError
from playground.host.catalog import OWN_DRAFTERS, Catalog
from playground.host.methods import register_own
from playground.host.runner import EngineHost
from playground.web.security import launch_options
from presets import MethodPreset
from storage import RunLog


def serve(
    *,
    host: str = "127.0.0.1",
    port: int = 7860,
    db: str,
    cache_dir: Path,
    catalog: Catalog,
    device: str = "auto",
    open_browser: bool = False,
    allowed_hosts: tuple[str, ...] = (),
) -> None:
    """Serve the page until interrupted. The target is loaded by the first run, not here.

    Args:
        catalog: what is on offer, and what settings may name.
        allowed_hosts: further names under which the page may be asked for.
    """
    quiet_gradio()
    from playground.web.shell import build_shell

    with ExitStack() as stack:
        log = RunLog.open(db)
        stack.callback(log.close)
        engine = EngineHost(log, catalog, cache_dir=cache_dir, device=device)
        stack.callback(engine.close)
        page = build_shell(engine, log)
        page.queue(default_concurrency_limit=None, max_size=64)
        stack.callback(page.close, verbose=False)
        options = launch_options(host, allowed_hosts)
        try:
            _, url, _ = page.launch(
                server_port=port, prevent_thread_lock=True, inbrowser=open_browser, **options
            )
        except OSError as error:
            raise ConfigError(
                f"Cannot listen on port {port} of {host}: it is taken, or not ours to take. "
                "Choose another one with --port."
            ) from error
        print(f"Speculative decoding playground on {url}  (Ctrl+C ends it)", flush=True)
        page.block_thread()


def quiet_gradio() -> None:
    """Switch off what Gradio would send out, which it decides when it is imported."""
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    os.environ.setdefault("GRADIO_ANALYTICS_CACHE_FREQUENCY", "100000")


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
