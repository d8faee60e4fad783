"""What `app.py bench` does: run suites on configurations, print the tables, write the files."""

from __future__ import annotations

import shlex
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

import presets
from engine.config import Limits, Sampling
from engine.drafters.base import Drafter
from engine.drafters.method import MethodConfig
from engine.errors import ConfigError, PlaygroundError
from engine.model.sources import TargetSpec
from engine.model.target import Target
from playground.experiments.bench import session
from playground.experiments.bench.export import json_text, speedup_csv, write_files
from playground.experiments.bench.plan import Configuration, Plan, make_plan
from playground.experiments.bench.progress import Outcome, Progress, time_left
from playground.experiments.bench.suites import choose_items, choose_suite
from playground.experiments.bench.text_tables import WIDE, tables
from playground.host import paths
from playground.host.methods import choose_method
from playground.host.models import Models
from storage import RunLog, StorageError

__all__ = ["BenchOptions", "LoadedBench", "configurations_of", "run_bench", "time_left"]
EXIT_USER_ERROR = 2
EXIT_STOPPED = 130


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """Options of `bench`, as given."""

    target: str
    methods: tuple[str, ...]
    settings: tuple[str, ...]
    suites: tuple[str, ...]
    categories: tuple[str, ...]
    limit_per_category: int | None
    repeats: int
    sampling: Mapping[str, Any]
    limits: Mapping[str, Any]
    dtype: str
    device: str
    name: str
    resume: str | None
    output: Path | None
    as_json: bool
    as_csv: bool
    save: bool
    db: str | None
    cache_dir: Path | None


@dataclass(frozen=True, slots=True)
class LoadedBench:
    """A target in memory, and drafters for it."""

    target: Target
    models: Models

    def new_drafter(self, config: MethodConfig) -> Drafter:
        return self.models.new_drafter(config)


