"""What `app.py export` and `app.py import` do: configs of other engines, out and in."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import typer

import presets
from engine.errors import ConfigError, PlaygroundError
from engine.interop import find_engine
from engine.interop.handoff import Export, Imported
from playground.host import paths
from playground.host.methods import choose_method
from playground.host.request import read_run_id
from playground.web.deploying import Handed, hand_over, method_yaml, of_run, read_config
from storage import RunLog, StorageError

EXIT_USER_ERROR = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """Options of `export`, as given."""

    run: str | None
    method: str | None
    settings: tuple[str, ...]
    drafter: str | None
    target: str | None
    to: str
    engine_version: str | None
    output: Path | None
    db: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportOptions:
    """Options of `import`, as given."""

    file: str
    source: str
    output: Path | None


@contextmanager
def _errors_as_sentences() -> Iterator[None]:
    """Our own errors end the command with one line on stderr."""
    try:
        yield
    except (PlaygroundError, StorageError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(EXIT_USER_ERROR) from error


def run_export(options: ExportOptions) -> None:
    """Print or write the files; what is lost, and what to know, goes to stderr."""
    with _errors_as_sentences():
        engine = find_engine(options.to)
        export = hand_over(_handed(options), options.to, options.engine_version)
        if export.refusal:
            nearest = f" Nearest: {export.nearest}" if export.nearest else ""
            raise ConfigError(f"{export.refusal}{nearest}")
        if options.output is not None:
            _write(export, options.output)
        else:
            _print(export)
    typer.echo(f"{engine.title} {export.version}: {export.verdict}", err=True)
    for kind, sentences in (("warning", export.warnings), ("note", export.notes)):
        for sentence in sentences:
            typer.echo(f"{kind}: {sentence}", err=True)


def _handed(options: ExportOptions) -> Handed:
    """The method on its target, from a run or from the command line."""
    if (options.run is None) == (options.method is None):
        raise ConfigError("Give either --run ID or --method METHOD.")
    if options.run is None:
        assert options.method is not None
        config = choose_method(options.method, options.settings, options.drafter)
        return Handed(config, options.target or _target_of(options.method), type(config).title)
    if options.settings or options.drafter is not None:
        raise ConfigError("--set and --drafter change a --method; a run is exported as it was.")
    with closing(RunLog.open(options.db or str(paths.run_log()))) as log:
        handed = of_run(log, read_run_id(options.run))
    return dataclasses.replace(handed, target=options.target or handed.target)


def _target_of(method: str) -> str:
    """The target that a method preset was made for, else the embedded one."""
    preset = presets.methods().get(method)
    return next(iter(presets.targets())) if preset is None or not preset.target else preset.target


def _print(export: Export) -> None:
    """All files, each under its name if there are several."""
    for file in export.files:
        if len(export.files) > 1:
            typer.echo(f"# ---- {file.name}")
        typer.echo(file.text, nl=not file.text.endswith("\n"))


def _write(export: Export, folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file in export.files:
            (folder / file.name).write_text(file.text, encoding="utf-8")
            typer.echo(str(folder / file.name))
    except OSError as error:
        raise ConfigError(f"--output: {folder} cannot be written: {error.strerror}.") from error


def run_import(options: ImportOptions) -> None:
    """Print or write the method's YAML; what was ignored goes to stderr."""
    with _errors_as_sentences():
        found = read_config(options.source, _read(options.file))
        text = method_yaml(found.config, options.source)
        if options.output is None:
            typer.echo(text, nl=False)
        else:
            try:
                options.output.parent.mkdir(parents=True, exist_ok=True)
                options.output.write_text(text, encoding="utf-8")
            except OSError as error:
                raise ConfigError(
                    f"--output: {options.output} cannot be written: {error.strerror}."
                ) from error
            typer.echo(str(options.output))
    for line in remarks(found):
        typer.echo(line, err=True)


def remarks(found: Imported) -> list[str]:
    """What a person should know of how a config was read, one line each."""
    lines = [f"note: {note}" for note in found.notes]
    if found.target is not None:
        lines.insert(0, f"note: It served {found.target}.")
    lines += [f"ignored: {key} has no meaning here." for key in found.ignored]
    return lines + [f"unknown: {key} is no setting of that engine." for key in found.unknown]


def _read(name: str) -> str:
    try:
        return sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name} could not be read: {error}.") from error
