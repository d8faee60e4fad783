"""`app.py triton`: the engine behind NVIDIA's Triton server."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from playground.cli.options import DeviceOptions, LogOptions, option, say, takes


@dataclass(kw_only=True)
class TritonOptions(LogOptions, DeviceOptions):
    model: str = option("ensemble", "TARGET or TARGET:METHOD; default: the page's first choice.")
    host: str = option("127.0.0.1", "Address to listen on.")
    http_port: int = option(8000, "Port of HTTP.", min=1, max=65535)
    grpc_port: int = option(8001, "Port of gRPC.", min=1, max=65535)
    metrics_port: int = option(8002, "Port of Triton's own metrics.", min=1, max=65535)
    api_key: str = option(
        "",
        "Key for generation over HTTP and gRPC; without it, gRPC needs none on loopback.",
        envvar="PLAYGROUND_API_KEY",
    )
    no_token: bool = option(False, "Require no key over HTTP; on loopback only.", "--no-token")


@takes(TritonOptions)
def triton(options: TritonOptions) -> None:
    """Serve the engine behind Triton, HTTP and gRPC (needs the extra triton)."""
    import signal
    import threading
    from contextlib import ExitStack, suppress

    from playground.api.triton_server import KEY_HEADER, TritonAccess, triton_server
    from playground.host.catalog import Catalog
    from playground.host.runner import EngineHost
    from playground.web.access import Access

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
    # Triton is a separate process, which would outlive this one.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with suppress(KeyboardInterrupt), ExitStack() as stack:
        log = stack.enter_context(options.open_log())
        host = EngineHost(log, Catalog.shipped(), cache_dir=options.cache, device=options.device)
        stack.callback(host.close, 1.0)
        stack.enter_context(triton_server(host, options.model, triton_access))
        ports = (
            f"HTTP {options.http_port}, gRPC {options.grpc_port}, metrics {options.metrics_port}"
        )
        say(f"Triton on {access.address}: {ports}  (Ctrl+C ends it)")
        if not triton_access.open_http and not options.api_key:
            what = "generate over HTTP" if triton_access.open_grpc else "generate"
            say(f"To {what}, send the header  {KEY_HEADER}: {triton_access.key}")
        threading.Event().wait()
