"""Methods handed to other engines, and their configs read back: for page and command line."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePath
from typing import Any, Literal
from urllib.parse import urlencode

import yaml
from huggingface_hub import try_to_load_from_cache
from pydantic import Field

import presets
from engine import formats
from engine.config import Settings
from engine.drafters import parse_method
from engine.drafters.method import MethodConfig
from engine.errors import ConfigError, SourceError
from engine.interop import ENGINES, export_method, find_engine, import_config
from engine.interop.handoff import Export, Imported
from engine.model.sources import TargetSpec
from playground.host.baseline import trusted_speedup
from playground.host.catalog import OWN_DRAFTERS, TYPE_PREFIX, Catalog
from playground.host.stream import stored_run
from presets.reading import parse_yaml
from storage import PLAIN, RunLog, RunQuery, RunSummary

LOADS_GGUF = "llamacpp"
RECENT = 40
"""Runs offered in the menu; any other opens by its id."""
BLOCK = 15
"""Draft length of the table's methods that have none by default: DFlash's usual block."""
MAX_SHOWN_CHARS = 200
OTHER_PAGES = ("run", "runs", "tree", "compare", "benchmark", "sweep")
Resolve = Callable[[str], TargetSpec]


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


class Question(Settings):
    """What to hand over, a run or a method, and to which release of which engine."""

    kind: Literal["run", "method"] = "run"
    run: str = Field("", max_length=64)
    target: str = Field("", max_length=200)
    method: str = Field("", max_length=200)
    engine: str = Field(next(iter(ENGINES)), max_length=40)
    version: str = Field("", max_length=40)

    @classmethod
    def of_link(cls, params: Mapping[str, str]) -> Question | None:
        """What an address with `deploy` opens; None for any other, or where another page is meant.

        Raises ConfigError: a part is too long.
        """
        if not params.get("deploy") or any(params.get(name) for name in OTHER_PAGES):
            return None
        kind, _, key = params.get("of", "").partition(":")
        values = {name: params[name] for name in ("target", "version") if params.get(name)}
        if params["deploy"] in ENGINES:
            values["engine"] = params["deploy"]
        if kind in ("run", "method") and key:
            values |= {"kind": kind, kind: key}
        return cls.parse(values, where="the address")

    @property
    def link(self) -> str:
        """Query of an address that opens the page so."""
        key = self.run if self.kind == "run" else self.method
        target = "" if self.kind == "run" else self.target
        parts = {"deploy": self.engine, "of": f"{self.kind}:{key}", "target": target}
        return urlencode({k: v for k, v in (parts | {"version": self.version}).items() if v})

    @property
    def command(self) -> str:
        """The same on the command line."""
        method = self.method.removeprefix(TYPE_PREFIX)
        of = ["--run", self.run] if self.kind == "run" else ["--method", method]
        target = ["--target", self.target] if self.kind == "method" else []
        release = ["--engine-version", self.version] if self.version else []
        words = ["python", "app.py", "export", *of, *target, "--to", self.engine, *release]
        return shlex.join(words)

    def filled(self, log: RunLog, catalog: Catalog) -> Question:
        """With the fastest configuration, a target and a method that fits, where none is picked."""
        runs = offered_runs(log) if self.kind == "run" and not self.run else []
        targets = [key for _, key in catalog.target_choices()]
        target = self.target if self.target in targets else targets[0]
        methods = [key for _, key in catalog.method_choices(target)]
        linked = self.kind == "method" and self.method and not self.target
        newest = self.engine in ENGINES and self.version == ENGINES[self.engine].newest
        return self.replace(
            run=runs[0][1] if runs else self.run,
            target=target,
            method=self.method
            if linked or self.method in methods
            else catalog.first_method(target, alone=True),
            version="" if newest else self.version,
        )

    def find(self, log: RunLog, catalog: Catalog) -> Handed:
        """The method on its target. Raises ConfigError: no such run, method or target."""
        if self.kind == "run":
            return of_run(log, self.run)
        method = catalog.method(self.method)
        return Handed(method.config, catalog.target(self.target).name, method.title)


def of_run(log: RunLog, run_id: str) -> Handed:
    """The method and target of a stored run.

    Raises ConfigError: there is no such run, or its method is not known here.
    """
    run = stored_run(log, run_id)
    config = parse_method(run.method, where=f"run {run_id}")
    return Handed(config, run.target, run.name or run.method_title, run.mat, run.tok_s)


def offered_runs(log: RunLog) -> list[tuple[str, str]]:
    """What can be exported, a title and a run's id: what experiments measured, fastest first,
    then the newest single runs. Plain decoding needs no config."""
    ranked = [(trusted_speedup(one.counts) or 0.0, one.example) for one in log.experiments.setups()]
    found = [
        (_title(run, f"{formats.speedup(speedup)} plain" if speedup else ""), run.id)
        for speedup, run in sorted(ranked, key=lambda one: -one[0])
    ]
    for run in log.experiments.page(RunQuery(limit=RECENT)).rows:
        if isinstance(run, RunSummary) and run.decoding_type != PLAIN:
            figure = "" if run.tok_s is None else f"{formats.tok_s(run.tok_s)} tok/s"
            found.append((_title(run, figure), run.id))
    return found[:RECENT]


def _title(run: RunSummary, figure: str) -> str:
    parts = (run.method_title, figure, run.target, f"{run.created_at:%d %b %H:%M}")
    return " · ".join(filter(None, parts))


# ---- out


def hand_over(
    handed: Handed, engine: str, version: str | None = None, resolve: Resolve = presets.resolve
) -> Export:
    """The method as an engine takes it, or why it does not.

    Raises ConfigError: no such engine, or a version that is not known.
    """
    spec = _spec_of(handed.target, resolve)
    target = handed.target if spec is None else _loadable(spec)
    return export_method(
        handed.config,
        find_engine(engine),
        target=target,
        version=version or None,
        resolve=lambda name: model_name(name, resolve),
        notes=_target_notes(spec, target),
        hybrid=spec is not None and _is_recurrent(spec),
        losses=_losses(handed, engine, resolve),
    )


def matrix(catalog: Catalog) -> list[tuple[str, list[Export]]]:
    """Every method of the engine package in every engine, newest releases, default settings."""
    rows = []
    for cls in catalog.types.values():
        config = cls.parse({})
        given = {"speculative_model": "DRAFTER", "max_draft_len": BLOCK}
        unset = {key: value for key, value in given.items() if getattr(config, key, "") is None}
        handed = Handed(config.replace(**unset), "TARGET", cls.title)
        rows.append((cls.title, [hand_over(handed, engine) for engine in ENGINES]))
    return rows


def model_name(name: str, resolve: Resolve = presets.resolve) -> str:
    """What an engine loads for a drafter: a shipped folder, a preset's hub id, or the name."""
    shipped = presets.locate(name)
    if shipped != name:
        return shipped
    spec = _spec_of(name, resolve)
    return name if spec is None else _loadable(spec)


