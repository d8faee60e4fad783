"""`specdec export` and `specdec import`: configs of other engines, out and in."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import ConfigError
from engine.safe_text import read_text
from playground.cli.options import (
    METHOD_HELP,
    REQUIRED,
    LogOptions,
    MethodOptions,
    argument,
    command,
    option,
)
from playground.cli.streams import echo, note, read_stdin, write_files, write_output

if TYPE_CHECKING:
    from playground.export import ExportSource

NAMES = "trtllm, vllm, sglang, triton, llamacpp, transformers, mlx or ollama."


@dataclass(kw_only=True)
class ExportOptions(LogOptions, MethodOptions):
    to: str = option(REQUIRED, NAMES)
    run: str | None = option(None, "Run of the log: its method and target.", metavar="ID")
    method: str = option("", METHOD_HELP)
    target: str | None = option(
        None, "Target: preset, path or hub id; default: the run's or method's."
    )
    part: str = option(
        "whole", "Of a combination, one of its methods: retrieval or model.", metavar="PART"
    )
    engine_version: str = option("", "Release of the engine; default: the newest stable one known.")
    output: Path | None = option(None, "Write the files here.", metavar="DIR")


@dataclass(kw_only=True)
class ImportOptions:
    file: str = argument(REQUIRED, "The config; - reads it from stdin.")
    source: str = option(REQUIRED, NAMES, "--from")
    output: Path | None = option(None, "Write the method here.", metavar="FILE.yaml")


@command(ExportOptions)
def export(options: ExportOptions) -> None:
    """Write the config of another engine for a method, and report what is lost."""
    from playground.deploy import find_engine
    from playground.export import export_source

    engine = find_engine(options.to)
    exported = export_source(
        _source(options).part(options.part), options.to, options.engine_version
    )
    if exported.refusal:
        nearest = f" Nearest: {exported.nearest}" if exported.nearest else ""
        raise ConfigError(f"{exported.refusal}{nearest}")
    if options.output is not None:
        for path in write_files(options.output, exported.files):
            echo(str(path))
    else:
        for name, text in exported.files.items():
            head = f"# ---- {name}\n" if len(exported.files) > 1 else ""
            write_output(head + text.removesuffix("\n") + "\n", None)
    note(f"{engine.title} {exported.version}: {exported.verdict}")
    for kind, sentences in (("warning", exported.warnings), ("note", exported.notes)):
        for sentence in sentences:
            note(f"{kind}: {sentence}")


def _source(options: ExportOptions) -> ExportSource:
    """The method on its target, from a run or from the command line."""
    import presets
    from playground.export import ExportSource, run_source

    if options.run is not None and not options.method:
        if options.settings or options.drafter is not None:
            raise ConfigError("--set and --drafter change a --method; a run is exported as it was.")
        with options.open_log() as log:
            source = run_source(log, options.run)
        return dataclasses.replace(source, target=options.target or source.target)
    if not options.method or options.run is not None:
        raise ConfigError("Give either --run ID or --method METHOD.")
    config = options.config()
    preset = presets.methods().get(options.method)
    made_for = preset.target if preset is not None else None
    target = options.target or made_for or next(iter(presets.targets()))
    return ExportSource(config, target, type(config).title)


@command(ImportOptions)
def import_(options: ImportOptions) -> None:
    """Read another engine's config as a method file for `generate --method`."""
    from playground.export import method_yaml
    from playground.host.methods import read_method

    text = read_stdin() if options.file == "-" else read_text(Path(options.file))
    config, remarks = read_method(text, options.source)
    write_output(method_yaml(config, options.source), options.output)
    for line in remarks:
        note(line)
