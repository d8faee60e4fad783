"""`specdec bench`: run suites on configurations, print the tables, write the files."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from playground.cli.options import (
    LogOptions,
    SamplingOptions,
    TargetOptions,
    command,
    option,
    split_list,
)
from playground.cli.streams import (
    EXIT_INTERRUPTED,
    note,
    until_interrupt,
    write_files,
    write_output,
)

if TYPE_CHECKING:
    from playground.experiments.cluster import Workers
    from playground.experiments.experiment import Experiment
    from playground.experiments.job import Progress
    from playground.experiments.measurement import Summary
    from playground.experiments.plan import Configuration, ExperimentPlan
    from storage import RunLog

MAX_SKIPPED = 10


@dataclass(kw_only=True)
class ExperimentOptions(LogOptions, SamplingOptions, TargetOptions):
    """What `bench` and `sweep` share: the target, the prompts, and where they run."""

    suites: list[str] = option(
        ["quick"], "Suite or file of prompts; repeatable.", "--suite", metavar="NAME|FILE"
    )
    categories: str | None = option(None, "Only these kinds of task: chat,maths.", metavar="A,B")
    limit_per_category: int | None = option(
        None, "Maximum number of prompts of each kind of task.", min=1
    )
    repeats: int = option(1, "How many times everything is run.", min=1)
    name: str = option("", "Name of the experiment in the log.")
    ray: str | None = option(
        None, "Run on a Ray cluster: local, auto or its address.", metavar="ADDRESS"
    )
    workers: int | None = option(None, "Ray workers; default: as many as fit.", min=1)
    worker_cpus: int | None = option(None, "Cores of a Ray worker; default: a node's.", min=1)
    worker_gpus: float | None = option(
        None, "GPUs of a Ray worker; default: 1 where there is one.", min=0.0
    )

    def shared_plan(self) -> dict[str, Any]:
        """The part of a plan that these options make.

        Raises ConfigError: a suite or category that is not there.
        """
        import presets
        from playground.experiments.prompts import choose_items, find_suite

        target = presets.resolve(self.target)
        if target.path is not None:  # so that a resume finds it from any folder
            target = target.replace(path=str(Path(target.path).absolute()))
        return {
            "target": target,
            "dtype": self.dtype,
            "items": choose_items(
                [find_suite(name) for name in self.suites],
                categories=split_list(self.categories),
                limit_per_category=self.limit_per_category,
            ),
            "repeats": self.repeats,
            "sampling": self.sampling,
            "limits": self.limits(),
        }

    @contextmanager
    def ray_workers(self, experiment: Experiment) -> Iterator[Workers | None]:
        """Ray workers with the target loaded; None without Ray.

        Meanwhile, standard output goes to standard error, because Ray prints to it.

        Raises ConfigError: options of workers without --ray.
        """
        from engine.errors import ConfigError
        from playground.cli.terminal import Terminal, plain
        from playground.experiments.cluster import PoolConfig, workers
        from playground.experiments.worker import WorkerConfig

        own, plan = (self.workers, self.worker_cpus, self.worker_gpus), experiment.plan
        if self.ray is None:
            if any(value is not None for value in own):
                raise ConfigError("--workers, --worker-cpus and --worker-gpus need --ray ADDRESS.")
            yield None
            return
        pool = PoolConfig(self.ray, *own)
        config = WorkerConfig(plan.target, plan.dtype, self.log_url, self.device, self.cache_dir)
        with ExitStack() as stack:
            stack.enter_context(redirect_stdout(sys.stderr))
            with Terminal(stderr=True).status(plain(f"starting workers with {plan.target.name}")):
                running = stack.enter_context(workers(pool, config))
            for name, device, _ in running.rows():
                note(f"worker {name}: {device}")
            yield running


@dataclass(kw_only=True)
class BenchOptions(ExperimentOptions):
    methods: str | None = option(None, "Methods to measure, by name: ngram,suffix.", metavar="A,B")
    method: list[str] = option(
        [],
        "One more, with its own settings: 'NGram name=short max_draft_len=3'.",
        metavar="METHOD",
    )
    settings: list[str] = option(
        [], "Change a setting of every method.", "--set", metavar="FIELD=V"
    )
    max_new_tokens: int = option(128, "Maximum number of tokens per answer.")
    resume: str | None = option(None, "Resume a benchmark of the log.", metavar="ID")
    output: Path | None = option(
        None,
        "Write the report here: an HTML page, JSON, CSV tables and genai-perf's files.",
        metavar="DIR",
    )
    as_json: bool = option(False, "Print the report as JSON.", "--json")
    csv: Path | None = option(None, "Write the speedups as CSV here.", metavar="FILE.csv")
    save: bool = option(True, "Keep the runs in the run log.", "--save/--no-save")

    def plan(self) -> ExperimentPlan:
        """Raises ConfigError: naming the option that is wrong."""
        from playground.experiments.plan import ExperimentPlan

        methods = [*split_list(self.methods), *self.method]
        configurations = configurations_of(methods, self.settings)
        return ExperimentPlan.parse({**self.shared_plan(), "configurations": configurations})


@command(BenchOptions)
def bench(options: BenchOptions) -> None:
    """Measure methods against plain decoding over suites of prompts, one request at a time."""
    from engine.errors import ConfigError
    from playground.experiments.experiment import Experiment
    from playground.experiments.report.report import stored_experiment
    from storage import RunLog

    if options.resume and not options.save:
        raise ConfigError("--resume needs the log, which --no-save switches off. Drop one of them.")
    if options.ray and not options.save:
        raise ConfigError("--ray needs a run log that its workers can reach. Drop --no-save.")
    url = options.log_url if options.save else None
    with RunLog.open(url) as log:
        resumed = options.resume
        plan = stored_experiment(log, resumed)[1].runnable if resumed else options.plan()
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
    from playground.cli.tables import tables
    from playground.cli.terminal import print_wide
    from playground.experiments.report.export import (
        FILES,
        genai_perf_files,
        json_text,
        speedup_csv,
    )
    from playground.experiments.report.report import read_results

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
    import presets
    from playground.experiments.plan import Configuration
    from playground.host.methods import choose_method

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
    from engine.errors import ConfigError

    try:
        method, *inline = shlex.split(text)
    except ValueError as error:
        raise ConfigError(
            f"--method takes a method and field=value …, got {text!r:.80}."
        ) from error
    names = [item.removeprefix("name=") for item in inline if item.startswith("name=")]
    stem = Path(method).stem if method.endswith((".yaml", ".yml")) else method
    return (names or [stem])[-1], method, [i for i in inline if not i.startswith("name=")]


# ---- running


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
    from playground.cli.terminal import Terminal, progress_bar
    from playground.experiments.job import time_left

    plan = experiment.plan
    with ExitStack() as stack:
        measure: Callable[[], Summary]
        if (workers := stack.enter_context(options.ray_workers(experiment))) is not None:
            here, measure = workers.environment, partial(experiment.measure_on, workers)
        else:
            models = stack.enter_context(options.models(plan.target, plan.dtype))
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
