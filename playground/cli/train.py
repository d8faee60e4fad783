"""`specdec train`: the Train page's work on the command line; also grids."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import presets
from engine.errors import ConfigError
from engine.model.sources import TargetSpec
from engine.model.target import Target
from engine.training.session import Score, score_table
from engine.training.trainer import TrainMetrics
from playground.cli.commands import TrainOptions
from playground.cli.inputs import cache_of, open_log, split_list
from playground.cli.loading import loaded_models
from playground.cli.streams import echo, note
from playground.cli.terminal import Terminal, progress_bar
from playground.experiments.prompts import read_suite_file
from playground.host import paths
from playground.host.methods import read_overrides
from playground.training.folder import TrainingFolder, TrainingProgress
from playground.training.plan import TrainPlan, corpus_folder, given_prompts, prompts_of_runs
from playground.training.service import new_folder
from playground.training.work import Event, Speeds, TrainingWork


def works_of(options: TrainOptions, spec: TargetSpec) -> list[TrainingWork]:
    """A training per point of the grid, each in its folder.

    Raises ConfigError: naming the invalid option.
    """
    base, prompts = paths.training(), given_prompts(map(read_suite_file, options.prompts))
    output = options.output or new_folder(base / "heads", options.method, spec.name).path
    output = output.absolute()
    if options.learn_from == "runs":
        with open_log(options) as log:
            prompts = prompts_of_runs(log, spec.name)
    corpora = None if options.output or options.corpus else base / "corpora"
    corpus = options.corpus.absolute() if options.corpus else output.parent / "corpus"
    budget = {"minutes": options.minutes, "tokens": options.tokens}
    if options.minutes is None:
        budget["tokens"] = options.tokens or 1_000_000
    shared = ("dtype", "method", "learn_from", "rows", "seed")
    plan = TrainPlan.parse(
        {
            **{name: getattr(options, name) for name in shared},
            "target": spec,
            "corpus": corpus_folder(corpora, spec, prompts) if corpora else corpus,
            "corpora": corpora,
            "prompts": prompts,
            "eval_prompts": given_prompts(map(read_suite_file, options.eval_prompts)),
            "budget": budget,
            "whole_corpus": options.minutes is None and options.output is not None,
            "settings": read_overrides(options.settings),
            "session": {"feature_gib": options.features, "evals": options.evals, "looks": 24},
        }
    )
    works = []
    for point in points_of(options.grid):
        folder = TrainingFolder(output / ",".join(point))
        own = plan.replace(settings={**plan.settings, **read_overrides(point)})
        own.recipe  # noqa: B018  # refuses invalid settings before anything is loaded
        if options.minutes is not None and folder.exists and (begun := folder.plan).fitted:
            fitted = {**own.settings, "epochs": begun.recipe.epochs}
            own = own.replace(settings=fitted, fitted=True)
        speeds = Speeds(base / "speeds.json", options.device)
        works.append(TrainingWork(own, folder, speeds, cache_dir=cache_of(options)))
    return works


def points_of(grid: Sequence[str]) -> list[tuple[str, ...]]:
    """All combinations of `field=a,b` as settings; a single empty one without a grid.

    Raises ConfigError: one has no values.
    """
    axes = []
    for text in grid:
        field, _, values = text.partition("=")
        if not field.strip() or not split_list(values):
            raise ConfigError(f"--grid takes FIELD=A,B, got {text!r:.80}.")
        axes.append([f"{field.strip()}={value}" for value in split_list(values)])
    return list(itertools.product(*axes))


def train(options: TrainOptions) -> None:
    """Train a drafter for a target on texts that the target writes itself."""
    spec = presets.resolve(options.target)
    works = works_of(options, spec)
    with loaded_models(options, spec, options.dtype) as models:
        target = models.build_context().target
        scores = {work.folder.path: _train(work, target) for work in works}
    if not options.grid:
        echo("\n".join(score_table(next(iter(scores.values())))))
        note(f"Weights and card: {works[0].folder.path}")
        return
    best_first = sorted(scores.items(), key=lambda pair: -pair[1]["overall"].mat)
    for folder, by_kind in best_first:
        echo(f"MAT {by_kind['overall'].mat:.2f}  {folder}")


def _train(work: TrainingWork, target: Target) -> dict[str, Score]:
    """One training, shown on the terminal."""
    console = Terminal(stderr=True)
    with progress_bar(console, work.folder.name) as bar:

        def show(event: Event) -> None:
            if isinstance(event, TrainingProgress):
                bar(event.corpus_tokens, total=work.plan.budget.tokens, note=event.phase)
            elif isinstance(event, TrainMetrics):
                bar(event.step, total=event.num_steps, note=_note(event))
                if not console.is_terminal and event.step % 20 == 0:
                    note(f"{event.step}/{event.num_steps} {_note(event)}")

        try:
            return work.scores(target, show)
        except KeyboardInterrupt:
            note("Run the same command to resume.")
            raise


def _note(metrics: TrainMetrics) -> str:
    shares = (f"top-{k} " + " ".join(f"{share:.2f}" for share in metrics.top(k)) for k in (1, 4))
    speed = metrics.num_tokens / metrics.seconds if metrics.seconds else 0.0
    return " · ".join([f"loss {metrics.loss:.3f}", *shares, f"{speed:.0f} tok/s"])
