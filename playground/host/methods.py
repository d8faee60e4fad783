"""A method as named on a command line: a preset, a YAML file or a decoding type, with overrides."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import presets
from engine.drafters import methods, parse_method
from engine.drafters.method import MethodConfig
from engine.drafters.user_provided import load_user_drafter, register_user_drafter
from engine.errors import ConfigError, did_you_mean
from engine.safe_text import read_text
from playground.deploy import ENGINES, find_engine, import_config
from presets.reading import MAX_CHARS, parse_yaml
from storage import PLAIN

SettingsWithRemarks = tuple[dict[str, Any], tuple[str, ...]]
"""Settings, and remarks on how an engine's file was read."""
NEAR_TIES = "may differ at near-ties"
"""Badge of a lossless method on a target whose forward is not exact."""
TREE_FIELDS = ("medusa_choices", "eagle_choices")
"""Settings whose value may be the name of a shipped choice tree."""


def choose_method(
    name: str,
    overrides: Sequence[str] = (),
    drafter: str | None = None,
    *,
    report: Callable[[str], None] = lambda remark: None,
) -> MethodConfig:
    """The method's settings.

    Args:
        name: method preset, path of a YAML file (ours, or with an engine's `speculative_config`),
            or decoding type.
        overrides: `field=value`, the value read as YAML.
        drafter: weights of the drafter; sets `speculative_model`. For a user's own drafter,
            `module:Class`, which is imported here.
        report: called with each remark on how an engine's file was read.

    Raises ConfigError: unknown name, key or value.
    """
    is_code = drafter is not None and ":" in drafter and not Path(drafter).exists()
    if is_code and name == PLAIN:
        name = "User_Provided"
    changed = read_overrides(overrides)
    base, remarks = _base_settings(name)
    values = {**base, **changed}
    for remark in remarks:
        report(remark)
    if drafter is not None and values.get("decoding_type") == "User_Provided":
        values["drafter"] = register_drafter(drafter)
    elif drafter is not None:
        values["speculative_model"] = drafter
    config = parse_method(values, where=f"method {name}")
    return config.replace(**{name: getattr(config, name) for name in changed})


def register_drafter(place: str) -> str:
    """Import a user's own drafter and register it under that name.

    For the command line and the server's start only: this runs the named code. Modules are also
    searched for in the current folder.

    Raises DrafterError: it cannot be imported.
    """
    if "" not in sys.path:
        sys.path.insert(0, "")
    register_user_drafter(place, load_user_drafter(place))
    return place


def _base_settings(name: str) -> SettingsWithRemarks:
    preset = presets.methods().get(name)
    if preset is not None:
        return preset.config.model_dump(), ()
    if name in methods():
        return {"decoding_type": name}, ()
    if name.endswith((".yaml", ".yml")) or Path(name).is_file():
        return _parse_settings(read_text(Path(name), most=MAX_CHARS), name)
    names = [*presets.methods(), *methods()]
    hint = did_you_mean(name, names) or "`specdec methods` lists them."
    raise ConfigError(
        f"--method must be a preset, a YAML file or a decoding type, got {name!r:.80}. {hint}"
    )


def read_method(text: str, engine: str = "") -> tuple[MethodConfig, tuple[str, ...]]:
    """The settings in a method file or an engine's config, and remarks on how it was read.

    Args:
        engine: empty for a method file, ours or with an engine's `speculative_config`.

    Raises ConfigError: no such engine, or naming the key.
    """
    if engine:
        imported = import_config(find_engine(engine), text, partial(parse_yaml, where="The text"))
        return imported.config, imported.remarks
    values, remarks = _parse_settings(text, "the file")
    return parse_method(values, where="the file"), remarks


def _parse_settings(text: str, where: str) -> SettingsWithRemarks:
    values = parse_yaml(text, where=where)
    if not isinstance(values, dict):
        raise ConfigError(f"{where} must be a mapping with decoding_type, got {values!r:.80}.")
    engine = _engine_of(values)
    if engine is not None:
        imported = import_config(ENGINES[engine], text, partial(parse_yaml, where=where))
        return imported.config.model_dump(), imported.remarks
    inner = values.get("config", values)
    return (dict(inner) if isinstance(inner, dict) else {}), ()


def _engine_of(values: dict[str, Any]) -> str | None:
    """The engine that a file is for; None for a file of the playground."""
    block = values.get("speculative_config")
    if block is not None:
        return "vllm" if isinstance(block, dict) and "method" in block else "trtllm"
    own = methods().get(str(values.get("decoding_type")))
    is_own = own is not None and values.keys() <= own.model_fields.keys()
    is_trtllm = "decoding_type" in values and values.keys() <= ENGINES["trtllm"].keys
    return "trtllm" if is_trtllm and not is_own else None


def read_overrides(items: Sequence[str]) -> dict[str, Any]:
    """Settings given as `field=value`, the value read as YAML or naming a shipped choice tree.

    Raises ConfigError: one has no `=`, or a value that is no YAML.
    """
    values: dict[str, Any] = {}
    for item in items:
        key, equals, text = (part.strip() for part in item.partition("="))
        if not equals or not key:
            raise ConfigError(f"--set takes field=value, got {item!r:.80}.")
        tree = presets.trees().get(text) if key in TREE_FIELDS else None
        values[key] = tree.candidates if tree else parse_yaml(text, where=f"--set {key:.40}")
    return values


def run_badge(badge: str, method: Mapping[str, Any], environment: Mapping[str, Any]) -> str:
    """The method's badge, weakened where the target is not exact."""
    promised = badge == "lossless" and method.get("decoding_type") != PLAIN
    return NEAR_TIES if promised and environment.get("exact") is False else badge


def stored_badge(
    method: Mapping[str, Any], environment: Mapping[str, Any], *, lossless: bool | None
) -> str:
    """A stored run's badge; for settings of another version, as stored; empty where unknown."""
    if lossless is None:
        return ""
    try:
        badge = parse_method(method).badge
    except ConfigError:
        badge = "lossless" if lossless else "lossy"
    return run_badge(badge, method, environment)
