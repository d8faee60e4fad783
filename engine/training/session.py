"""A training session: trains on a corpus, evaluates at intervals, writes weights and card.

The drafter is evaluated by decoding from held-out prompts.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from engine import metrics
from engine.config import Limits, Settings, setting
from engine.decode import decode
from engine.drafters.base import BuildContext
from engine.drafters.method import MethodConfig
from engine.metrics import Metrics, measure
from engine.model.corpus import Corpus, Entry
from engine.model.loading import load_target
from engine.model.sources import TargetSpec, atomic_write, partial_folder, writing
from engine.model.target import Target
from engine.training.corpus.dialogues import GivenPrompt
from engine.training.corpus.writer import versions
from engine.training.packs import FeatureStore
from engine.training.recipe import TrainSettings
from engine.training.trainer import Trainer, TrainMetrics, keep_freed_memory

LOOK_PACKS, LOOK_EVERY = 2, 8
"""Packs of held-out dialogues ranked per look between two evaluations, and the minimum number of
steps between two looks."""
LOG_ENTRIES = 120
"""Approximate number of evenly spaced entries of the training log on a card."""


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt to decode from."""

    category: str
    prompt_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Score:
    """Acceptance on some prompts; `mat` is 1 + accepted draft tokens / steps."""

    mat: float
    num_prompts: int
    num_tokens: int
    num_steps: int
    num_accepted: int

    @classmethod
    def of(cls, runs: Sequence[Metrics]) -> Score:
        steps = sum(run.num_steps for run in runs)
        accepted = sum(run.num_accepted for run in runs)
        mat = metrics.mat(accepted, steps) or 1.0
        return cls(mat, len(runs), sum(run.num_new_tokens for run in runs), steps, accepted)


