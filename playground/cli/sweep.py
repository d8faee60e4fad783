"""What `app.py sweep` does: run or go on with a sweep, and print what it found."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Table

import presets
from engine.config import Limits, Sampling
from engine.drafters.method import MethodConfig
from engine.errors import ConfigError, PlaygroundError
from engine.model.sources import TargetSpec
from playground.cli.bench import LoadedBench, time_left
from playground.experiments.bench.suites import choose_items, choose_suite
from playground.experiments.sweeps import session
from playground.experiments.sweeps.fields import shown
from playground.experiments.sweeps.measure import measure_on
from playground.experiments.sweeps.plan import Objective, SweepPlan
from playground.experiments.sweeps.report import about, preset_yaml, state_of
from playground.experiments.sweeps.run import SweepProgress, run_sweep
from playground.experiments.sweeps.space import Space, parse_vary
from playground.experiments.sweeps.store import Status, Sweep, SweepStore
from playground.host import paths
from playground.host.methods import choose_method
from playground.host.models import Models
from storage import RunLog, StorageError

EXIT_USER_ERROR = 2
EXIT_STOPPED = 130
DASH = "–"
WIDE = 160


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepOptions:
    """Options of `sweep`, as given."""

    target: str
    method: str | None
    settings: tuple[str, ...]
    drafter: str | None
    vary: tuple[str, ...]
    grid: bool
    trials: int | None
    objective: str
    prune: bool
    suites: tuple[str, ...]
    categories: tuple[str, ...]
    limit_per_category: int
    repeats: int
    sampling: Mapping[str, Any]
    limits: Mapping[str, Any]
    dtype: str
    device: str
    name: str
    resume: str | None
    output: Path | None
    as_json: bool
    db: str | None
    cache_dir: Path | None


DEFAULT_TRIALS = 20


def run_sweep_command(options: SweepOptions) -> None:
    """Run or go on with a sweep. Ctrl+C ends it; `--resume` goes on from the same answer."""
    console = Console(stderr=True)
    try:
        with ExitStack() as stack:
            status = _run(options, console, stack)
    except (PlaygroundError, StorageError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(EXIT_USER_ERROR) from error
    if status == "stopped":
        raise typer.Exit(EXIT_STOPPED)


def _run(options: SweepOptions, console: Console, stack: ExitStack) -> Status:
    log = RunLog.open(options.db or str(paths.run_log()))
    stack.callback(log.close)
    store = SweepStore.beside(log)
    stack.callback(store.close)
    begun = session.reopen(store, options.resume, options.trials) if options.resume else None
    plan = plan_of(options) if begun is None else begun.plan
    models = Models(
        cache_dir=options.cache_dir or paths.cache_dir(),
        device=options.device,
        resolve=presets.resolve,
    )
    stack.callback(models.close)
    with console.status("loading") as status:
        tell = cast(Any, status.update)
        target = models.target(plan.target, plan.dtype, lambda words, _: tell(words))
    sweep = session.begin(store, plan, options.name) if begun is None else begun
    session.check_target(sweep, target)
    console.print(f"sweep {sweep.name}: {about(sweep.plan)}", highlight=False)
    measure = measure_on(LoadedBench(target, models), log, sweep.plan)
    ended: Status = "stopped"
    with _bar(console) as show:
        try:
            ended = run_sweep(sweep, measure, tell=show)
        except KeyboardInterrupt:
            pass
    _show(options, sweep, console)
    if ended == "stopped":
        console.print(f"Stopped. Go on with: app.py sweep --resume {sweep.name}", highlight=False)
    return ended


def plan_of(options: SweepOptions) -> SweepPlan:
    """The plan that the options ask for.

    Raises:
        ConfigError: naming the option that is wrong.
    """
    if options.grid and options.trials is not None:
        raise ConfigError("--grid measures all combinations, so it takes no --trials. Drop one.")
    if not options.method or not options.vary:
        raise ConfigError(
            "Say what to sweep, such as --method ngram --vary max_draft_len=1:16, or go on with a "
            "sweep by --resume NAME."
        )
    base = choose_method(options.method, options.settings, options.drafter)
    known = presets.suites()
    items = choose_items(
        [choose_suite(name, known) for name in options.suites],
        categories=options.categories,
        limit_per_category=options.limit_per_category,
    )
    plan = SweepPlan(
        target=_target_spec(options.target),
        dtype=options.dtype,
        method=options.method,
        title=_title(options.method, base),
        space=Space(base, [parse_vary(text) for text in options.vary]),
        objective=cast(Objective, options.objective),
        mode="grid" if options.grid else "search",
        trials=DEFAULT_TRIALS if options.trials is None else options.trials,
        prune=options.prune,
        seed=int(options.sampling["seed"]),
        items=items,
        suite=" + ".join(options.suites),
        repeats=options.repeats,
        sampling=Sampling.parse(options.sampling),
        limits=Limits.parse(options.limits),
    )
    plan.check()
    return plan


def _target_spec(name: str) -> TargetSpec:
    """With an absolute path, so that a resume finds it from any folder."""
    spec = presets.resolve(name)
    return spec if spec.path is None else spec.replace(path=str(Path(spec.path).absolute()))


def _title(name: str, config: MethodConfig) -> str:
    preset = presets.methods().get(name)
    return type(config).title if preset is None else preset.title


@contextmanager
def _bar(console: Console) -> Iterator[Callable[[SweepProgress], None]]:
    """A progress bar over the trials, with the time that is left."""
    columns = (
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
        TextColumn("{task.description}"),
    )
    with Bar(*columns, console=console) as bar:
        task = bar.add_task("", left="")

        def show(progress: SweepProgress) -> None:
            point = "" if progress.point is None else _point(progress.point)
            words = progress.words
            if progress.num_pairs:
                words = f"{progress.num_pairs} of {progress.of_pairs} answered"
            bar.update(
                task,
                total=progress.num_trials,
                completed=progress.num_done,
                left=time_left(progress.eta_s),
                description=" · ".join(filter(None, (point, words))),
            )

        yield show


def _point(point: Mapping[str, Any]) -> str:
    return ", ".join(f"{field} {shown(value)}" for field, value in point.items())


def _show(options: SweepOptions, sweep: Sweep, console: Console) -> None:
    state = state_of(sweep)
    if options.as_json:
        typer.echo(json.dumps(state, ensure_ascii=False, indent=1))
    else:
        out = Console()
        if not out.is_terminal:
            out = Console(width=WIDE)
        out.print(trials_table(state))
        out.print(state["verdict"] or "Nothing was measured.", highlight=False)
    if options.output is not None and state["best"] is not None:
        _write(options.output, preset_yaml(sweep))
        console.print(f"wrote {options.output}: use it with --method {options.output}")


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output: {path} cannot be written: {error.strerror}.") from error


def trials_table(state: Mapping[str, Any]) -> Table:
    """Every trial, the best first."""
    table = Table(title=f"Sweep {state['name']}", title_justify="left", box=box.SIMPLE_HEAD)
    titles = ["trial", *state["fields"], state["objective"]["title"], "speedup", "MAT", "same"]
    for title in dict.fromkeys(titles):
        table.add_column(title, justify="right")
    table.add_column("")
    for row in sorted(state["trials"], key=_by_value, reverse=True):
        table.add_row(*_cells(state, row))
    return table


def _by_value(row: Mapping[str, Any]) -> tuple[bool, float]:
    measured = row["outcome"] == "measured"
    return measured, row["figures"]["value"] if row["figures"] else float("-inf")


def _cells(state: Mapping[str, Any], row: Mapping[str, Any]) -> list[str]:
    figures = row["figures"] or {}
    names = ["value", "speedup", "mat"]
    if state["objective"]["key"] in ("speedup", "mat"):
        names.remove(state["objective"]["key"])
    same = f"{figures['num_same']}/{figures['num_prompts']}" if figures else DASH
    end = "" if row["outcome"] == "measured" else row["reason"] or row["outcome"]
    if row["number"] == state["best"] or row["number"] in state["as_good"]:
        end = "best" if row["number"] == state["best"] else "as good within the noise"
    return [
        str(row["number"]),
        *(shown(row["point"].get(field)) for field in state["fields"]),
        *(DASH if figures.get(name) is None else f"{figures[name]:.2f}" for name in names),
        same,
        end,
    ]
