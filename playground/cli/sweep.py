"""`specdec sweep`: run or go on with a sweep, and print what it found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from playground.cli.bench import ExperimentOptions, run_experiment
from playground.cli.options import METHOD_HELP, MethodOptions, command, option
from playground.cli.streams import EXIT_INTERRUPTED, note, write_files, write_output

if TYPE_CHECKING:
    from playground.experiments.plan import SweepPlan
    from playground.experiments.sweep.report import SweepResults


@dataclass(kw_only=True)
class SweepOptions(ExperimentOptions, MethodOptions):
    """Options of `sweep`."""

    method: str = option("", METHOD_HELP)
    vary: list[str] = option(
        [],
        "Setting to vary: f=1:16, f=1:16:3, f=1:64:log or f=a,b; repeatable.",
        metavar="FIELD=RANGE",
    )
    trials: int | None = option(
        None, "Number of combinations that the search measures; default 20.", min=1
    )
    grid: bool = option(False, "Measure all combinations.", "--grid")
    objective: str = option("speedup", "What to maximise: speedup or mat.")
    settings: list[str] = option(
        [], "Change a setting that is not varied.", "--set", metavar="FIELD=VALUE"
    )
    limit_per_category: int | None = option(
        1, "Maximum number of prompts of each kind of task.", min=1
    )
    max_new_tokens: int = option(64, "Maximum number of tokens per answer.")
    seed: int = option(0, "Seed of the search and of every random draw.")
    resume: str | None = option(None, "Resume a sweep of the log.", metavar="ID")
    output: Path | None = option(None, "Write the best settings here.", metavar="FILE.yaml")
    as_json: bool = option(False, "Print everything as JSON.", "--json")

    def plan(self) -> SweepPlan:
        """Raises ConfigError: naming the option that is wrong."""
        import presets
        from engine.errors import ConfigError
        from playground.experiments.plan import Configuration, SweepPlan
        from playground.experiments.space import OptunaSearch

        if self.grid and self.trials is not None:
            raise ConfigError(
                "--grid measures all combinations, so it takes no --trials. Drop one."
            )
        if not self.method or not self.vary:
            raise ConfigError(
                "Say what to sweep, such as --method ngram --vary max_draft_len=1:16, or go on "
                "with a sweep by --resume ID."
            )
        base = self.config()
        preset = presets.methods().get(self.method)
        title = type(base).title if preset is None else preset.title
        search = {
            "varied": self.vary,
            "objective": self.objective,
            "mode": "grid" if self.grid else "search",
            **({} if self.trials is None else {"trials": self.trials}),
            "seed": self.seed,
        }
        return SweepPlan.parse(
            {
                **self.shared_plan(),
                "chooser": OptunaSearch.parse(search),
                "configurations": [Configuration(self.method, title, base)],
            }
        )


@command(SweepOptions)
def sweep(options: SweepOptions) -> None:
    """Measure many settings of one method and find the best, by search or grid."""
    from engine.errors import ConfigError
    from playground.experiments.sweep.report import SweepStore
    from playground.experiments.sweep.search import Sweep

    if options.resume and options.trials is not None:
        raise ConfigError("--resume completes the plan of the log, so it takes no --trials.")
    with options.open_log() as log:
        store, resumed = SweepStore(log), options.resume
        plan = store.stored_sweep(resumed)[1] if resumed else options.plan()
        experiment = Sweep(store, plan, benchmark_id=resumed)

        def heading(here: Mapping[str, Any]) -> str:
            return f"{plan.about}\nsweep {experiment.id}"

        summary = run_experiment(options, experiment, heading, resume=resumed is not None)
        _print_results(options, store.load(experiment.id))
    if summary.cancelled:
        note(f"Stopped. Resume with: specdec sweep --resume {experiment.id}")
        raise typer.Exit(EXIT_INTERRUPTED)


def _print_results(options: SweepOptions, results: SweepResults) -> None:
    from playground.cli.terminal import print_wide, table

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