def held_out_questions(
    corpus: Corpus, entries: Sequence[Entry], per_category: int, room: int
) -> list[Question]:
    """The first turns of held-out dialogues, up to `per_category` per category.

    Args:
        room: tokens that a prompt must leave within the corpus's maximum length.
    """
    questions: dict[str, list[Question]] = defaultdict(list)
    longest = corpus.manifest["settings"]["max_len"]
    for entry in sorted(entries, key=lambda e: e.number):
        if not entry.spans or len(questions[entry.category]) >= per_category:
            continue
        start = entry.spans[0][0]
        if 0 < start <= longest - min(room, longest // 2):
            ids = tuple(int(i) for i in entry.token_ids[:start])
            questions[entry.category].append(Question(entry.category, ids))
    return [question for category in sorted(questions) for question in questions[category]]


def given_questions(target: Target, prompts: Sequence[GivenPrompt]) -> list[Question]:
    """First turns of a file's prompts, rendered by the chat template if there is one."""
    questions = []
    for prompt in prompts:
        turn = {"role": "user", "content": prompt.turns[0]}
        is_chat = target.has_chat_template
        ids = target.encode_chat([turn]) if is_chat else target.encode(prompt.turns[0])
        questions.append(Question(prompt.category, tuple(ids)))
    return questions


def score(
    target: Target,
    config: MethodConfig,
    questions: Sequence[Question],
    *,
    max_new_tokens: int = 128,
    cache_dir: Path,
) -> dict[str, Score]:
    """Greedy acceptance per category, and overall under "overall".

    Args:
        cache_dir: for downloads, if the drafter needs another model.

    Raises DrafterError: the drafter does not fit the target.
    """
    limits = Limits(max_new_tokens=max_new_tokens)
    runs: dict[str, list[Metrics]] = defaultdict(list)
    with build_context(target, cache_dir) as context:
        drafter = config.build(context)
        for question in questions:
            run = measure(decode(target, drafter, question.prompt_ids, limits=limits))
            runs[question.category].append(run)
    runs_by_category = dict(sorted(runs.items()))
    runs_by_category["overall"] = list(chain.from_iterable(runs_by_category.values()))
    return {category: Score.of(runs) for category, runs in runs_by_category.items()}


@contextmanager
def build_context(target: Target, cache_dir: Path) -> Iterator[BuildContext]:
    """A context for building drafters; models that they load are closed at the end."""
    where: dict[str, Any] = {"device": str(target.device), "cache_dir": cache_dir}
    with ExitStack() as stack:

        def load(spec: TargetSpec) -> Target:
            companion = load_target(spec, dtype=target.precision.companion, **where)
            return stack.enter_context(closing(companion))

        yield BuildContext(target, TargetSpec.of_path_or_hub, load)


def score_table(scores: Mapping[str, Score]) -> Iterator[str]:
    """The lines of a Markdown table."""
    yield "| category | MAT | new tokens | prompts |"
    yield "|---|---|---|---|"
    for category, row in scores.items():
        yield f"| {category} | {row.mat:.2f} | {row.num_tokens} | {row.num_prompts} |"


def save_weights(trainer: Trainer, folder: Path) -> None:
    """Write config and weights; each file is replaced atomically."""
    with partial_folder(folder) as partial, writing(folder):
        with trainer.average.applied():
            trainer.student.save(partial, trainer.settings.weights_dtype)
        for file in sorted(partial.iterdir()):
            os.replace(file, folder / file.name)


def evaluate(
    trainer: Trainer,
    folder: Path,
    questions: Sequence[Question],
    *,
    cache_dir: Path,
    max_new_tokens: int = 128,
) -> dict[str, Score]:
    """Save the current weights, decode the questions with them, and write the card."""
    save_weights(trainer, folder)
    with trainer.average.applied():
        rates = trainer.held_out_rates()
    config = trainer.settings.decoding(folder, rates)
    scores = score(
        trainer.target, config, questions, max_new_tokens=max_new_tokens, cache_dir=cache_dir
    )
    values = card(trainer, rates, scores, config)
    files = {
        "card.json": json.dumps(values, indent=2) + "\n",
        "README.md": _markdown(values, scores),
    }
    for name, text in files.items():
        with atomic_write(folder / name) as partial:
            partial.write_text(text, encoding="utf-8")
    return scores


def card(
    trainer: Trainer,
    rates: Sequence[Sequence[float]],
    scores: Mapping[str, Score],
    config: MethodConfig,
) -> dict[str, Any]:
    """The description of these weights, as plain data."""
    target, corpus, settings = trainer.target, trainer.corpus, trainer.settings
    plain = settings.model_dump(mode="json")
    name, initial = target.name, plain["begin_with"]
    name = Path(name).name if Path(name).exists() else name  # no local paths
    plain["begin_with"] = initial and Path(initial).name
    log, every = trainer.log, max(1, len(trainer.log) // LOG_ENTRIES)
    return {
        "method": settings.method,
        "paper": settings.paper,
        "target": name,
        "target_weights": target.provenance.get("weights"),
        "num_parameters": sum(p.numel() for p in trainer.student.parameters()),
        "dtype": settings.weights_dtype,
        "data": {
            "what": "self-distillation: the target's own answers to prompts it made itself"
            " or was given",
            "corpus_settings": corpus.manifest["settings"],
            "num_dialogues": len(trainer.train),
            "num_tokens": trainer.num_train_tokens,
            "num_answer_tokens": sum(b - a for e in trainer.train for a, b in e.spans),
            "categories": dict(sorted(Counter(e.category for e in trainer.train).items())),
            "num_held_out_dialogues": len(trainer.held_out),
        },
        "settings": plain,
        "steps": trainer.step,
        "num_tokens_read": round(trainer.num_train_tokens * settings.epochs),
        "seconds": round(trainer.seconds, 1),
        "versions": versions(),
        "training_log": [e for i, e in enumerate(log) if i % every == 0 or e is log[-1]],
        "rank_rates": [list(ranks) for ranks in rates],
        "evaluated_with": config.model_dump(mode="json", exclude={"speculative_model"}),
        "held_out": {category: asdict(row) for category, row in scores.items()},
    }


def _markdown(values: Mapping[str, Any], scores: Mapping[str, Score]) -> str:
    data, rates = values["data"], values["rank_rates"]
    shares = ", ".join(f"{name} {count}" for name, count in data["categories"].items())
    made_with = ", ".join(f"{name} {version}" for name, version in values["versions"].items())
    rows = [
        f"| {depth} | {' | '.join(f'{rate:.3f}' for rate in ranks[:4])} | {sum(ranks):.3f} |"
        for depth, ranks in enumerate(rates, start=1)
    ]
    table, rows_text = "\n".join(score_table(scores)), "\n".join(rows)
    loss = values["training_log"][-1]["loss"]
    settings = "; ".join(f"{name} {value}" for name, value in values["settings"].items())
    return f"""\
# {values["method"]} drafter for {values["target"]}

{values["num_parameters"]:,} parameters, {values["dtype"]}; arXiv {values["paper"]}.

Trained by self-distillation on {data["num_tokens"]:,} tokens in {data["num_dialogues"]:,} \
dialogues ({data["num_answer_tokens"]:,} tokens of answers) with the target's own answers: \
{shares}. {values["steps"]:,} steps over {values["num_tokens_read"]:,} tokens in \
{values["seconds"] / 60:.1f} minutes; last loss {loss:.3f}.

Acceptance when decoding greedily, on prompts that were not trained on \
(MAT = 1 + accepted draft tokens / steps):

{table}

How often each rank is right along the true text, per depth, on held-out dialogues:

| depth | rank 0 | rank 1 | rank 2 | rank 3 | ranks 0–9 |
|---|---|---|---|---|---|
{rows_text}

Settings: {settings}.

Made with {made_with}.
"""


class SessionSettings(Settings):
    """Settings of a session, in addition to those of training."""

    feature_gib: float = setting(
        0.0,
        "Feature cache (GiB)",
        "disk space for the target's features, computed once; 0 = none",
        ge=0.0,
        le=1e5,
    )
    eval_prompts: int = setting(
        4, "Prompts per category", "held-out prompts per category to measure MAT on", ge=1, le=1000
    )
    eval_tokens: int = setting(
        128, "Tokens per prompt", "new tokens per held-out prompt", ge=2, le=8192
    )
    evals: int = setting(
        1,
        "MAT measurements",
        "how many times MAT is measured, evenly spaced over the training",
        ge=1,
        le=100,
    )
    looks: int = setting(
        0,
        "Rank measurements",
        "how many times held-out texts are ranked, evenly spaced over the training",
        ge=0,
        le=1000,
    )


@dataclass(frozen=True, slots=True)
class HeldOutRates:
    """Per depth, the share of each rank on held-out dialogues after `step` steps."""

    step: int
    rates: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """MAT on held-out prompts; weights and card are in the output folder."""

    step: int
    scores: dict[str, Score]


def train(
    target: Target,
    corpus: Corpus,
    output: Path,
    recipe: TrainSettings,
    settings: SessionSettings,
    *,
    cache_dir: Path,
    eval_prompts: Sequence[GivenPrompt] = (),
) -> Generator[TrainMetrics | HeldOutRates | Evaluation]:
    """Train one drafter into `output`, or resume the run there; yields metrics after every step.

    Measurements after a step are yielded before its metrics, so that a run interrupted at these is
    complete.

    Raises ConfigError: the corpus does not fit, or the run in `output` has other settings.
    """
    if target.device.type == "cpu" and sys.platform == "linux":
        keep_freed_memory()
    room = int(settings.feature_gib * 2**30)
    store = FeatureStore(corpus.folder / "features", room) if room else None
    trainer = Trainer(target, corpus, recipe, output / "training", store=store)
    questions = given_questions(target, eval_prompts) or held_out_questions(
        corpus, trainer.held_out, settings.eval_prompts, settings.eval_tokens
    )
    marks = {round(trainer.num_steps * (i + 1) / settings.evals) for i in range(settings.evals)}
    count = min(settings.looks, trainer.num_steps // LOOK_EVERY)
    looks = {round(trainer.num_steps * (i + 1) / count) for i in range(count)}
    options: dict[str, Any] = {"cache_dir": cache_dir, "max_new_tokens": settings.eval_tokens}
    steps = trainer.steps()
    # Closing `steps` saves an interrupted run.
    with closing(steps):
        for metrics in steps:
            if metrics.step in looks:
                with trainer.average.applied():
                    rates = trainer.held_out_rates(LOOK_PACKS)
                yield HeldOutRates(trainer.step, rates)
            if metrics.step in marks and metrics.step < trainer.num_steps:
                yield Evaluation(trainer.step, evaluate(trainer, output, questions, **options))
            yield metrics
        yield Evaluation(trainer.step, evaluate(trainer, output, questions, **options))
