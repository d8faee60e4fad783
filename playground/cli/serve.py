"""`app.py serve` and `doctor`, and the lists `models` and `methods`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from playground.cli.options import DeviceOptions, JsonOptions, LogOptions, option, say, takes


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
    open_browser: bool = option(False, "Open the page.", "--open")


@takes(ServeOptions)
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
        open_browser=options.open_browser,
    )


@takes(DeviceOptions)
def doctor(options: DeviceOptions) -> None:
    """Say what this machine brings for decoding, and what is slow on it."""
    from playground.host.doctor import diagnose

    for line in diagnose(options.cache, options.device).lines:
        say(line)


@takes(JsonOptions)
def models(options: JsonOptions) -> None:
    """List the target presets."""
    import json

    import presets

    specs = presets.targets()
    if options.as_json:
        say(json.dumps([s.model_dump(mode="json") for s in specs.values()], indent=2))
        return
    for spec in specs.values():
        wheel = spec.wheel and f"wheel {spec.wheel.package}"
        where = spec.hub or spec.path or wheel or "random weights, made on first use"
        say(f"{spec.name:26}{spec.title}  [{where}]\n{'':26}{spec.description.strip()}")
    say("\nAny local folder, .gguf file or hub id works too: --target PATH_OR_ID")


@takes(JsonOptions)
def methods(options: JsonOptions) -> None:
    """List the drafting methods, their settings and their presets."""
    import json

    import presets
    from engine.drafters import methods as decoding_types

    named, types = presets.methods(), decoding_types()
    if options.as_json:
        schema = {name: cls.model_json_schema() for name, cls in types.items()}
        dumped = {name: preset.model_dump(mode="json") for name, preset in named.items()}
        say(json.dumps({"decoding_types": schema, "presets": dumped}, indent=2))
        return
    for name, cls in types.items():
        say(f"{name:16}{cls.summary}" + (f"  ({cls.paper})" if cls.paper else ""))
        for key, setting in cls.model_fields.items():
            if key != "decoding_type":
                default = json.dumps(setting.get_default(), default=str)
                short = default if len(default) <= 24 else default[:21] + "..."
                about = ": ".join(filter(None, (setting.title, setting.description)))
                say(f"{'':4}{key:32}{short:26}{about}")
    say("\nPresets:")
    for preset in named.values():
        belongs = f" for {preset.target}" if preset.target else ""
        say(f"  {preset.name:24}{preset.title}{belongs}")
