"""`specdec export` and `specdec import`: configs of other engines, out and in."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import presets
from engine.errors import ConfigError
from engine.safe_text import read_text
from playground.cli.commands import ExportOptions, ImportOptions
from playground.cli.inputs import open_log
from playground.cli.loading import method_of
from playground.cli.streams import echo, note, read_stdin, write_files, write_output
from playground.deploy import find_engine
from playground.export import ExportSource, export_source, method_yaml, run_source
from playground.host.methods import read_method


def export(options: ExportOptions) -> None:
    """Write the config of another engine for a method, and report what is lost."""
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
    if options.run is not None and not options.method:
        if options.settings or options.drafter is not None:
            raise ConfigError("--set and --drafter change a --method; a run is exported as it was.")
        with open_log(options) as log:
            source = run_source(log, options.run)
        return dataclasses.replace(source, target=options.target or source.target)
    if not options.method or options.run is not None:
        raise ConfigError("Give either --run ID or --method METHOD.")
    config = method_of(options)
    preset = presets.methods().get(options.method)
    made_for = preset.target if preset is not None else None
    target = options.target or made_for or next(iter(presets.targets()))
    return ExportSource(config, target, type(config).title)


def import_(options: ImportOptions) -> None:
    """Read another engine's config as a method file for `generate --method`."""
    text = read_stdin() if options.file == "-" else read_text(Path(options.file))
    config, remarks = read_method(text, options.source)
    write_output(method_yaml(config, options.source), options.output)
    for line in remarks:
        note(line)
