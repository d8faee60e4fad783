"""`app.py train`: writes the corpus, trains and measures, with a progress bar for each."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from playground.cli.options import REQUIRED, RayOptions, TargetOptions, option, parts, say, takes

if TYPE_CHECKING:
    from rich.console import Console

    from engine.model.target import Target
    from engine.training.corpus.dialogues import GivenPrompt
    from engine.training.recipe import TrainSettings
    from engine.training.session import Evaluation, Score, SessionSettings
    from engine.training.trainer import TrainMetrics
    from playground.experiments.cluster import Workers
    from playground.experiments.worker import TaskContext


@dataclass(kw_only=True)
class TrainOptions(TargetOptions, RayOptions):
    method: str = option(REQUIRED, "medusa, eagle, eagle3, redrafter or draft_target.")
    output: Path = option(REQUIRED, "Folder of the drafter; a run found there is resumed.")
    corpus: Path | None = option(
        None, "Folder of the target's texts; default: corpus, beside the output."
    )
    tokens: int = option(
        1000000, "Size of the corpus in tokens; what is missing is written first.", min=1
    )
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

    def drafters(self) -> list[Drafter]:
        """A drafter per point of the grid.

        Raises ConfigError: naming the invalid option.
        """
        from engine.training.methods import training_settings
        from engine.training.session import SessionSettings
        from playground.host.methods import read_overrides

        output = self.output.absolute()
        corpora = Corpora(
            self.corpus.absolute() if self.corpus else output.parent / "corpus",
            self.tokens,
            self.rows,
            self.seed,
            read_prompts(self.prompts),
            read_prompts(self.eval_prompts),
        )
        settings = SessionSettings.parse({"feature_gib": self.features, "evals": self.evals})
        values = {"seed": self.seed, **read_overrides(self.settings)}
        return [
            Drafter(
                output / ",".join(point),
                corpora,
                training_settings(self.method, {**values, **read_overrides(point)}),
                settings,
                self.cache,
            )
            for point in points_of(self.grid)
        ]


def points_of(grid: Sequence[str]) -> list[tuple[str, ...]]:
    """All combinations of `field=a,b` as settings; a single empty one without a grid.

    Raises ConfigError: one has no values.
    """
    from engine.errors import ConfigError

    axes = []
    for text in grid:
        field, _, values = text.partition("=")
        if not field.strip() or not parts(values):
            raise ConfigError(f"--grid takes FIELD=A,B, got {text!r:.80}.")
        axes.append([f"{field.strip()}={value}" for value in parts(values)])
    return list(itertools.product(*axes))


@takes(TrainOptions)
def train(options: TrainOptions) -> None:
    """Train a drafter for a target on texts that the target writes itself."""
    import presets
    from engine.training.session import lines
    from playground.cli.tables import Terminal

    console = Terminal(stderr=True)
    spec, drafters = presets.resolve(options.target), options.drafters()
    if (pool := options.pool) is None:
        with options.models(spec, options.dtype) as models:
            scores = _train_here(options, drafters, models.build_context().target, console)
    else:
        with options.on_workers(pool, spec, options.dtype, None) as workers:
            scores = _train_on(workers, options, drafters, console)
    if not options.grid:
        say("\n".join(lines(next(iter(scores.values())))))
        console.print(f"Weights and card: {options.output}")
        return
    best_first = sorted(scores.items(), key=lambda pair: -pair[1]["overall"].mat)
    for folder, by_kind in best_first:
        say(f"MAT {by_kind['overall'].mat:.2f}  {folder}")


@dataclass(frozen=True, slots=True)
class Corpora:
    """The texts to train on, and the prompts to measure on."""

    folder: Path
    num_tokens: int
    rows: int | None
    seed: int
    prompts: Sequence[GivenPrompt]
    eval_prompts: Sequence[GivenPrompt]

    def grow(self, target: Target, tell: Callable[[int], object]) -> str:
        """Write the missing dialogues; returns a description of the corpus."""
        import presets
        from engine.model.corpus import Corpus
        from engine.training.corpus.writer import corpus_settings, grow

        grown = grow(
            target,
            self.folder,
            corpus_settings(self.folder, target, seed=self.seed),
            presets.dialogues(),
            num_tokens=self.num_tokens,
            rows=self.rows,
            prompts=self.prompts,
        )
        for corpus in grown:
            tell(min(corpus.num_tokens, self.num_tokens))
        corpus = Corpus.open(self.folder)
        return (
            f"Corpus: {corpus.num_tokens:,} tokens in {len(corpus.entries):,} dialogues "
            f"({corpus.num_answer_tokens:,} of answers), {self.folder}"
        )


@dataclass(frozen=True, slots=True)
class Drafter:
    """A drafter to train into its own folder; an interrupted training is resumed."""

    output: Path
    corpora: Corpora
    recipe: TrainSettings
    settings: SessionSettings
    cache_dir: Path

    def train(
        self,
        target: Target,
        tell: Callable[[TrainMetrics | Evaluation], object],
        cancelled: Callable[[], bool] = lambda: False,
    ) -> dict[str, Score]:
        from engine.model.corpus import Corpus
        from engine.training import session

        events = session.train(
            target,
            Corpus.open(self.corpora.folder),
            self.output,
            self.recipe,
            self.settings,
            cache_dir=self.cache_dir,
            eval_prompts=self.corpora.eval_prompts,
        )
        scores: dict[str, Score] = {}
        with closing(events):
            for event in events:
                tell(event)
                if isinstance(event, session.Evaluation):
                    scores = event.scores
                if cancelled():
                    break
        return scores


def _train_here(
    options: TrainOptions, drafters: Sequence[Drafter], target: Target, console: Console
) -> dict[Path, dict[str, Score]]:
    """One drafter after another, in this process."""
    from playground.cli.tables import progress_bar

    with progress_bar(console, "Writing the corpus", options.tokens) as bar:
        description = drafters[0].corpora.grow(target, bar)
    console.print(description)
    scores = {}
    for drafter in drafters:
        if options.grid:
            console.print(f"{drafter.output}", highlight=False)
        try:
            with progress_bar(console, f"Training {drafter.recipe.method}") as bar:
                tell = partial(_show, console=console, bar=bar)
                scores[drafter.output] = drafter.train(target, tell)
        except KeyboardInterrupt:
            console.print("Run the same command to resume.")
            raise
    return scores


def _train_on(
    workers: Workers, options: TrainOptions, drafters: Sequence[Drafter], console: Console
) -> dict[Path, dict[str, Score]]:
    """All drafters, each on a free worker; workers share the folders."""
    from playground.cli.options import until_interrupt
    from playground.cli.tables import progress_bar

    with progress_bar(console, "Writing the corpus", options.tokens) as bar:
        console.print(workers.do(partial(_grow_at, corpora=drafters[0].corpora), tell=bar))
    tasks = {str(one.output): partial(_train_at, drafter=one) for one in drafters}
    progress = dict.fromkeys(tasks, 0.0)
    with until_interrupt() as interrupted, progress_bar(console, "Training") as bar:

        def update(name: str, event: TrainMetrics) -> None:
            progress[name] = event.step / event.num_steps
            note = f"{Path(name).name}: {_note(event)}"
            bar(sum(progress.values()), total=len(tasks), note=note)

        scores = workers.do_all(tasks, tell=update, cancelled=interrupted)
    if interrupted():
        console.print("Run the same command to resume.")
        raise KeyboardInterrupt
    return {Path(name): by_kind for name, by_kind in scores.items()}


def _grow_at(context: TaskContext, corpora: Corpora) -> str:
    """Task of a worker: write the corpus."""
    return corpora.grow(context.bench.target, context.tell)


def _train_at(context: TaskContext, drafter: Drafter) -> dict[str, Score]:
    """Task of a worker: train a drafter."""
    from engine.training.trainer import TrainMetrics

    def tell(event: object) -> None:
        if isinstance(event, TrainMetrics):
            context.tell(event)

    return drafter.train(context.bench.target, tell, context.cancelled)


def read_prompts(files: Sequence[Path]) -> list[GivenPrompt]:
    """Prompts of files in any layout that benchmarks read.

    Raises ConfigError: a file is unreadable or in no known layout.
    """
    from engine.training.corpus.dialogues import GivenPrompt
    from playground.experiments.prompt_files import read_suite_file

    prompts = [prompt for file in files for prompt in read_suite_file(file).prompts]
    return [GivenPrompt(prompt.category, prompt.turns) for prompt in prompts]


def _show(event: TrainMetrics | Evaluation, console: Console, bar: Any) -> None:
    """Print a measurement; advance the bar."""
    from engine.training.session import Evaluation

    if isinstance(event, Evaluation):
        overall = event.scores["overall"]
        console.print(f"Step {event.step}: MAT {overall.mat:.2f} over {overall.num_tokens} tokens")
        return
    bar(event.step, total=event.num_steps, note=_note(event))
    if not console.is_terminal:
        console.print(f"{event.step}/{event.num_steps} {_note(event)}")


def _note(metrics: TrainMetrics) -> str:
    shares = (f"top-{k} " + " ".join(f"{share:.2f}" for share in metrics.top(k)) for k in (1, 4))
    speed = metrics.num_tokens / metrics.seconds if metrics.seconds else 0.0
    return " · ".join([f"loss {metrics.loss:.3f}", *shares, f"{speed:.0f} tok/s"])
