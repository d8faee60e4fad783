"""`app.py train`: corpus, training and measuring, with a progress bar for each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from playground.cli.options import REQUIRED, TargetOptions, option, takes

if TYPE_CHECKING:
    from rich.console import Console

    from engine.training.corpus.dialogues import GivenPrompt
    from engine.training.session import Evaluation, Score
    from engine.training.trainer import TrainMetrics


@dataclass(kw_only=True)
class TrainOptions(TargetOptions):
    """Options of `train`."""

    method: str = option(REQUIRED, "medusa, eagle, eagle3, redrafter or draft_target.")
    output: Path = option(REQUIRED, "Folder of the drafter; a run that is there goes on.")
    corpus: Path | None = option(
        None, "Folder of the target's texts; default: corpus, beside the output."
    )
    tokens: int = option(1000000, "Tokens of corpus; what is missing is written first.", min=1)
    rows: int | None = option(
        None, "Texts written at a time; default 64, on CUDA 512, if they fit.", min=1
    )
    prompts: list[Path] = option([], "Prompts in Spec-Bench's layout, besides self-made ones.")
    eval_prompts: list[Path] = option([], "Prompts to measure on, instead of held-out dialogues.")
    features: float = option(
        0.0,
        "GiB of disk, beside the corpus, for what the target shows of it: several "
        "drafters, and several epochs, then read it once.",
        min=0.0,
    )
    evals: int = option(1, "How often acceptance is measured, evenly over the run.", min=1)
    settings: list[str] = option(
        [], "Change a setting of the training.", "--set", metavar="FIELD=VALUE"
    )
    seed: int = option(0, "Seed of corpus and training.")


@takes(TrainOptions)
def train(options: TrainOptions) -> None:
    """Train a drafter for a target on texts that the target writes itself."""
    import presets
    from engine.model.corpus import Corpus
    from engine.training import session
    from engine.training.corpus.writer import corpus_settings, grow
    from engine.training.methods import training_settings
    from playground.cli.tables import Terminal, progress_bar
    from playground.host.methods import read_overrides

    console = Terminal(stderr=True)
    values = {"seed": options.seed, **read_overrides(options.settings)}
    recipe = training_settings(options.method, values)
    settings = session.SessionSettings.parse(
        {"feature_gib": options.features, "evals": options.evals}
    )
    prompts, eval_prompts = read_prompts(options.prompts), read_prompts(options.eval_prompts)
    with options.models(presets.resolve(options.target), options.dtype) as models:
        target = models.bench().target
        folder = options.corpus or options.output.parent / "corpus"
        grown = grow(
            target,
            folder,
            corpus_settings(folder, target, seed=options.seed),
            presets.dialogues(),
            num_tokens=options.tokens,
            rows=options.rows,
            prompts=prompts,
        )
        with progress_bar(console, "Writing the corpus", options.tokens) as bar:
            for corpus in grown:
                bar(min(corpus.num_tokens, options.tokens))
        corpus = Corpus.open(folder)
        console.print(
            f"Corpus: {corpus.num_tokens:,} tokens in {len(corpus.entries):,} dialogues "
            f"({corpus.num_answer_tokens:,} of answers), {folder}"
        )
        events = session.train(
            target,
            corpus,
            options.output,
            recipe,
            settings,
            cache_dir=options.cache,
            eval_prompts=eval_prompts,
        )
        try:
            with closing(events), progress_bar(console, f"Training {recipe.method}") as bar:
                scores = _follow(events, console, bar)
        except KeyboardInterrupt:
            console.print("The same command goes on from here.")
            raise
    typer.echo("\n".join(session.lines(scores)))
    console.print(f"Weights and card: {options.output}")


def read_prompts(files: Sequence[Path]) -> list[GivenPrompt]:
    """Prompts of files in any layout that benchmarks read.

    Raises:
        ConfigError: a file is unreadable or in no known layout.
    """
    from engine.training.corpus.dialogues import GivenPrompt
    from playground.experiments.prompt_files import read_suite_file

    prompts = [prompt for file in files for prompt in read_suite_file(file).prompts]
    return [GivenPrompt(prompt.category, prompt.turns) for prompt in prompts]


def _follow(
    events: Iterator[TrainMetrics | Evaluation], console: Console, bar: Any
) -> dict[str, Score]:
    """Show what happens; returns the last scores."""
    from engine.training.session import Evaluation

    scores: dict[str, Score] = {}
    for event in events:
        if isinstance(event, Evaluation):
            scores = event.scores
            overall = scores["overall"]
            console.print(
                f"Step {event.step}: MAT {overall.mat:.2f} over {overall.num_tokens} tokens"
            )
        else:
            bar(event.step, total=event.num_steps, note=_note(event))
            if not console.is_terminal:
                console.print(f"{event.step}/{event.num_steps} {_note(event)}")
    return scores


def _note(metrics: TrainMetrics) -> str:
    shares = (f"top-{k} " + " ".join(f"{share:.2f}" for share in metrics.top(k)) for k in (1, 4))
    speed = metrics.num_tokens / metrics.seconds if metrics.seconds else 0.0
    return " · ".join([f"loss {metrics.loss:.3f}", *shares, f"{speed:.0f} tok/s"])
