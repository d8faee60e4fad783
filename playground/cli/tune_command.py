"""What `app.py tune` does: rank tables, trees fitted to them, latency curves."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

import presets
from engine.config import MethodConfig
from engine.drafters import parse_method
from engine.drafters.base import Workbench
from engine.errors import ConfigError, PlaygroundError
from engine.model.loading import load_target
from engine.model.sources import TargetSpec
from engine.model.target import Target
from engine.tuning.ranks import RankTable
from engine.tuning.watch import Watch
from playground.cli.tune_text import clock_lines, described, table_of
from playground.host import paths
from playground.trees.fitting import Fit, fit_trees, fit_yaml, stock_trees
from playground.trees.latency import known_clock, measure_clock
from playground.trees.tables import find_tables, load_table, make_table
from playground.web.method_choice import choose_method
from storage import RunLog, RunQuery, StorageError

EXIT_USER_ERROR = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterOptions:
    """Which method on which target, as given."""

    target: str | None
    method: str
    settings: tuple[str, ...]
    drafter: str | None
    dtype: str | None
    device: str
    db: str | None
    cache_dir: Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksOptions:
    """Options of `tune ranks`, as given."""

    drafter: DrafterOptions
    runs: tuple[str, ...]
    benchmark: str | None
    depths: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FitOptions:
    """Options of `tune fit`, as given."""

    table: str | None
    nodes: str
    max_depth: int | None
    max_width: int | None
    category: str | None
    held_out: int
    output: Path | None
    name: str | None
    prompts: str
    as_json: bool
    db: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyOptions:
    """Options of `tune latency`, as given."""

    drafter: DrafterOptions
    context_len: int
    again: bool
    as_json: bool


@contextmanager
def _errors_as_sentences() -> Iterator[None]:
    try:
        yield
    except (PlaygroundError, StorageError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(EXIT_USER_ERROR) from error
    except KeyboardInterrupt as error:
        typer.echo("Stopped; nothing was kept.", err=True)
        raise typer.Exit(130) from error


def run_ranks(options: RanksOptions) -> None:
    """Measure a rank table on stored texts and keep it in the log."""
    console = Console(stderr=True)
    with _errors_as_sentences(), ExitStack() as stack:
        log = _open(options.drafter.db, stack)
        config = _method(options.drafter)
        target_name, dtype = _made_with(log, options)
        bench = stack.enter_context(_bench(options.drafter, target_name, dtype, console))
        with _watch(console, f"Ranking with {config.decoding_type}") as watch:
            artifact_id, table = make_table(
                log,
                config,
                bench,
                run_ids=options.runs,
                benchmark_id=options.benchmark,
                depths=options.depths,
                watch=watch,
            )
    typer.echo("\n".join(described(table)))
    typer.echo(f"table {artifact_id}")


def run_fit(options: FitOptions) -> None:
    """Fit trees to a rank table, print what they bring, and write them as presets."""
    with _errors_as_sentences(), ExitStack() as stack:
        log = _open(options.db, stack)
        table = load_table(log, options.table or _newest_table(log))
        config = parse_method(table.about["method"])
        found = known_clock(log, config, target=table.about["target"], dtype=table.about["dtype"])
        clock = found[0] if found else None
        fits = fit_trees(
            table,
            config,
            _counts(options.nodes),
            max_depth=options.max_depth,
            max_width=options.max_width,
            category=options.category,
            held_out=options.held_out,
            clock=clock,
        )
        stock = stock_trees(
            table,
            config,
            presets.trees().values(),
            category=options.category,
            held_out=options.held_out,
            clock=clock,
        )
        if options.as_json:
            typer.echo(json.dumps([fit.row() for fit in (*fits, *stock)], indent=2))
        else:
            typer.echo("\n".join(table_of([*fits, *stock], options.held_out > 0, clock)))
        if options.output is not None:
            for file in _write(options.output, options.name, fits, table, options.prompts):
                typer.echo(f"wrote {file}", err=True)


def run_latency(options: LatencyOptions) -> None:
    """Measure the latency curves of a method on this machine and keep them in the log."""
    console = Console(stderr=True)
    with _errors_as_sentences(), ExitStack() as stack:
        log = _open(options.drafter.db, stack)
        config = _method(options.drafter)
        name = options.drafter.target or "smollm2-135m-instruct"
        bench = stack.enter_context(_bench(options.drafter, name, None, console))
        with _watch(console, "Measuring latency") as watch:
            clock = measure_clock(
                log,
                config,
                bench,
                context_len=options.context_len,
                again=options.again,
                watch=watch,
            )
    if options.as_json:
        verify, other = clock.verify.to_dict(), clock.other.to_dict()
        figures = {"verify": verify, "other": other, "draft": clock.draft.to_dict()}
        typer.echo(json.dumps(figures, indent=2))
    else:
        typer.echo("\n".join(clock_lines(clock)))


# ---- what they share


def _open(db: str | None, stack: ExitStack) -> RunLog:
    log = RunLog.open(db or str(paths.run_log()))
    stack.callback(log.close)
    return log


def _method(options: DrafterOptions) -> MethodConfig:
    return choose_method(options.method, options.settings, options.drafter)


def _made_with(log: RunLog, options: RanksOptions) -> tuple[str, str | None]:
    """Target and dtype of the texts, unless others are asked for."""
    if options.benchmark is not None:
        rows = log.find(RunQuery(benchmark_id=options.benchmark, limit=1)).rows
        run_id = rows[0].id if rows else None
    else:
        run_id = options.runs[0] if options.runs else None
    run = None if run_id is None else log.get(run_id)
    asked = options.drafter
    if run is None:
        return asked.target or "smollm2-135m-instruct", asked.dtype
    return asked.target or run.target, asked.dtype or run.dtype or None


@contextmanager
def _bench(
    options: DrafterOptions, target: str, dtype: str | None, console: Console
) -> Iterator[Workbench]:
    """A loaded target, and how to load what drafts for it; all freed in the end."""
    cache_dir = options.cache_dir or paths.cache_dir()
    loaded: list[Target] = []

    def load(spec: TargetSpec, kind: str) -> Target:
        with console.status(f"Loading {spec.name} …"):
            loaded.append(load_target(spec, dtype=kind, device=options.device, cache_dir=cache_dir))
        return loaded[-1]

    try:
        model = load(presets.resolve(target), options.dtype or dtype or "auto")
        companions: dict[str, Target] = {}

        def companion(spec: TargetSpec) -> Target:
            if spec.name not in companions:
                companions[spec.name] = load(spec, model.companion_dtype)
            return companions[spec.name]

        yield Workbench(model, presets.resolve, companion, locate=presets.locate)
    finally:
        for one in loaded:
            one.close()


@contextmanager
def _watch(console: Console, title: str) -> Iterator[Watch]:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(title, total=1.0)
        yield Watch(lambda fraction: progress.update(task, completed=fraction))


def _counts(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(f"--nodes must be like 8,16,32, got {text!r:.80}.") from error


def _newest_table(log: RunLog) -> str:
    found = find_tables(log)
    if not found:
        raise ConfigError("The log has no rank table. Measure one first: app.py tune ranks.")
    return found[0].id


def _write(
    output: Path, name: str | None, fits: Sequence[Fit], table: RankTable, prompts: str
) -> list[Path]:
    """One preset file per fitted size."""
    method = str(table.about["decoding_type"]).lower()
    stem = name or f"{Path(str(table.about['target'])).name.lower()}-{method}"
    files = []
    try:
        output.mkdir(parents=True, exist_ok=True)
        for fit in fits:
            files.append(output / f"{stem}-{len(fit.tree)}.yaml")
            text = fit_yaml(fit, files[-1].stem, table, prompts)
            files[-1].write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output: {output} cannot be written: {error.strerror}.") from error
    return files
