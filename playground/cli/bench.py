"""`specdec bench`: run suites on configurations, print the tables, write the files."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import typer

import presets
from engine.errors import ConfigError
from playground.cli.commands import BenchOptions
from playground.cli.inputs import limits_of, log_url, sampling_of, split_list
from playground.cli.loading import loaded_models
from playground.cli.options import ExperimentOptions
from playground.cli.streams import (
    EXIT_INTERRUPTED,
    note,
    until_interrupt,
    write_files,
    write_output,
)
from playground.cli.tables import tables
from playground.cli.terminal import Terminal, plain, print_wide, progress_bar
from playground.experiments.cluster import PoolConfig, Workers, workers
from playground.experiments.experiment import Experiment
from playground.experiments.measurement import Progress, Summary
from playground.experiments.plan import Configuration, ExperimentPlan
from playground.experiments.prompts import choose_items, find_suite
from playground.experiments.report.export import FILES, genai_perf_files, json_text, speedup_csv
from playground.experiments.report.report import read_results, stored_experiment
from playground.experiments.worker import WorkerConfig
from playground.host.methods import choose_method
from playground.host.task import time_left
from storage import RunLog

MAX_SKIPPED = 10


def bench(options: BenchOptions) -> None:
    """Measure methods against plain decoding over suites of prompts, one request at a time."""
    if options.resume and not options.save:
        raise ConfigError("--resume needs the log, which --no-save switches off. Drop one of them.")
    if options.ray and not options.save:
        raise ConfigError("--ray needs a run log that its workers can reach. Drop --no-save.")
    url = log_url(options) if options.save else None
    with RunLog.open(url) as log:
        resumed = options.resume
        plan = stored_experiment(log, resumed)[1].runnable if resumed else plan_of(options)
        experiment = Experiment(log, plan, benchmark_id=resumed)

        def heading(here: Mapping[str, Any]) -> str:
            how = "greedy" if plan.sampling.greedy else f"temperature {plan.sampling.temperature:g}"
            device = f"{here['target']} · {here['dtype']} · {here['device_name']}"
            return (
                f"{device} · {how} · concurrency 1\n"
                f"{plan.extent}: {', '.join(c.name for c in plan.configurations)}"
                + (f"\nbenchmark {experiment.id}" if options.save else "")
            )

        summary = run_experiment(options, experiment, heading, resume=resumed is not None)
        _print_report(options, log, experiment.id, summary)
    if summary.cancelled:
        raise typer.Exit(EXIT_INTERRUPTED)


def _print_report(options: BenchOptions, log: RunLog, benchmark_id: str, summary: Summary) -> None:
    results = read_results(log, benchmark_id)
    if options.as_json:
        write_output(json_text(results) + "\n", None)
    else:
        print_wide(*tables(results.report))
    for name, notes in summary.notes.items():
        note(f"{name}: {' '.join(notes)}")
    for skip in summary.skipped[:MAX_SKIPPED]:
        where = f"{skip.suite} {skip.prompt}, turn {skip.turn + 1}"
        note(f"left out: {where}: {skip.reason}")
    if summary.num_failed:
        note(f"{summary.num_failed} requests failed; the log has their errors.")
    paths = []
    if options.csv is not None:
        paths += write_files(options.csv.parent, {options.csv.name: speedup_csv(results)})
    if options.output is not None:
        texts = {name: text_of(results) for name, text_of in FILES.items()}
        paths += write_files(options.output, texts | genai_perf_files(results))
    for path in paths:
        note(f"wrote {path}")
    if summary.cancelled and options.save:
        note(f"Stopped. Resume with: specdec bench --resume {benchmark_id}")


def configurations_of(
    methods: Sequence[str], settings: Sequence[str] = ()
) -> tuple[Configuration, ...]:
    """Configurations by the names of their methods.

    Args:
        methods: `preset`, `FILE.yaml` or decoding type, then `field=value …` and `name=…`,
            separated by spaces.
        settings: `field=value` for every method.

    Raises ConfigError: an unknown method or field.
    """
    configurations = []
    for name, method, inline in map(_spec, methods):
        config = choose_method(method, [*inline, *settings], report=note)
        preset = presets.methods().get(method)
        title = type(config).title
        if preset is not None and name == method:
            title = preset.title
        elif name != config.decoding_type:
            title = f"{title}: {name}"
        configurations.append(Configuration(name, title, config))
    return tuple(configurations)


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


def plan_of(options: BenchOptions) -> ExperimentPlan:
    """Raises ConfigError: naming the option that is wrong."""
    methods = [*split_list(options.methods), *options.method]
    configurations = configurations_of(methods, options.settings)
    return ExperimentPlan.parse({**shared_plan(options), "configurations": configurations})


def shared_plan(options: ExperimentOptions) -> dict[str, Any]:
    """The part of a plan that these options make.

    Raises ConfigError: a suite or category that is not there.
    """
    target = presets.resolve(options.target)
    if target.path is not None:  # so that a resume finds it from any folder
        target = target.replace(path=str(Path(target.path).absolute()))
    return {
        "target": target,
        "dtype": options.dtype,
        "items": choose_items(
            [find_suite(name) for name in options.suites],
            categories=split_list(options.categories),
            limit_per_category=options.limit_per_category,
        ),
        "repeats": options.repeats,
        "sampling": sampling_of(options),
        "limits": limits_of(options),
    }


# ---- running


@contextmanager
def ray_workers(options: ExperimentOptions, experiment: Experiment) -> Iterator[Workers | None]:
    """Ray workers with the target loaded; None without Ray.

    Meanwhile, standard output goes to standard error, because Ray prints to it.

    Raises ConfigError: options of workers without --ray.
    """
    own, plan = (options.workers, options.worker_cpus, options.worker_gpus), experiment.plan
    if options.ray is None:
        if any(value is not None for value in own):
            raise ConfigError("--workers, --worker-cpus and --worker-gpus need --ray ADDRESS.")
        yield None
        return
    pool = PoolConfig(options.ray, *own)
    config = WorkerConfig(
        plan.target, plan.dtype, log_url(options), options.device, options.cache_dir
    )
    with ExitStack() as stack:
        stack.enter_context(redirect_stdout(sys.stderr))
        with Terminal(stderr=True).status(plain(f"starting workers with {plan.target.name}")):
            running = stack.enter_context(workers(pool, config))
        for name, device, _ in running.rows():
            note(f"worker {name}: {device}")
        yield running


def run_experiment(
    options: ExperimentOptions,
    experiment: Experiment,
    heading: Callable[[Mapping[str, Any]], str],
    *,
    resume: bool,
) -> Summary:
    """Load the target or start workers, measure an experiment, and free them again.

    Args:
        heading: makes the text printed at the start from the environment.
    """
    plan = experiment.plan
    with ExitStack() as stack:
        measure: Callable[[], Summary]
        if (workers := stack.enter_context(ray_workers(options, experiment))) is not None:
            here, measure = workers.environment, partial(experiment.measure_on, workers)
        else:
            models = stack.enter_context(loaded_models(options, plan.target, plan.dtype))
            bench = models.build_context()
            here, measure = bench.target.environment(), partial(experiment.measure, bench)
        if resume:
            experiment.check_target(here)
            experiment.resume()
        else:
            experiment.begin(options.name)
        note(heading(here))
        with until_interrupt() as stopped, progress_bar(Terminal(stderr=True)) as bar:

            def show(progress: Progress) -> None:
                failed = f", {progress.num_failed} failed" if progress.num_failed else ""
                note = f"{time_left(progress.eta_s)} {progress.message}{failed}"
                bar(progress.num_done, total=progress.num_planned, note=note.strip())

            experiment.on_progress, experiment.interrupted = show, stopped
            return experiment.run(measure)
