"""`specdec serve` and `triton`."""

from __future__ import annotations

import logging
import secrets
import threading
from contextlib import ExitStack, suppress
from dataclasses import replace

from playground.cli.commands import ServeOptions, TritonOptions
from playground.cli.inputs import cache_of, log_url, open_log
from playground.cli.streams import echo
from playground.experiments.prompts import known_suites
from playground.host.catalog import Catalog, catalog_within
from playground.host.runner import EngineHost
from playground.web.access import Access
from playground.web.server import serve as serve_page
from playground.web.server import with_own_drafters


def serve(options: ServeOptions) -> None:
    """Serve the page."""
    token: dict[str, None] = {"token": None} if options.no_token else {}
    access = Access(
        options.host.strip("[]"),
        tuple(options.allowed_host),
        api_key=options.api_key or None,
        **token,
    )
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("playground").setLevel(logging.INFO)
    shipped = Catalog.shipped()
    clusters = tuple(dict.fromkeys([*shipped.clusters, *options.ray]))
    catalog = replace(shipped, suites=known_suites(), clusters=clusters)
    catalog = with_own_drafters(catalog, options.drafter)
    serve_page(
        access=access,
        port=options.port,
        db=log_url(options),
        cache_dir=cache_of(options),
        device=options.device,
        catalog=catalog_within(
            catalog,
            options.target,
            options.allow_path,
            may_open=access.is_loopback and access.token is not None,
        ),
    )


def triton(options: TritonOptions) -> None:
    """Serve the engine behind Triton, HTTP and gRPC (needs the extra triton)."""
    # Triton's libraries are an extra.
    from playground.api.triton_server import KEY_HEADER, TritonAccess, triton_server

    token: dict[str, None] = {"token": None} if options.no_token else {}
    access = Access(options.host.strip("[]"), (), **token)
    is_open = access.is_loopback and not options.api_key
    triton_access = TritonAccess(
        address=access.address,
        http_port=options.http_port,
        grpc_port=options.grpc_port,
        metrics_port=options.metrics_port,
        key=options.api_key or secrets.token_urlsafe(24),
        open_http=is_open and options.no_token,
        open_grpc=is_open,
    )
    with suppress(KeyboardInterrupt), ExitStack() as stack:
        log = stack.enter_context(open_log(options))
        host = EngineHost(
            log, Catalog.shipped(), cache_dir=cache_of(options), device=options.device
        )
        stack.callback(host.close, 1.0)
        stack.enter_context(triton_server(host, options.model, triton_access))
        ports = (
            f"HTTP {options.http_port}, gRPC {options.grpc_port}, metrics {options.metrics_port}"
        )
        echo(f"Triton on {access.address}: {ports}  (Ctrl+C ends it)")
        if not triton_access.open_http and not options.api_key:
            what = "generate over HTTP" if triton_access.open_grpc else "generate"
            echo(f"To {what}, send the header  {KEY_HEADER}: {triton_access.key}")
        threading.Event().wait()
