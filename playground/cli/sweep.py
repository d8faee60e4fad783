"""`specdec sweep`: run or go on with a sweep, and print what it found."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import typer

import presets
from engine.errors import ConfigError
from playground.cli.bench import run_experiment, shared_plan
from playground.cli.commands import SweepOptions
from playground.cli.inputs import open_log
from playground.cli.loading import method_of
from playground.cli.streams import EXIT_INTERRUPTED, note, write_files, write_output
from playground.cli.terminal import print_wide, table
from playground.experiments.plan import Configuration, SweepPlan
from playground.experiments.space import OptunaSearch
from playground.experiments.sweep.report import SweepResults, read_sweep, stored_sweep
from playground.experiments.sweep.search import Sweep


def sweep(options: SweepOptions) -> None:
    """Measure many settings of one method and find the best, by search or grid."""
    if options.resume and options.trials is not None:
        raise ConfigError("--resume completes the plan of the log, so it takes no --trials.")
    with open_log(options) as log:
        resumed = options.resume
        plan = stored_sweep(log, resumed)[1] if resumed else _plan(options)
        experiment = Sweep(log, plan, benchmark_id=resumed)

        def heading(here: Mapping[str, Any]) -> str:
            return f"{plan.about}\nsweep {experiment.id}"

        summary = run_experiment(options, experiment, heading, resume=resumed is not None)
        _print_results(options, read_sweep(log, experiment.id))
    if summary.cancelled:
        note(f"Stopped. Resume with: specdec sweep --resume {experiment.id}")
        raise typer.Exit(EXIT_INTERRUPTED)


def _plan(options: SweepOptions) -> SweepPlan:
    """Raises ConfigError: naming the option that is wrong."""
    if options.grid and options.trials is not None:
        raise ConfigError("--grid measures all combinations, so it takes no --trials. Drop one.")
    if not options.method or not options.vary:
        raise ConfigError(
            "Say what to sweep, such as --method ngram --vary max_draft_len=1:16, or go on "
            "with a sweep by --resume ID."
        )
    base = method_of(options)
    preset = presets.methods().get(options.method)
    title = type(base).title if preset is None else preset.title
    search = {
        "varied": options.vary,
        "objective": options.objective,
        "mode": "grid" if options.grid else "search",
        **({} if options.trials is None else {"trials": options.trials}),
        "seed": options.seed,
    }
    return SweepPlan.parse(
        {
            **shared_plan(options),
            "chooser": OptunaSearch.parse(search),
            "configurations": [Configuration(options.method, title, base)],
        }
    )


def _print_results(options: SweepOptions, results: SweepResults) -> None:
    if options.as_json:
        write_output(results.json_text() + "\n", None)
    else:
        (_, _, *heads), rows = results.table(best_first=True)
        lines = [
            [number.text, *(cell.line for cell in cells), outcome.hint or outcome.text]
            for number, outcome, *cells in rows
        ]
        trials = table(f"Sweep {results.benchmark.name}", [*heads, "outcome"], lines)
        print_wide(trials, results.report.headline or "Nothing was measured.")
    if options.output is not None and results.best is not None:
        write_files(options.output.parent, {options.output.name: results.preset_yaml()})
        note(f"wrote {options.output}: use it with --method {options.output}")
