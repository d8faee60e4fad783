"""Export of methods to other engines, without Gradio."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any
from urllib.parse import urlencode

from pydantic import Field

import presets
from engine import formats
from engine.config import Settings
from engine.drafters import parse_method
from engine.drafters.method import MethodConfig
from engine.errors import ConfigError, SourceError, validate_choice
from engine.model.sources import TargetSpec
from playground.deploy import ENGINES, export_method, find_engine
from playground.deploy.files import Export, yaml_block
from playground.host.catalog import TYPE_PREFIX, Catalog
from playground.host.speedup import newest_speedups
from playground.runs.reading import stored_run
from storage import PLAIN, RunLog, RunQuery, RunSummary

LOAD_GGUF = ("llamacpp", "ollama")
RECENT = 40
"""Runs in the menu; links open any run."""
BLOCK_LEN = 15
"""Draft length of methods without a default: the usual block length of DFlash."""
QUANTIZATION = re.compile(r"[.-](i?q[1-8]|f16|bf16|f32|mxfp4|tq[12])[a-z0-9_]*$", re.IGNORECASE)
"""The quantization at the end of a GGUF file's name, e.g. -q4_k_m, .IQ4_XS."""
WHOLE = "whole"
"""Name of the part that is the whole combination."""
Resolve = Callable[[str], TargetSpec]


@dataclass(frozen=True, slots=True)
class ExportSource:
    """A method on a target, to be exported.

    Attributes:
        target: name of the target: preset, path or hub id.
        mat, tok_s: of the exported run; None for a method of the menu.
    """

    config: MethodConfig
    target: str
    title: str
    mat: float | None = None
    tok_s: float | None = None

    def part(self, name: str) -> ExportSource:
        """One method of a combination, by its setting; the whole for `WHOLE`.

        Raises ConfigError: it is no combination, or has no such part.
        """
        within = self.config.nested()
        if name == WHOLE:
            return self
        advice = "A combination's methods can be exported one at a time."
        part = within[validate_choice("part", name, (WHOLE, *within), advice)]
        return ExportSource(part, self.target, f"{part.title} alone")


class ExportForm(Settings):
    """Fields of the Deploy page: a run or a method, and the release of an engine."""

    of: str = Field("", max_length=210, description="run:ID or method:KEY; empty: the fastest run")
    target: str = Field("", max_length=200, description="of a method")
    engine: str = Field("", max_length=40, description="empty: the first that takes the method")
    version: str = Field("", max_length=40)
    part: str = Field("", max_length=40, description="of a combination; empty: what engines take")

    @classmethod
    def of_link(cls, params: Mapping[str, str]) -> ExportForm | None:
        """The form of an address with `deploy`; None if the address opens another page.

        Raises ConfigError: a part is too long.
        """
        if not params.get("deploy"):
            return None
        names = ("of", "target", "version", "part")
        values = {name: params[name] for name in names if params.get(name)}
        if params["deploy"] in ENGINES:
            values["engine"] = params["deploy"]
        return cls.parse(values, where="the address")

    @property
    def is_run(self) -> bool:
        return self.of.startswith("run:")

    @property
    def link(self) -> str:
        """Query of an address that opens the page with this form."""
        target = "" if self.is_run else self.target
        parts = {"deploy": self.engine or "auto", "of": self.of, "target": target}
        more = {"version": self.version, "part": self.part.removeprefix(WHOLE)}
        return urlencode({k: v for k, v in (parts | more).items() if v})

    @property
    def command(self) -> str:
        """The equivalent command line."""
        kind, _, key = self.of.partition(":")
        of = [f"--{kind}", key.removeprefix(TYPE_PREFIX)]
        target = [] if self.is_run else ["--target", self.target]
        release = ["--engine-version", self.version] if self.version else []
        part = ["--part", self.part] if self.part not in ("", WHOLE) else []
        words = ["specdec", "export", *of, *part, *target, "--to", self.engine, *release]
        return shlex.join(words)

    def filled(self, log: RunLog, catalog: Catalog) -> ExportForm:
        """A copy with empty fields filled: the fastest run, a target, a method for it."""
        targets = [key for _, key in catalog.target_choices()]
        target = self.target if self.target in targets else targets[0]
        methods = [f"method:{key}" for _, key in catalog.method_choices(target)]
        of = self.of
        if not of and (runs := offered_runs(log)):
            of = runs[0][1]
        elif not of or (self.target and not self.is_run and of not in methods):
            of = f"method:{catalog.first_method(target, alone=True)}"
        is_default = self.engine in ENGINES and self.version == ENGINES[self.engine].default
        return self.replace(of=of, target=target, version="" if is_default else self.version)

    def source(self, log: RunLog, catalog: Catalog) -> ExportSource:
        """The method on its target. Raises ConfigError: no such run, method or target."""
        _, _, key = self.of.partition(":")
        if self.is_run:
            return run_source(log, key)
        method = catalog.method(key)
        return ExportSource(method.config, catalog.target(self.target).name, method.title)


