"""Serving engines: exports methods to their configs, and imports their configs as methods.

An engine is one file of rows, setting here → key there (`table`), used in both directions; a file
of `tables` with its releases and the keys that are no setting here; and a folder of `templates`,
its files. `trees` reads and writes choice trees in every tool's format.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from engine.drafters import parse_method
from engine.drafters.method import MethodConfig
from engine.errors import ConfigError, did_you_mean, validate_choice
from playground.deploy import llamacpp, mlx, ollama, sglang, transformers, triton, trtllm, vllm
from playground.deploy.conversion import Reader, Writer
from playground.deploy.files import MAX_CHARS, Export, ImportedMethod, ReadYaml, Version, render
from playground.deploy.table import Engine, UnsupportedError, ignored_by_key, refusal_by_key

_MODULES = (trtllm, vllm, sglang, triton, llamacpp, transformers, mlx, ollama)
ENGINES: Mapping[str, Engine] = {module.ENGINE.name: module.ENGINE for module in _MODULES}


def find_engine(name: object) -> Engine:
    """Raises ConfigError: there is no engine of that name."""
    return ENGINES[validate_choice("The engine", name, ENGINES, did_you_mean(name, ENGINES))]


def read_version(engine: Engine, text: str) -> Version:
    """A release as numbers, from `0.20.2`, `v0.20` or `b9235`.

    Raises:
        ConfigError: it is malformed, or older than the oldest known.
    """
    oldest = engine.versions[-1][0]
    what = f"The version of {engine.title} must be"
    if not re.fullmatch(r"[vb]?\d{1,6}(\.\d{1,4}){0,3}\S*", text):
        raise ConfigError(f"{what} like {engine.default}, got {text!r:.40}.")
    if _numbers(text) < _numbers(oldest):
        raise ConfigError(
            f"{what} {oldest} or newer, got {text:.40}; older ones are not known here."
        )
    return _numbers(text)


def _numbers(text: str) -> Version:
    head = re.match(r"[vb]?(\d+(?:\.\d+)*)", text)
    assert head is not None
    return tuple(int(part) for part in head[1].split("."))


def export_method(
    config: MethodConfig,
    engine: Engine,
    *,
    target: str,
    version: str = "",
    resolve: Callable[[str], str] = str,
    notes: tuple[str, ...] = (),
    hybrid: bool = False,
    warnings: tuple[str, ...] = (),
) -> Export:
    """A method as an engine runs it, or why it cannot.

    Args:
        target: a name or path that the engine can load.
        hybrid: whether the target has recurrent layers.
        version: the engine's release; empty = the default.
        resolve: `speculative_model` → a name or path that the engine can load.
        notes, warnings: remarks on the target, and further differences from the method here.

    Raises:
        ConfigError: the version is malformed, or older than the oldest known.
    """
    version = version or engine.default
    numbers = read_version(engine, version)
    newest = max((name for name, _ in engine.versions), key=_numbers)
    if numbers > _numbers(newest):
        newer = f"{engine.title} {version} is newer than {newest}, the newest known here."
        notes = (*notes, f"{newer} Check the result against its documentation.")
    writer = Writer(engine, config, target, numbers, resolve, list(notes), list(warnings))
    try:
        values = writer.values()
        extra = engine.prepare(writer, values)
    except UnsupportedError as error:
        return Export(engine.name, version, refusal=str(error), nearest=error.nearest)
    writer.finish()
    writer.notes += [*engine.notes, *([engine.hybrid] if hybrid and engine.hybrid else [])]
    known = {"values": values, "target": target, "config": config}
    files = render(engine.name, engine.files, **known, **extra)
    return Export(engine.name, version, files, tuple(writer.notes), tuple(writer.warnings))


def import_config(engine: Engine, text: str, read_yaml: ReadYaml) -> ImportedMethod:
    """An engine's config as a method here.

    Args:
        read_yaml: plain data of a YAML text; may raise ConfigError.

    Raises:
        ConfigError: it is malformed, has no counterpart here, or has a key that is unknown to the
            engine or makes it draft as no method here does.
    """
    if not text.strip():
        raise ConfigError(f"Nothing to read. Paste a config of {engine.title}.")
    if len(text) > MAX_CHARS:
        raise ConfigError(f"The text has {len(text)} characters; {MAX_CHARS} are allowed.")
    values, target = engine.parse(text, read_yaml)
    for key, refusal in refusal_by_key(engine.rows).items():
        if key in values:
            refusal.check(engine.title, key, values[key])
    reader = Reader(engine, values)
    settings = reader.read(engine.find_method(reader))
    ignored, about = reader.ignored(), ignored_by_key(engine.rows)
    reader.notes += [f"{key} {about[key]}" for key in ignored if about.get(key)]
    unread = tuple(key for key in ignored if not about.get(key))
    return ImportedMethod(parse_method(settings), target, tuple(reader.notes), unread)