def run_bench(options: BenchOptions) -> None:
    """Run or go on with a benchmark. Ctrl+C ends it after the running step; `--resume` goes on."""
    console = Console(stderr=True)
    try:
        with ExitStack() as stack:
            log = _open_log(options, stack)
            outcome = _run(options, log, console, stack)
    except (PlaygroundError, StorageError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(EXIT_USER_ERROR) from error
    if outcome.cancelled:
        raise typer.Exit(EXIT_STOPPED)


def _open_log(options: BenchOptions, stack: ExitStack) -> RunLog:
    if options.resume and not options.save:
        raise ConfigError("--resume needs the log that --no-save would not keep. Drop one of them.")
    log = RunLog.open((options.db or str(paths.run_log())) if options.save else None)
    stack.callback(log.close)
    return log


def _run(options: BenchOptions, log: RunLog, console: Console, stack: ExitStack) -> Outcome:
    plan = session.plan_to_resume(log, options.resume) if options.resume else _new_plan(options)
    models = Models(
        cache_dir=options.cache_dir or paths.cache_dir(),
        device=options.device,
        resolve=presets.resolve,
    )
    stack.callback(models.close)
    with console.status("loading") as status:
        target = models.target(plan.target, plan.dtype, lambda words, _: status.update(words))
    if options.resume:
        then = session.environment_of(log, options.resume)
        session.check_same_target({"environment": then}, target)
        benchmark_id = log.benchmarks.resume(options.resume).id
    else:
        benchmark_id = session.begin(log, plan, options.name)
    _announce(plan, target, benchmark_id, options, console)
    bench = LoadedBench(target, models)
    with _until_interrupt() as stopped, _bar(console) as tell:
        outcome = session.conduct(plan, bench, log, benchmark_id, tell=tell, cancelled=stopped)
    _show(options, log, benchmark_id, outcome, console)
    return outcome


def _new_plan(options: BenchOptions) -> Plan:
    known = presets.suites()
    suites = [choose_suite(name, known) for name in options.suites]
    items = choose_items(
        suites,
        categories=options.categories,
        limit_per_category=options.limit_per_category,
    )
    return make_plan(
        _target_spec(options.target),
        options.dtype,
        configurations_of(options.methods, options.settings),
        items,
        repeats=options.repeats,
        sampling=Sampling.parse(options.sampling),
        limits=Limits.parse(options.limits),
    )


def _target_spec(name: str) -> TargetSpec:
    """With an absolute path, so that a resume finds it from any folder."""
    spec = presets.resolve(name)
    return spec if spec.path is None else spec.replace(path=str(Path(spec.path).absolute()))


def configurations_of(
    methods: Sequence[str], settings: Sequence[str] = ()
) -> tuple[Configuration, ...]:
    """Configurations from the command line.

    Args:
        methods: `preset`, `FILE.yaml` or decoding type, then `field=value …` and `name=…`, parted
            by spaces.
        settings: `field=value` for every method, `NAME.field=value` for the one of that name.

    Raises:
        ConfigError: an unknown method, field or name.
    """
    specs = [_spec(text) for text in methods]
    names = {name for name, _, _ in specs}
    found = []
    for name, method, inline in specs:
        mine = [s for text in settings if (s := _setting_for(name, names, text)) is not None]
        config = choose_method(method, [*inline, *mine])
        preset = presets.methods().get(method)
        title = preset.title if preset is not None and name == method else ""
        found.append(Configuration(name, title or _title(name, config), config))
    return tuple(found)


def _title(name: str, config: MethodConfig) -> str:
    kind = type(config).title
    return kind if name == config.decoding_type else f"{kind}: {name}"


def _spec(text: str) -> tuple[str, str, list[str]]:
    """Name, method and settings of `method field=value … name=…`."""
    try:
        method, *inline = shlex.split(text)
    except ValueError as error:
        raise ConfigError(
            f"--method takes a method and field=value …, got {text!r:.80}."
        ) from error
    names = [item.removeprefix("name=") for item in inline if item.startswith("name=")]
    stem = Path(method).stem if method.endswith((".yaml", ".yml")) else method
    return (names or [stem])[-1], method, [i for i in inline if not i.startswith("name=")]


def _setting_for(name: str, names: set[str], text: str) -> str | None:
    """The setting without its configuration's name; None if it is meant for another one."""
    key, equals, value = text.partition("=")
    whose, _, field = key.rpartition(".")
    if not whose:
        return text
    if whose not in names:
        raise ConfigError(
            f"--set {text!r:.60}: no configuration is named {whose!r}; there are "
            f"{', '.join(sorted(names)) or 'none'}."
        )
    return f"{field}{equals}{value}" if whose == name else None


def _announce(
    plan: Plan, target: Target, benchmark_id: str, options: BenchOptions, console: Console
) -> None:
    names = ", ".join(c.name for c in plan.configurations)
    how = "greedy" if plan.sampling.greedy else f"temperature {plan.sampling.temperature:g}"
    console.print(
        f"{target.name} · {target.dtype_name} · {target.device_name} · {how} · concurrency 1\n"
        f"{len(plan.items)} prompts × {len(plan.configurations)} configurations ({names}) × "
        f"{plan.repeats} repeats = {plan.num_requests} requests",
        highlight=False,
    )
    if options.save:
        console.print(f"benchmark {benchmark_id}", highlight=False)


@contextmanager
def _until_interrupt() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl+C was pressed; a second time ends the program at once."""
    asked = threading.Event()

    def interrupt(number: int, frame: Any) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return
    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield asked.is_set
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _bar(console: Console) -> Iterator[Callable[[Progress], None]]:
    """A progress bar with the time that is left."""
    columns = (
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
        TextColumn("{task.description}"),
    )
    with Bar(*columns, console=console) as bar:
        task = bar.add_task("", left="")

        def tell(progress: Progress) -> None:
            failed = f", {progress.num_failed} failed" if progress.num_failed else ""
            bar.update(
                task,
                total=progress.num_requests,
                completed=progress.num_past,
                left=time_left(progress.eta_s),
                description=progress.words + failed,
            )

        yield tell


def _show(
    options: BenchOptions, log: RunLog, benchmark_id: str, outcome: Outcome, console: Console
) -> None:
    results = session.read_results(log, benchmark_id)
    if options.as_json:
        typer.echo(json_text(results))
    elif options.as_csv:
        typer.echo(speedup_csv(results), nl=False)
    else:
        out = Console()
        if not out.is_terminal:
            out = Console(width=WIDE)
        for table in tables(results.report):
            out.print(table)
    for skip in outcome.skipped[:10]:
        console.print(
            f"left out: {skip.suite} {skip.prompt}, turn {skip.turn + 1}: {skip.reason}",
            highlight=False,
        )
    if outcome.num_failed:
        console.print(f"{outcome.num_failed} requests failed; the log has their errors.")
    if options.output is not None:
        for path in write_files(results, options.output):
            console.print(f"wrote {path}", highlight=False)
    if outcome.cancelled and options.save:
        console.print(f"Stopped. Go on with: app.py bench --resume {benchmark_id}", highlight=False)