@dataclass(frozen=True, slots=True)
class Exports:
    """A completed form, and the export of its method to each engine.

    Attributes:
        parts: titles and names of the parts of a combination, with the speedups measured here;
            empty for a single method.
        is_automatic: whether the part was chosen automatically, because no engine runs the whole.
        gguf: `gguf_warning`, which most engines share.
    """

    form: ExportForm
    source: ExportSource
    engines: tuple[Export, ...]
    parts: tuple[tuple[str, str], ...] = ()
    is_automatic: bool = False
    gguf: str = ""

    @property
    def selected(self) -> Export:
        return next(one for one in self.engines if one.engine == self.form.engine)


def exports_of(form: ExportForm, log: RunLog, catalog: Catalog) -> Exports:
    """The exports of a form. Of a combination that no engine runs, a part that one runs is taken.

    Raises ConfigError: no such run, method, target, part, engine or version.
    """
    form = form.filled(log, catalog)
    if form.version and not form.engine:
        form = form.replace(engine=next(iter(ENGINES)))
    if form.engine:
        find_engine(form.engine)
    whole = form.source(log, catalog)
    within = whole.config.nested()

    def exports_of_part(name: str) -> tuple[ExportSource, tuple[Export, ...]]:
        source = whole.part(name)
        return source, tuple(
            export_source(source, one, form.version * (one == form.engine), catalog.resolve)
            for one in ENGINES
        )

    names = (WHOLE, *within)
    supported = (n for n in names if not all(one.refusal for one in exports_of_part(n)[1]))
    name = form.part or next(supported, WHOLE)
    source, engines = exports_of_part(name)
    takers = [one.engine for one in engines if not one.refusal]
    engine = form.engine or next(iter([*takers, *ENGINES]))
    gains = _measured_here(log, whole.target) if within else {}

    def part_title(part: str) -> str:
        title = f"{within[part].title} alone" if part in within else "Both together"
        speedup = gains.get(whole.part(part).config.model_dump_json())
        return f"{title} · {formats.speedup(speedup)} plain, measured here" if speedup else title

    parts = tuple((part_title(part), part) for part in names) if within else ()
    filled = form.replace(part=name if within else "", engine=engine)
    gguf = gguf_warning(source, catalog.resolve)
    is_automatic = not form.part and name != WHOLE
    return Exports(filled, source, engines, parts, is_automatic, gguf)


def _measured_here(log: RunLog, target: str) -> dict[str, float]:
    """Speedups measured by experiments on a target, by configuration as JSON."""
    gains: dict[str, float] = {}
    for speedup, run in newest_speedups(log):
        if speedup and run.target == target:
            with suppress(ConfigError):
                gains[parse_method(run.method).model_dump_json()] = speedup
    return gains


def run_source(log: RunLog, run_id: str) -> ExportSource:
    """The method and target of a stored run.

    Raises ConfigError: there is no such run, or its method is unknown.
    """
    run = stored_run(log, run_id)
    config = parse_method(run.method, where=f"run {run_id}")
    return ExportSource(config, run.target, run.name or run.method_title, run.mat, run.tok_s)


def offered_runs(log: RunLog) -> list[tuple[str, str]]:
    """Title and `run:ID` of the runs in the menu: those of experiments, fastest first, then the
    newest single runs. Plain decoding is left out."""
    ranked = [(speedup or 0.0, run) for speedup, run in newest_speedups(log)]
    choices = [
        (_title(run, f"{formats.speedup(speedup)} plain" if speedup else ""), f"run:{run.id}")
        for speedup, run in sorted(ranked, key=lambda one: -one[0])
    ]
    for run in log.experiments.page(RunQuery(limit=RECENT)).rows:
        if isinstance(run, RunSummary) and run.decoding_type != PLAIN:
            figure = "" if run.tok_s is None else f"{formats.tok_s(run.tok_s)} tok/s"
            choices.append((_title(run, figure), f"run:{run.id}"))
    return choices[:RECENT]


def _title(run: RunSummary, figure: str) -> str:
    parts = (run.method_title, figure, run.target, f"{run.created_at.astimezone():%d %b %H:%M}")
    return " · ".join(filter(None, parts))


