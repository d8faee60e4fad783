"""`specdec train`: the Train page's work on the command line; also grids."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from playground.cli.options import REQUIRED, LogOptions, TargetOptions, command, option, split_list
from playground.cli.streams import echo, note
from playground.training import ABOUT

if TYPE_CHECKING:
    from engine.model.sources import TargetSpec
    from engine.model.target import Target
    from engine.training.session import Score
    from engine.training.trainer import TrainMetrics
    from playground.training.work import Event, TrainingWork


@dataclass(kw_only=True)
class TrainOptions(TargetOptions, LogOptions):
    method: str = option(REQUIRED, "medusa, eagle, eagle3, redrafter or draft_target.")
    output: Path | None = option(
        None, "Folder of the drafter; a run there is resumed. Default: a new one on the Train page."
    )
    corpus: Path | None = option(
        None, "Folder of the target's texts; default: corpus, beside the output."
    )
    learn_from: str = option("shipped", f"{ABOUT['learn_from']} shipped, prompts or runs.")
    tokens: int | None = option(None, f"{ABOUT['tokens']} Default: 1,000,000.", min=1)
    minutes: float | None = option(None, ABOUT["minutes"], min=0.01)
    rows: int | None = option(
        None, "Texts written at a time; default 64, or 512 on CUDA, if they fit.", min=1
    )
    prompts: list[Path] = option(
        [], "Prompts in Spec-Bench's layout, besides those the target makes."
    )
    eval_prompts: list[Path] = option([], "Prompts to measure on, instead of held-out dialogues.")
    features: float = option(
        0.0,
        "GiB of disk, beside the corpus, for what the target shows of it: several "
        "drafters, and several epochs, then read it once.",
        min=0.0,
    )
    evals: int = option(1, "How many times acceptance is measured, evenly over the run.", min=1)
    settings: list[str] = option(
        [], "Change a setting of the training.", "--set", metavar="FIELD=VALUE"
    )
    grid: list[str] = option(
        [],
        "Train once with each of these values, in separate folders; repeatable.",
        metavar="FIELD=A,B",
    )
    seed: int = option(0, "Seed of corpus and training.")

    def works(self, spec: TargetSpec) -> list[TrainingWork]:
        """A training per point of the grid, each in its folder.

        Raises ConfigError: naming the invalid option.
        """
        from playground.experiments.prompts import read_suite_file
        from playground.host import paths
        from playground.host.methods import read_overrides
        from playground.training.folder import TrainingFolder
        from playground.training.plan import (
            TrainPlan,
            corpus_folder,
            given_prompts,
            prompts_of_runs,
        )
        from playground.training.service import new_folder
        from playground.training.work import Speeds, TrainingWork

        base, prompts = paths.training(), given_prompts(map(read_suite_file, self.prompts))
        output = self.output or new_folder(base / "heads", self.method, spec.name).path
        output = output.absolute()
        if self.learn_from == "runs":
            with self.open_log() as log:
                prompts = prompts_of_runs(log, spec.name)
        corpora = None if self.output or self.corpus else base / "corpora"
        corpus = self.corpus.absolute() if self.corpus else output.parent / "corpus"
        budget = {"minutes": self.minutes, "tokens": self.tokens}
        if self.minutes is None:
            budget["tokens"] = self.tokens or 1_000_000
        shared = ("dtype", "method", "learn_from", "rows", "seed")
        plan = TrainPlan.parse(
            {
                **{name: getattr(self, name) for name in shared},
                "target": spec,
                "corpus": corpus_folder(corpora, spec, prompts) if corpora else corpus,
                "corpora": corpora,
                "prompts": prompts,
                "eval_prompts": given_prompts(map(read_suite_file, self.eval_prompts)),
                "budget": budget,
                "whole_corpus": self.minutes is None and self.output is not None,
                "settings": read_overrides(self.settings),
                "session": {"feature_gib": self.features, "evals": self.evals, "looks": 24},
            }
        )
        works = []
        for point in points_of(self.grid):
            folder = TrainingFolder(output / ",".join(point))
            own = plan.replace(settings={**plan.settings, **read_overrides(point)})
            own.recipe  # noqa: B018  # refuses invalid settings before anything is loaded
            if self.minutes is not None and folder.exists and (begun := folder.plan).fitted:
                fitted = {**own.settings, "epochs": begun.recipe.epochs}
                own = own.replace(settings=fitted, fitted=True)
            speeds = Speeds(base / "speeds.json", self.device)
            works.append(TrainingWork(own, folder, speeds, cache_dir=self.cache))
        return works


def points_of(grid: Sequence[str]) -> list[tuple[str, ...]]:
    """All combinations of `field=a,b` as settings; a single empty one without a grid.

    Raises ConfigError: one has no values.
    """
    from engine.errors import ConfigError

    axes = []
    for text in grid:
        field, _, values = text.partition("=")
        if not field.strip() or not split_list(values):
            raise ConfigError(f"--grid takes FIELD=A,B, got {text!r:.80}.")
        axes.append([f"{field.strip()}={value}" for value in split_list(values)])
    return list(itertools.product(*axes))


@command(TrainOptions)
def train(options: TrainOptions) -> None:
    """Train a drafter for a target on texts that the target writes itself."""
    import presets
    from engine.training.session import score_table

    spec = presets.resolve(options.target)
    works = options.works(spec)
    with options.models(spec, options.dtype) as models:
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
    from engine.training.trainer import TrainMetrics
    from playground.cli.terminal import Terminal, progress_bar
    from playground.training.folder import TrainingProgress

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
