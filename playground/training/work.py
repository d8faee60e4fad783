"""The work of one training on a loaded target: write the texts, fit the budget, train, measure.

`outlook` estimates it beforehand.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import closing, contextmanager
from itertools import accumulate
from operator import mul
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from filelock import FileLock

import presets
from engine.config import Limits
from engine.decode import decode
from engine.drafters import parse_method
from engine.drafters.base import BuildContext, Drafter
from engine.drafters.method import MethodConfig
from engine.errors import PlaygroundError
from engine.formats import plural
from engine.metrics import chain_mat, measure
from engine.model.corpus import DIALOGUES, MANIFEST, Corpus
from engine.model.files import read_settings
from engine.model.sources import atomic_write, whole_folder, writing
from engine.model.target import Target
from engine.model.tokenizer import decode as text_of
from engine.training import session
from engine.training.corpus.writer import corpus_settings, extend_corpus
from engine.training.packs import split_held_out
from engine.training.session import Evaluation, HeldOutRates, Question, Score
from engine.training.trainer import Trainer, TrainMetrics
from engine.tuning.controller import build_drafter
from playground.host.catalog import Catalog
from playground.host.speedup import speedup_of
from playground.host.task import approximate_duration
from playground.training.folder import CARD, Card, TrainingFolder, TrainingProgress
from playground.training.plan import PART_OF_MINUTES, TrainPlan
from storage import PLAIN, RunLog, RunQuery, StorageError, TimedRequest

SAMPLE_DIALOGUES, SAMPLE_STEPS = 24, 3
"""Dialogues and steps of the measurement of the training speed."""
NOTE_S = 0.5
"""Seconds between two writes of the progress."""
TEXT_CHARS = 1500
CORPUS_BYTES, STATE_BYTES = 5, 14
"""Bytes on disk of a token, and of a parameter with its optimizer state."""
WRITING, LEARNING = 3.0, 8.0
"""Assumed speeds relative to plain decoding, until they are measured."""
Event = TrainingProgress | TrainMetrics | HeldOutRates | Evaluation


class Speeds:
    """A file of measured speeds on this machine: tokens per second of writing and of training."""

    def __init__(self, file: Path, device: str = "auto") -> None:
        self._file, self._device = file, device

    def read(self, plan: TrainPlan) -> dict[str, float]:
        """Measured speeds `write` and `train` of a plan; the latter of the same recipe only."""
        values = self._all()
        return {name: values[key] for name, key in self._keys(plan).items() if key in values}

    def note(self, plan: TrainPlan, name: str, tok_s: float) -> None:
        lock = FileLock(f"{self._file}.lock")
        with writing(self._file.parent), lock, atomic_write(self._file) as partial:
            values = self._all() | {self._keys(plan)[name]: tok_s}
            partial.write_text(json.dumps(values, indent=2), encoding="utf-8")

    def _keys(self, plan: TrainPlan) -> dict[str, str]:
        where = f"{plan.target.name}, {plan.dtype}, {self._device}"
        recipe = plan.recipe.model_dump_json(exclude={"seed", "epochs"})
        digest = hashlib.sha256(recipe.encode()).hexdigest()[:8]
        return {"write": where, "train": f"{where}, {plan.method} {digest}"}

    def _all(self) -> dict[str, Any]:
        try:
            return read_settings(self._file)
        except PlaygroundError:  # missing or damaged
            return {}


class TrainingWork:
    """The work of one training; a new object continues where an earlier one stopped.

    Attributes:
        plan: fitted to its budget once the texts are written.
    """

    def __init__(
        self, plan: TrainPlan, folder: TrainingFolder, speeds: Speeds, *, cache_dir: Path
    ) -> None:
        self.plan, self.folder = plan, folder
        self._speeds, self._cache_dir = speeds, cache_dir
        self._standing = folder.progress.replace(status="running", error="")
        self._noted_s = self._paused_s = 0.0

    @property
    def activity(self) -> str:
        """What it does, in words."""
        return "writing texts" if self._standing.phase == "writing" else self._standing.phase

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Lock the folder within the block, and record how the training ended.

        Raises ConfigError: another process trains into the folder.
        """
        outcome: dict[str, Any] = {"status": "failed"}
        with self.folder.running():
            self.folder.write_plan(self.plan)
            self.note(phase="waiting")
            try:
                yield
                outcome["status"] = "completed"
            except (CancelledError, KeyboardInterrupt):
                outcome["status"] = "cancelled"
                raise
            except (PlaygroundError, StorageError) as fault:
                outcome["error"] = str(fault)
                raise
            finally:
                self.note(left_s=None, **outcome)

    def run(self, target: Target) -> Generator[Event]:
        """All of the work, a step at a time; closing the generator saves a checkpoint."""
        if not self.plan.fitted:
            self.plan = self.plan.replace(corpus=own_corpus(self.plan, target))
            with closing(self._write(target)) as events:
                for event in events:
                    began = time.monotonic()
                    yield event
                    self._paused_s += time.monotonic() - began
        yield from self._train(target)

    def scores(self, target: Target, tell: Callable[[Event], None]) -> dict[str, Score]:
        """Train to the end; returns the scores of the last evaluation."""
        scores: dict[str, Score] = {}
        with self.recorded(), closing(self.run(target)) as events:
            for event in events:
                if isinstance(event, Evaluation):
                    scores = event.scores
                tell(event)
        return scores

    def note(self, *, at_once: bool = True, **changes: object) -> TrainingProgress:
        """Update the progress, and write it at once or at the next interval."""
        self._standing = self._standing.replace(**changes)
        if at_once or time.monotonic() - self._noted_s > NOTE_S:
            self.folder.write_progress(self._standing)
            self._noted_s = time.monotonic()
        return self._standing

    # ---- the texts

    def _write(self, target: Target) -> Generator[Event]:
        """Let the target write enough texts, then fit the plan to the budget."""
        plan = self.plan
        tok_s = self._speeds.read(plan).get("train")
        began, before = self._now_s(), self._standing.seconds
        yield self.note(phase="reading the texts")
        first: int | None = None
        text = self._standing.text
        with closing(texts(plan, target)) as written:
            for corpus in written:
                count, some = corpus.num_tokens, len(corpus.entries) >= SAMPLE_DIALOGUES
                first = count if first is None else first
                if tok_s is None and plan.budget.minutes and some:
                    yield self.note(phase="timing a few steps", corpus_tokens=count)
                    tok_s = self._learning_speed(target, corpus)
                seconds = before + self._now_s() - began
                left_s = self._left_s(seconds)
                if count != self._standing.corpus_tokens and corpus.entries:
                    text = _text(target, corpus)
                yield self.note(
                    at_once=False,
                    phase="writing",
                    seconds=seconds,
                    corpus_tokens=count,
                    text=text,
                    left_s=left_s if plan.budget.minutes else None,
                )
                if len(corpus.entries) > 1 and plan.is_written(count, left_s, tok_s):
                    break
        seconds = self._now_s() - began
        corpus = Corpus.open(plan.corpus)
        if (new := corpus.num_tokens - (first or 0)) and seconds > 5:
            self._speeds.note(plan, "write", new / seconds)
        if tok_s is None and plan.budget.minutes:
            tok_s = self._learning_speed(target, corpus)
        seconds = before + self._now_s() - began
        self.plan = plan.fit(corpus.num_tokens, self._left_s(seconds), tok_s)
        self.folder.write_plan(self.plan)
        text = _text(target, corpus)
        yield self.note(seconds=seconds, corpus_tokens=corpus.num_tokens, text=text)

    def _now_s(self) -> float:
        """A clock that stands still while the training is paused."""
        return time.monotonic() - self._paused_s

    def _left_s(self, seconds: float) -> float:
        return PART_OF_MINUTES * 60 * (self.plan.budget.minutes or 0.0) - seconds

    def _learning_speed(self, target: Target, corpus: Corpus) -> float | None:
        """Tokens per second of a few steps on the first texts; None if there is only one text."""
        some = Corpus(corpus.folder, corpus.manifest, corpus.entries[:SAMPLE_DIALOGUES])
        if len(some.entries) < 2:
            return None
        with TemporaryDirectory(prefix="training-speed-") as folder:
            recipe = self.plan.recipe
            trainer = Trainer(target, some, recipe, Path(folder))
            with closing(trainer.steps()) as steps:
                times = [one.seconds for one, _ in zip(steps, range(SAMPLE_STEPS), strict=False)]
            per_step = (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else times[0]
            tokens = trainer.num_train_tokens * recipe.epochs / trainer.num_steps
        tok_s = tokens / max(per_step, 1e-6)
        self._speeds.note(self.plan, "train", tok_s)
        return tok_s

    # ---- the drafter

    def _train(self, target: Target) -> Generator[Event]:
        yield self.note(phase="training")
        corpus = Corpus.open(self.plan.corpus)
        began: TrainMetrics | None = None
        last: TrainMetrics | None = None
        events = session.train(
            target,
            corpus,
            self.folder.path,
            self.plan.recipe,
            self.plan.session,
            cache_dir=self._cache_dir,
            eval_prompts=self.plan.eval_prompts,
        )
        with closing(events):
            for event in events:
                if isinstance(event, TrainMetrics):
                    began, last = began or event, event
                    self._note_step(event, began)
                elif isinstance(event, HeldOutRates):
                    self.folder.add("held out", event.step, top1=[r[0] for r in event.rates])
                else:
                    self._note_evaluation(target, corpus, event)
                yield event
        if began and last and (seconds := last.seconds - began.seconds) > 5:
            tok_s = (last.num_tokens - began.num_tokens) / seconds
            self._speeds.note(self.plan, "train", tok_s)

    def _note_step(self, event: TrainMetrics, began: TrainMetrics) -> None:
        per_step = event.seconds / event.step
        if event.step > began.step:
            per_step = (event.seconds - began.seconds) / (event.step - began.step)
        left_s = per_step * (event.num_steps - event.step)
        due = event.step in (1, event.num_steps) or time.monotonic() - self._noted_s > NOTE_S
        if due:
            self.folder.add("loss", event.step, loss=event.loss, seconds=event.seconds)
        self.note(at_once=due, step=event.step, num_steps=event.num_steps, left_s=left_s)

    def _note_evaluation(self, target: Target, corpus: Corpus, event: Evaluation) -> None:
        """Record the MAT, and the speedup over plain decoding."""
        card = json.loads((self.folder.path / CARD).read_text("utf-8"))
        values = {**card["evaluated_with"], "speculative_model": str(self.folder.path)}
        config = parse_method(values | {"drafting": "auto"})
        settings = self.plan.session
        held_out = split_held_out(corpus, len(corpus.entries))[1]
        questions = session.held_out_questions(corpus, held_out, 1, settings.eval_tokens)
        with session.build_context(target, self._cache_dir) as context:
            speedup = speed_beside_plain(context, config, questions, settings.eval_tokens)
        mat, top1 = event.scores["overall"].mat, [ranks[0] for ranks in card["rank_rates"]]
        self.folder.add("measured", event.step, mat=mat, speedup=speedup, top1=top1)


def own_corpus(plan: TrainPlan, target: Target) -> Path:
    """The corpus that a training may extend: a copy of a shipped one, written by these weights."""
    if plan.corpora is None or not (plan.corpus / MANIFEST).is_file():
        return plan.corpus
    own = plan.corpora / plan.corpus.name
    if not Corpus.open(plan.corpus).is_made_by(target):
        sizes = target.vocab_size, target.hidden_size, target.num_layers
        weights = repr((target.provenance.get("weights"), sizes))
        return own.with_name(f"{own.name}-{hashlib.sha256(weights.encode()).hexdigest()[:8]}")
    if not own.exists():
        with whole_folder(own) as temp:
            shutil.copytree(plan.corpus, temp)
    return own


def texts(plan: TrainPlan, target: Target) -> Generator[Corpus]:
    """The corpus after every step of writing; only once if it is already large enough."""
    settings = corpus_settings(plan.corpus, target, seed=plan.seed)
    if plan.learn_from != "shipped" and not (plan.corpus / MANIFEST).is_file():
        settings = settings.replace(given_share=1.0)
    yield from extend_corpus(
        target,
        plan.corpus,
        settings,
        presets.dialogues(),
        num_tokens=plan.budget.tokens or 10**12,
        rows=plan.rows,
        prompts=plan.prompts,
    )


def _text(target: Target, corpus: Corpus) -> str:
    assert target.tokenizer is not None  # or it could not have written
    ids = corpus.entries[-1].token_ids.tolist()
    return text_of(target.tokenizer, ids, skip_special=True)[-TEXT_CHARS:]


def speed_beside_plain(
    context: BuildContext, config: MethodConfig, questions: Sequence[Question], num_tokens: int
) -> float | None:
    """Speedup of a method over plain decoding, alternating on each prompt.

    None if the texts are too short, or the baseline is unreliable.
    """
    limits = Limits(max_new_tokens=num_tokens, ignore_eos=True)
    plain = parse_method({"decoding_type": PLAIN}).build(context)
    drafter = build_drafter(config, context)

    def timed(prompt: int, one: Drafter) -> TimedRequest:
        ids = questions[prompt].prompt_ids
        run = measure(decode(context.target, one, ids, limits=limits))
        return TimedRequest.timed(run, prompt=str(prompt))

    speedup = speedup_of([(timed(n, drafter), timed(n, plain)) for n in range(len(questions))])
    return None if speedup is None else speedup.ratio


def predicted_mat(top1: Sequence[float], depth: int) -> float:
    """MAT of a chain of top-1 tokens: 1 + Σ over depths of the product of their accuracies.

    A drafter with a single accuracy has it at every depth.
    """
    shares = [*top1, *[*top1[-1:]] * max(0, depth - len(top1))]
    return chain_mat([*accumulate(shares, mul)], depth)


# ---- estimates


def outlook(plan: TrainPlan, catalog: Catalog, log: RunLog, speeds: Speeds) -> str:
    """Time, disk space and expected MAT of a plan on this machine, in sentences."""
    cards = _cards(plan, catalog)
    estimate = _estimate_text(plan, log, speeds, cards[0].num_parameters if cards else 0)
    if plan.prompts and plan.learn_from != "shipped":
        estimate = f"{plural(len(plan.prompts), 'prompt')} to answer. {estimate}"
    if not cards:
        return f"{estimate} MAT begins at 1; most of the gain comes with the first million tokens."
    best = max(cards, key=lambda card: card.mat)
    return (
        f"{estimate} For comparison: a head of this kind for this target reached MAT "
        f"{best.mat:.2f} after reading {best.num_tokens_read / 1e6:.1f} million tokens."
    )


def _estimate_text(plan: TrainPlan, log: RunLog, speeds: Speeds, num_parameters: int) -> str:
    """Time and disk space, from speeds measured with this target or from plain decoding's."""
    measured = speeds.read(plan)
    query = RunQuery(target=plan.target.name, decoding_type=PLAIN, limit=1)
    plain = next((run.tok_s for run in log.rows(query) if run.tok_s), 0.0)
    write = measured.get("write") or WRITING * plain
    learn = measured.get("train") or LEARNING * plain
    present, epochs = _tokens_in(plan.corpus), plan.recipe.epochs
    if not learn or (not write and present < (plan.budget.tokens or 1)):
        return "Not measured with this target yet: the first steps measure it."
    most = plan.budget.tokens or 10**12
    if plan.budget.minutes is not None:
        left_s = 60 * PART_OF_MINUTES * plan.budget.minutes
        spare_s = left_s - present * epochs / learn
        new = spare_s / (1 / write + epochs / learn) if write else 0.0
        most = min(most, int(present + new if spare_s > 0 else left_s * learn / epochs))
    written = max(0, most - present)
    size: float = CORPUS_BYTES * written + STATE_BYTES * num_parameters
    size += min(plan.session.feature_gib * 2**30, most * 2**12)
    is_measured = "train" in measured and (not written or "write" in measured)
    writing = "no writing"
    if written:
        writing = f"{approximate_duration(written / write)} of writing ({written:,} tokens)"
    by = "as measured here" if is_measured else "estimated from plain decoding"
    return (
        f"{writing.capitalize()}, {approximate_duration(most * epochs / learn)} of training, which "
        f"reads {most * epochs:,.0f} tokens, {size / 1e6:,.0f} MB of disk; {by}."
    )


def _cards(plan: TrainPlan, catalog: Catalog) -> list[Card]:
    """The cards of drafters of this kind for this target, each once."""
    own = [one for one in catalog.presets.values() if one.target == plan.target.name]
    names = dict.fromkeys(getattr(one.config, "speculative_model", None) for one in own)
    cards = [TrainingFolder(Path(presets.locate(name))).card for name in filter(None, names)]
    return [card for card in cards if card is not None and card.method == plan.method]


def _tokens_in(corpus: Path) -> int:
    """Approximate number of tokens in a corpus, from its file size."""
    file = corpus / DIALOGUES
    return int(file.stat().st_size / CORPUS_BYTES) if file.is_file() else 0
