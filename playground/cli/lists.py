"""`specdec doctor`, `models` and `methods`: what this machine and the program have."""

from __future__ import annotations

import json

import presets
from engine.drafters import methods as decoding_types
from playground.cli.commands import DoctorOptions, MethodsOptions, ModelsOptions
from playground.cli.inputs import cache_of
from playground.cli.streams import echo


def doctor(options: DoctorOptions) -> None:
    """Check how well this machine is set up for decoding."""
    from playground.host.doctor import diagnose  # transformers, which lists do without

    for line in diagnose(cache_of(options), options.device).lines:
        echo(line)


def models(options: ModelsOptions) -> None:
    """Print the target presets."""
    for spec in presets.targets().values():
        wheel = spec.wheel and f"wheel {spec.wheel.package}"
        where = spec.hub or spec.path or wheel or "random weights, made on first use"
        echo(f"{spec.name:26}{spec.title}  [{where}]\n{'':26}{spec.description.strip()}")
    echo("\nAny local folder, .gguf file or hub id works too: --target PATH_OR_ID")


def methods(options: MethodsOptions) -> None:
    """Print the drafting methods, their settings and their presets."""
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
