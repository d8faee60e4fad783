"""`specdec serve`, `triton` and `doctor`, and the lists `models` and `methods`."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace

from playground.cli.options import DeviceOptions, LogOptions, command, option
from playground.cli.streams import echo


@dataclass(kw_only=True)
class ServeOptions(LogOptions, DeviceOptions):
    host: str = option("127.0.0.1", "Address to listen on.")
    port: int = option(7860, "Port to listen on.", min=1, max=65535)
    allowed_host: list[str] = option(
        [], "Another host name by which the page may be reached.", metavar="NAME"
    )
    api_key: str = option(
        "",
        "Key for programs that call the endpoints; without it, none is needed on loopback.",
        envvar="PLAYGROUND_API_KEY",
    )
    no_token: bool = option(False, "Require no token; on loopback only.", "--no-token")
    drafter: list[str] = option(
        [], "Offer your own drafter on the page: module:Class.", metavar="M:C"
    )
    target: list[str] = option(
        [], "Offer another target on the page: local folder, .gguf file or hub id."
    )
    allow_path: list[str] = option(
        [], "Drafters and corpora that the page may name: folder, file or hub id.", metavar="PATH"
    )
    ray: list[str] = option(
        [], "Offer a Ray cluster to experiments, besides this machine.", metavar="ADDRESS"
    )


@command(ServeOptions)
def serve(options: ServeOptions) -> None:
    """Serve the page."""
    import logging

    from playground.experiments.prompts import known_suites
    from playground.host.catalog import Catalog, catalog_within
    from playground.web.access import Access
    from playground.web.server import serve, with_own_drafters

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
    serve(
        access=access,
        port=options.port,
        db=options.log_url,
        cache_dir=options.cache,
        device=options.device,
        catalog=catalog_within(
            catalog,
            options.target,
            options.allow_path,
            may_open=access.is_loopback and access.token is not None,
        ),
    )


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


@command(TritonOptions)
def triton(options: TritonOptions) -> None:
    """Serve the engine behind Triton, HTTP and gRPC (needs the extra triton)."""
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
    with suppress(KeyboardInterrupt), ExitStack() as stack:
        log = stack.enter_context(options.open_log())
        host = EngineHost(log, Catalog.shipped(), cache_dir=options.cache, device=options.device)
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


@command(DeviceOptions)
def doctor(options: DeviceOptions) -> None:
    """Check how well this machine is set up for decoding."""
    from playground.host.doctor import diagnose

    for line in diagnose(options.cache, options.device).lines:
        echo(line)


def models() -> None:
    """List the target presets."""
    import presets

    for spec in presets.targets().values():
        wheel = spec.wheel and f"wheel {spec.wheel.package}"
        where = spec.hub or spec.path or wheel or "random weights, made on first use"
        echo(f"{spec.name:26}{spec.title}  [{where}]\n{'':26}{spec.description.strip()}")
    echo("\nAny local folder, .gguf file or hub id works too: --target PATH_OR_ID")


def methods() -> None:
    """List the drafting methods, their settings and their presets."""
    import json

    import presets
    from engine.drafters import methods as decoding_types

    for name, cls in decoding_types().items():
        echo(f"{name:16}{cls.summary}" + (f"  ({cls.paper})" if cls.paper else ""))
        for key, setting in cls.model_fields.items():
            if key != "decoding_type":
                default = json.dumps(setting.get_default(), default=str)
                short = default if len(default) <= 24 else default[:21] + "..."
                about = ": ".join(filter(None, (setting.title, setting.description)))
                echo(f"{'':4}{key:32}{short:26}{about}")
    echo("\nPresets:")
    for preset in presets.methods().values():
        belongs = f" for {preset.target}" if preset.target else ""
        echo(f"  {preset.name:24}{preset.title}{belongs}")
