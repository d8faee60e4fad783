"""Hands a method to another engine and reads one back: what the page and the commands share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import yaml

import presets
from engine.drafters import parse_method
from engine.drafters.method import MethodConfig
from engine.errors import ConfigError, SourceError
from engine.interop import export_method, find_engine, import_config
from engine.interop.handoff import Export, Imported
from engine.model.sources import TargetSpec
from storage import RunLog

LOADS_GGUF = "llamacpp"


@dataclass(frozen=True, slots=True)
class Handed:
    """A method on a target, to be handed over.

    Attributes:
        target: name of the target: preset, path or hub id.
        title: what it is, for people.
        mat, tok_s: what the run measured; None for a method that was only picked.
    """

    config: MethodConfig
    target: str
    title: str
    mat: float | None = None
    tok_s: float | None = None


def of_run(log: RunLog, run_id: str) -> Handed:
    """The method and target of a stored run.

    Raises:
        ConfigError: there is no such run, or its method is not known here.
    """
    run = log.get(run_id)
    if run is None:
        raise ConfigError(f"No run {run_id} is in the log. It may be in another one.")
    config = parse_method(run.method, where=f"run {run_id}")
    return Handed(config, run.target, run.name or run.method_title, run.mat, run.tok_s)


def hand_over(
    handed: Handed,
    engine: str,
    version: str | None = None,
    resolve: Callable[[str], TargetSpec] = presets.resolve,
) -> Export:
    """The method as an engine takes it, or why it does not.

    Raises:
        ConfigError: no such engine, or a version that is not known.
    """
    found = find_engine(engine)
    spec = _spec_of(handed.target, resolve)
    target = handed.target if spec is None else _loadable(spec)
    return export_method(
        handed.config,
        found,
        target=target,
        version=version or None,
        resolve=lambda name: model_name(name, resolve),
        notes=_target_notes(spec, target, engine),
    )


def model_name(name: str, resolve: Callable[[str], TargetSpec] = presets.resolve) -> str:
    """What an engine loads for a drafter: a shipped folder, a preset's hub id, or the name."""
    shipped = presets.locate(name)
    if shipped != name:
        return shipped
    spec = _spec_of(name, resolve)
    return name if spec is None else _loadable(spec)


def _spec_of(name: str, resolve: Callable[[str], TargetSpec]) -> TargetSpec | None:
    """The target of that name; None for a name that means nothing on this machine."""
    try:
        return resolve(name)
    except SourceError:
        return None


def _loadable(spec: TargetSpec) -> str:
    if spec.wheel is not None:
        return PurePath(spec.wheel.member).name
    return spec.hub or spec.path or spec.name


def _target_notes(spec: TargetSpec | None, target: str, engine: str) -> tuple[str, ...]:
    notes: list[str] = []
    if spec is not None and spec.wheel is not None:
        notes.append(
            f"{target} is the embedded target of the package {spec.wheel.package}; it lies in the "
            "playground's cache folder under wheels/."
        )
    is_gguf = target.endswith(".gguf") or (spec is not None and spec.gguf_file is not None)
    if is_gguf and engine != LOADS_GGUF:
        notes.append(
            "The target is a GGUF file. Give this engine the model's original weights instead: "
            "few architectures load from GGUF outside llama.cpp."
        )
    if spec is not None and spec.revision is not None:
        notes.append(f"Here the target is revision {spec.revision} of {target}.")
    return tuple(notes)


def read_config(engine: str, text: str) -> Imported:
    """A method from another engine's config.

    Raises:
        ConfigError: it cannot be read, or has no counterpart here.
    """
    return import_config(find_engine(engine), text, read_yaml)


def read_yaml(text: str) -> Any:
    """Plain data of a YAML text.

    Raises:
        ConfigError: malformed; names the line.
    """
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f" in line {mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or "malformed"
        raise ConfigError(f"The text is not valid YAML{line}: {problem}.") from error


def set_settings(config: MethodConfig) -> dict[str, Any]:
    """Settings that differ from the method's defaults, as plain JSON."""
    values = config.model_dump(mode="json")
    defaults = type(config).parse({}).model_dump(mode="json")
    return {k: v for k, v in values.items() if k != "decoding_type" and v != defaults[k]}


def method_yaml(config: MethodConfig, engine: str) -> str:
    """A method file for `generate --method FILE.yaml` or `presets/methods`."""
    title = find_engine(engine).title
    values: Mapping[str, Any] = {
        "name": f"{config.decoding_type.lower().replace('_', '-')}-from-{engine}",
        "title": f"{type(config).title} from {title}",
        "config": {"decoding_type": config.decoding_type, **set_settings(config)},
    }
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


class _Dumper(yaml.SafeDumper):
    """Settings one per line, lists (trees above all) in a row."""

    def represent_list(self, data: Any) -> Any:
        return self.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=True)


_Dumper.add_representer(list, _Dumper.represent_list)