# ---- export


def export_source(
    source: ExportSource,
    engine: str,
    version: str = "",
    resolve: Resolve = presets.resolve,
) -> Export:
    """An engine's files for the method, or why it cannot run it.

    Raises ConfigError: no such engine, or an unknown version.
    """
    spec, warning = _spec_of(source.target, resolve), gguf_warning(source, resolve)

    def loadable_name(name: str) -> str:
        loaded = model_name(name, resolve)
        original = engine not in LOAD_GGUF and _is_gguf(name, resolve)
        return _original_weights(loaded) if original else loaded

    return export_method(
        source.config,
        find_engine(engine),
        target=loadable_name(source.target),
        version=version,
        resolve=loadable_name,
        notes=_target_notes(spec),
        hybrid=spec is not None and spec.recurrent,
        warnings=(warning,) if warning and engine not in LOAD_GGUF else (),
    )


def engines_of(source: ExportSource, resolve: Resolve = presets.resolve) -> tuple[str, str]:
    """Titles of the engines that run a method on its target as it is, and with losses."""
    exports = [export_source(source, engine, resolve=resolve) for engine in ENGINES]

    def titles(verdict: str) -> str:
        return ", ".join(ENGINES[one.engine].title for one in exports if one.verdict == verdict)

    return titles("exact"), titles("with losses")


def matrix(catalog: Catalog) -> list[tuple[str, list[Export]]]:
    """Every drafting method in the newest release of every engine, with default settings."""
    rows = []
    for name, cls in catalog.types.items():
        if name == PLAIN:
            continue
        config = cls.parse({})
        required = {"speculative_model": "DRAFTER", "max_draft_len": BLOCK_LEN}
        unset = {key: value for key, value in required.items() if getattr(config, key, "") is None}
        source = ExportSource(config.replace(**unset), "TARGET", cls.title)
        rows.append((cls.title, [export_source(source, engine) for engine in ENGINES]))
    return rows


def model_name(name: str, resolve: Resolve = presets.resolve) -> str:
    """The drafter's name for an engine: a shipped folder, a preset's hub id, or the name."""
    shipped = presets.locate(name)
    if shipped != name:
        return shipped
    spec = _spec_of(name, resolve)
    return name if spec is None else _loadable(spec)


def _spec_of(name: str, resolve: Resolve) -> TargetSpec | None:
    """The target of that name; None if it is unknown on this machine."""
    try:
        return resolve(name)
    except SourceError:
        return None


def _loadable(spec: TargetSpec) -> str:
    if spec.wheel is not None:
        return PurePath(spec.wheel.member).name
    return spec.hub or spec.path or spec.name


def _original_weights(gguf: str) -> str:
    """A placeholder for the original weights of a GGUF file.

    Example: models/qwen2.5-0.5b-instruct-q4_k_m.gguf: ORIGINAL_WEIGHTS/qwen2.5-0.5b-instruct.
    """
    stem = PurePath(gguf).name.removesuffix(".gguf")
    return "ORIGINAL_WEIGHTS/" + QUANTIZATION.sub("", stem)


def _target_notes(spec: TargetSpec | None) -> tuple[str, ...]:
    if spec is None:
        return ()
    target, notes = _loadable(spec), list[str]()
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


def gguf_warning(source: ExportSource, resolve: Resolve) -> str:
    """A warning for engines that cannot load GGUF files; empty without such weights."""
    models = {"target": source.target, "drafter": getattr(source.config, "speculative_model", None)}
    roles = [role for role, name in models.items() if name and _is_gguf(name, resolve)]
    if not roles:
        return ""
    are = "is a GGUF file" if len(roles) == 1 else "are GGUF files"
    return (
        f"The {' and the '.join(roles)} {are}, for llama.cpp and Ollama. For other engines, "
        "replace ORIGINAL_WEIGHTS/… by the model's original weights; they are quantized "
        "differently, so speed and acceptance differ."
    )


def _is_gguf(name: str, resolve: Resolve) -> bool:
    spec = _spec_of(name, resolve)
    file = spec is not None and spec.gguf_file is not None
    return file or model_name(name, resolve).endswith(".gguf")


def method_yaml(config: MethodConfig, engine: str) -> str:
    """A method file for `generate --method FILE.yaml` or `presets/methods`."""
    title = find_engine(engine).title
    values: Mapping[str, Any] = {
        "name": f"{config.decoding_type.lower().replace('_', '-')}-from-{engine}",
        "title": f"{type(config).title} from {title}",
        "config": {"decoding_type": config.decoding_type, **config.changed},
    }
    return yaml_block(values)