def _spec_of(name: str, resolve: Resolve) -> TargetSpec | None:
    """The target of that name; None for a name that means nothing on this machine."""
    try:
        return resolve(name)
    except SourceError:
        return None


def _loadable(spec: TargetSpec) -> str:
    if spec.wheel is not None:
        return PurePath(spec.wheel.member).name
    return spec.hub or spec.path or spec.name


def _is_recurrent(spec: TargetSpec) -> bool:
    """As its preset says, or its config where that is on this machine; nothing is fetched."""
    if spec.recurrent:
        return True
    file: object = None
    if spec.hub is not None:
        file = try_to_load_from_cache(spec.hub, "config.json", revision=spec.revision)
    elif spec.path is not None:
        file = str(Path(spec.path).expanduser() / "config.json")
    if not isinstance(file, str) or not Path(file).is_file():
        return False
    from engine.model.facts import recurrent_by_config

    return recurrent_by_config(Path(file).parent)


def _target_notes(spec: TargetSpec | None, target: str) -> tuple[str, ...]:
    if spec is None:
        return ()
    notes: list[str] = []
    if spec.wheel is not None:
        notes.append(
            f"{target} is the embedded target of the package {spec.wheel.package}; it is in the "
            "playground's cache folder under wheels/."
        )
    if spec.random is not None:
        notes.append(
            f"{target} has random weights: it is good only for trying out a config file. "
            "It is in the playground's cache folder under random/."
        )
    if spec.revision is not None:
        notes.append(f"Here the target is revision {spec.revision} of {target}.")
    return tuple(notes)


def _losses(handed: Handed, engine: str, resolve: Resolve) -> tuple[str, ...]:
    """What of the weights does not go over."""
    if engine == LOADS_GGUF:
        return ()
    models = {"target": handed.target, "drafter": getattr(handed.config, "speculative_model", None)}
    return tuple(
        f"The {role} is a GGUF file, which few engines besides llama.cpp load. Give this engine "
        "the "
        "model's original weights; they are quantized differently, so speed and acceptance "
        "differ."
        for role, name in models.items()
        if name is not None and _is_gguf(name, resolve)
    )


def _is_gguf(name: str, resolve: Resolve) -> bool:
    spec = _spec_of(name, resolve)
    file = spec is not None and spec.gguf_file is not None
    return file or model_name(name, resolve).endswith(".gguf")


# ---- in


def read_config(engine: str, text: str) -> Imported:
    """A method from another engine's config.

    Raises ConfigError: it cannot be read, or has no counterpart here.
    """
    read_yaml = partial(parse_yaml, where="The text")
    return import_config(find_engine(engine), text, read_yaml)


def use(
    catalog: Catalog, engine: str, text: str, target: object
) -> tuple[str, str, dict[str, Any]]:
    """Target, method key and settings of another engine's config, for the Generate page.

    Raises ConfigError: it cannot be read, or the target is not offered this method.
    """
    config = read_config(engine, text).config
    name = catalog.target(target).name
    key = TYPE_PREFIX + config.decoding_type
    offered = [choice for _, choice in catalog.method_choices(name)]
    if key not in offered or config.decoding_type == OWN_DRAFTERS:
        raise ConfigError(
            f"{type(config).title} does not fit the target {name}. Pick another target on the "
            "Generate page first."
        )
    return name, key, config.changed


def shown_settings(config: MethodConfig) -> dict[str, str]:
    """Settings that differ from the defaults, short enough for a line."""
    return {name: _short(value) for name, value in config.changed_flat.items()}


def _short(value: Any) -> str:
    if isinstance(value, list) and len(value) > 6:
        return f"{len(value)} nodes" if isinstance(value[0], list) else f"{len(value)} values"
    text = str(value)
    return text if len(text) <= MAX_SHOWN_CHARS else text[: MAX_SHOWN_CHARS - 1] + "…"


def method_yaml(config: MethodConfig, engine: str) -> str:
    """A method file for `generate --method FILE.yaml` or `presets/methods`."""
    title = find_engine(engine).title
    values: Mapping[str, Any] = {
        "name": f"{config.decoding_type.lower().replace('_', '-')}-from-{engine}",
        "title": f"{type(config).title} from {title}",
        "config": {"decoding_type": config.decoding_type, **config.changed},
    }
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


class _Dumper(yaml.SafeDumper):
    """Settings one per line, lists (trees above all) in a row."""


_Dumper.add_representer(
    list, lambda dumper, data: dumper.represent_sequence("tag:yaml.org,2002:seq", data, True)
)
