"""`app.py bench`: run suites on configurations, print the tables, write the files."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from playground.cli.options import (
    EXIT_INTERRUPTED,
    LogOptions,
    RayOptions,
    SamplingOptions,
    TargetOptions,
    option,
    parts,
    put,
    remark,
    takes,
    until_interrupt,
    write_files,
)

if TYPE_CHECKING:
    from rich.console import Console

    from engine.model.sources import TargetSpec
    from playground.experiments.experiment import Experiment
    from playground.experiments.job import Progress
    from playground.experiments.measurement import Summary
    from playground.experiments.plan import Configuration, ExperimentPlan, Item
    from storage import RunLog

MAX_SKIPPED = 10
STDOUT = Path("-")


@dataclass(kw_only=True)
class WorkloadOptions(LogOptions, SamplingOptions, TargetOptions):
    """What an experiment asks, and of which target."""

    suites: list[str] = option(
        ["quick"], "Suite or file of prompts; repeatable.", "--suite", metavar="NAME|FILE"
    )
    categories: str | None = option(None, "Only these kinds of task: chat,maths.", metavar="A,B")
    limit_per_category: int | None = option(
        None, "Maximum number of prompts of each kind of task.", min=1
    )
    repeats: int = option(1, "How many times everything is run.", min=1)

    def items(self) -> tuple[Item, ...]:
        """Raises ConfigError: a suite or category that is not there."""
        from playground.experiments.prompts import choose_items, choose_suite, known_suites

        known = known_suites()
        return choose_items(
            [choose_suite(name, known) for name in self.suites],
            categories=parts(self.categories),
            limit_per_category=self.limit_per_category,
        )

    def target_spec(self) -> TargetSpec:
        """With an absolute path, so that a resume finds it from any folder."""
        import presets

        spec = presets.resolve(self.target)
        return spec if spec.path is None else spec.replace(path=str(Path(spec.path).absolute()))


@dataclass(kw_only=True)
class ExperimentOptions(WorkloadOptions, RayOptions):
    """What `bench` and `sweep` share."""

    name: str = option("", "Name of the experiment in the log.")


@dataclass(kw_only=True)
class BenchOptions(ExperimentOptions):
    methods: str | None = option(None, "Methods to measure, by name: ngram,suffix.", metavar="A,B")
    method: list[str] = option(
        [],
        "One more, with its own settings: 'NGram name=short max_draft_len=3'.",
        metavar="METHOD",
    )
    settings: list[str] = option(
        [], "Change a setting of every method, or of one.", "--set", metavar="[NAME.]FIELD=V"
    )
    max_new_tokens: int = option(128, "Maximum number of tokens per answer.")
    name: str = option("", "Name of the benchmark in the log.")
    resume: str | None = option(None, "Resume a benchmark of the log.", metavar="ID")
    output: Path | None = option(
        None, "Write report.json, CSV tables and genai-perf's files here.", metavar="DIR"
    )
    as_json: bool = option(False, "Print the report as JSON.", "--json")
    csv: Path | None = option(
        None, "Write the speedups as CSV here; - prints them.", metavar="FILE.csv"
    )
    html: Path | None = option(
        None, "Write the report as a single HTML page, to share.", metavar="FILE.html"
    )
    save: bool = option(True, "Keep the runs in the run log.", "--save/--no-save")

    def plan(self) -> ExperimentPlan:
        """Raises ConfigError: naming the option that is wrong."""
        from playground.experiments.plan import ExperimentPlan

        items = self.items()
        return ExperimentPlan.parse(
            {
                "target": self.target_spec(),
                "dtype": self.dtype,
                "configurations": configurations_of(
                    [*parts(self.methods), *self.method], self.settings
                ),
                "items": items,
                "repeats": self.repeats,
                "sampling": self.sampling,
                "limits": self.limits(),
            }
        )


@takes(BenchOptions)
def bench(options: BenchOptions) -> None:
    """Measure methods against plain decoding over suites of prompts, one request at a time."""
    from engine.errors import ConfigError
    from playground.cli.tables import Terminal
    from playground.experiments.experiment import Experiment
    from playground.experiments.report.report import stored_experiment
    from storage import RunLog

    console = Terminal(stderr=True)
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

        summary = conduct(options, experiment, heading, resume=resumed is not None)
        _show(options, log, experiment.id, summary, console)
    if summary.cancelled:
        raise typer.Exit(EXIT_INTERRUPTED)


def _show(
    options: BenchOptions, log: RunLog, benchmark_id: str, summary: Summary, console: Console
) -> None:
    from playground.cli.tables import print_wide, tables
    from playground.experiments.report.export import (
        FILES,
        genai_perf_files,
        json_text,
        speedup_csv,
    )
    from playground.experiments.report.page import page_html
    from playground.experiments.report.report import read_results

    results = read_results(log, benchmark_id)
    if options.as_json:
        put(json_text(results) + "\n", None)
    elif options.csv == STDOUT:
        put(speedup_csv(results), None)
    else:
        print_wide(*tables(results.report))
    for name, notes in summary.notes.items():
        console.print(f"{name}: {' '.join(notes)}", highlight=False)
    for skip in summary.skipped[:MAX_SKIPPED]:
        where = f"{skip.suite} {skip.prompt}, turn {skip.turn + 1}"
        console.print(f"left out: {where}: {skip.reason}")
    if summary.num_failed:
        console.print(f"{summary.num_failed} requests failed; the log has their errors.")
    table = None if options.csv == STDOUT else options.csv
    for file, text_of in ((table, speedup_csv), (options.html, page_html)):
        if file is not None:
            (path,) = write_files(file.parent, {file.name: text_of(results)})
            console.print(f"wrote {path}")
    if options.output is not None:
        texts = {name: text_of(results) for name, text_of in FILES.items()}
        texts |= genai_perf_files(results)
        for path in write_files(options.output, texts):
            console.print(f"wrote {path}")
    if summary.cancelled and options.save:
        console.print(f"Stopped. Resume with: app.py bench --resume {benchmark_id}")


def configurations_of(
    methods: Sequence[str], settings: Sequence[str] = ()
) -> tuple[Configuration, ...]:
    """Configurations by the names of their methods.

    Args:
        methods: `preset`, `FILE.yaml` or decoding type, then `field=value …` and `name=…`, parted
            by spaces.
        settings: `field=value` for every method, `NAME.field=value` for the one of that name.

    Raises ConfigError: an unknown method, field or name.
    """
    import presets
    from engine.errors import ConfigError
    from playground.experiments.plan import Configuration
    from playground.host.methods import choose_method

    specs = [_spec(text) for text in methods]
    own: dict[str, list[str]] = {name: [] for name, _, _ in specs}
    for text in settings:
        key, equals, value = text.partition("=")
        whose, _, setting = key.rpartition(".")
        if whose and whose not in own:
            raise ConfigError(
                f"--set {text!r:.60}: no configuration is named {whose!r}; there are "
                f"{', '.join(sorted(own)) or 'none'}."
            )
        for name in [whose] if whose else own:
            own[name].append(f"{setting}{equals}{value}")
    configurations = []
    for name, method, inline in specs:
        config = choose_method(method, [*inline, *own[name]], report=remark)
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


def conduct(
    options: ExperimentOptions,
    experiment: Experiment,
    heading: Callable[[Mapping[str, Any]], str],
    *,
    resume: bool,
) -> Summary:
    """Load the target or start workers, measure an experiment, and free them again.

    Args:
        heading: printed before it begins; from the environment that it is measured in.
    """
    from playground.cli.tables import Terminal, progress_bar

    console, plan = Terminal(stderr=True), experiment.plan
    with ExitStack() as stack:
        measure: Callable[[], Summary]
        if (pool := options.pool) is not None:
            on = (pool, plan.target, plan.dtype, options.log_url)
            one_device = experiment.one_device
            workers = stack.enter_context(options.on_workers(*on, one_device=one_device))
            here, measure = workers.environment, partial(experiment.measure_by, workers)
        else:
            models = stack.enter_context(options.models(plan.target, plan.dtype))
            bench = models.build_context()
            here, measure = bench.target.environment(), partial(experiment.measure, bench)
        if resume:
            experiment.check_target(here)
            experiment.log.benchmarks.resume(experiment.id)
        else:
            experiment.begin(options.name)
        console.print(heading(here), highlight=False)
        with until_interrupt() as stopped, progress_bar(console) as bar:
            experiment.watch(partial(show_progress, bar), stopped)
            return experiment.conduct(measure)


def show_progress(bar: Callable[..., None], progress: Progress) -> None:
    """How far an experiment is, and how long it will take."""
    from playground.experiments.job import time_left

    failed = f", {progress.num_failed} failed" if progress.num_failed else ""
    note = f"{time_left(progress.eta_s)} {progress.message}{failed}"
    bar(progress.num_done, total=progress.num_planned, note=note.strip())
