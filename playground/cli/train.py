"""What `app.py train` does: corpus, training and measuring, with a progress bar for each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
import yaml
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

import presets
from engine.errors import ConfigError, PlaygroundError
from engine.model.corpus import MANIFEST, Corpus
from engine.model.loading import load_target
from engine.model.target import Target
from engine.training.corpus import CorpusSettings
from engine.training.dialogue import GivenPrompt, read_prompts
from engine.training.evaluation import Score, lines
from engine.training.methods import training_settings
from engine.training.recipe import TrainSettings
from engine.training.session import (
    Evaluated,
    SessionSettings,
    Trained,
    make_corpus,
    train,
)
from engine.training.trainer import Progress as Report
from playground.host import paths

EXIT_USER_ERROR = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """Options of `train`, as given."""

    target: str
    method: str
    output: Path
    corpus: Path | None
    num_tokens: int
    rows: int | None
    prompts: tuple[Path, ...]
    eval_prompts: tuple[Path, ...]
    feature_gib: float
    evals: int
    settings: tuple[str, ...]
    seed: int
    dtype: str
    device: str
    cache_dir: Path | None


def run_train(options: TrainOptions) -> None:
    """Train one drafter; what a killed run had done is picked up."""
    console = Console(stderr=True)
    try:
        _train(options, console)
    except PlaygroundError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(EXIT_USER_ERROR) from error
    except KeyboardInterrupt as error:
        typer.echo("Stopped; the same command goes on from here.", err=True)
        raise typer.Exit(130) from error


def _train(options: TrainOptions, console: Console) -> None:
    recipe = _recipe(options)
    session = SessionSettings.parse(
        {
            "num_tokens": options.num_tokens,
            "rows": options.rows,
            "feature_gib": options.feature_gib,
            "evals": options.evals,
        }
    )
    prompts, judged_by = _prompts(options.prompts), _prompts(options.eval_prompts)
    cache_dir = options.cache_dir or paths.cache_dir()
    spec = presets.resolve(options.target)
    with console.status(f"Loading {options.target} …"):
        target = load_target(spec, dtype=options.dtype, device=options.device, cache_dir=cache_dir)
    try:
        folder = options.corpus or options.output.parent / "corpus"
        settings = _corpus_settings(folder, target, options.seed)
        made = make_corpus(target, folder, settings, session, prompts)
        with _bar(console, "Writing the corpus", session.num_tokens, "") as bar:
            for grew in made:
                bar(min(grew.num_tokens, session.num_tokens))
        corpus = Corpus.open(folder)
        console.print(
            f"Corpus: {corpus.num_tokens:,} tokens in {len(corpus.entries):,} dialogues "
            f"({corpus.num_answer_tokens:,} of answers), {folder}"
        )
        events = train(
            target,
            corpus,
            options.output,
            recipe,
            session,
            cache_dir=cache_dir,
            eval_prompts=judged_by,
        )
        with closing(events):
            scores = _follow(events, console, recipe)
    finally:
        target.close()
    typer.echo("\n".join(lines(scores)))
    console.print(f"Weights and card: {options.output}")


def _follow(events: Iterator[Trained | Evaluated], console: Console, recipe: TrainSettings) -> Any:
    """Show what happens; returns the last scores."""
    scores: dict[str, Score] = {}
    with _bar(console, f"Training {recipe.method}", None, "starting") as bar:
        for event in events:
            if isinstance(event, Trained):
                report = event.progress
                bar(report.step, total=report.num_steps, note=_note(report))
                if not console.is_terminal:
                    console.print(f"{report.step}/{report.num_steps} {_note(report)}")
            else:
                scores = event.scores
                overall = scores["overall"]
                console.print(
                    f"Step {event.step}: MAT {overall.mat:.2f} over {overall.num_tokens} tokens"
                )
    return scores


def _note(report: Report) -> str:
    def shares(values: Sequence[float]) -> str:
        return " ".join(f"{value:.2f}" for value in values)

    speed = report.num_tokens / report.seconds if report.seconds else 0.0
    return (
        f"loss {report.loss:.3f} · top-1 {shares(report.top1)} · top-4 {shares(report.top(4))}"
        f" · {speed:.0f} tok/s"
    )


@contextmanager
def _bar(console: Console, title: str, total: int | None, note: str) -> Iterator[Any]:
    """A progress bar as a function of what is done."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(title, total=total, note=note)

        def show(done: int, *, total: int | None = total, note: str = note) -> None:
            progress.update(task, completed=done, total=total, note=note)

        yield show


def _recipe(options: TrainOptions) -> TrainSettings:
    values: dict[str, Any] = {"seed": options.seed}
    for item in options.settings:
        key, equals, text = item.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"--set takes field=value, got {item!r:.80}.")
        values[key.strip()] = _value(key, text)
    return training_settings(options.method, values)


def _corpus_settings(folder: Path, target: Target, seed: int) -> CorpusSettings:
    """A corpus that is there goes on with its own settings."""
    if (folder / MANIFEST).is_file():
        return CorpusSettings.parse(Corpus.open(folder).manifest["settings"], where=str(folder))
    defaults = CorpusSettings(seed=seed)
    return defaults.replace(max_len=min(defaults.max_len, target.context_len))


def _value(key: str, text: str) -> Any:
    """A YAML value; besides, 1e-3 is a number, which YAML takes for a text."""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {key}: {text!r:.80} is not a YAML value.") from error
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _prompts(files: Sequence[Path]) -> list[GivenPrompt]:
    return [prompt for file in files for prompt in read_prompts(file)]
