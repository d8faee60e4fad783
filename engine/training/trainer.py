"""The training loop: packs through the target, a student's loss, an optimizer, checkpoints."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Collection, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.model.corpus import Corpus
from engine.model.target import Target
from engine.training.checkpoint import State, load_state, save_state
from engine.training.dialogue import seed_of
from engine.training.optimizers import Optimizers
from engine.training.packs import FeatureStore, Teacher, arrange, split
from engine.training.recipe import TrainSettings
from engine.training.student import Student


@dataclass(frozen=True, slots=True)
class Progress:
    """A report from the loop.

    Attributes:
        loss: mean since the last report.
        rates: per depth, the share of rows that each rank got right, since the last report.
        seconds: of training so far, earlier sittings included.
    """

    step: int
    num_steps: int
    loss: float
    rates: tuple[tuple[float, ...], ...]
    rate: float
    seconds: float
    num_tokens: int

    @property
    def top1(self) -> tuple[float, ...]:
        return tuple(ranks[0] for ranks in self.rates)

    def top(self, k: int) -> tuple[float, ...]:
        """Share of rows whose token was among the best k, per depth."""
        return tuple(sum(ranks[:k]) for ranks in self.rates)


class Trainer:
    """One training run: of a method, for a target, on the dialogues that the corpus holds now.

    Attributes:
        student: what is trained.
        settings: as given.
    """

    def __init__(
        self,
        target: Target,
        corpus: Corpus,
        settings: TrainSettings,
        folder: Path,
        *,
        num_dialogues: int | None = None,
        store: FeatureStore | None = None,
    ) -> None:
        """Prepare, or pick up the run that is in `folder`.

        Args:
            num_dialogues: train on the first so many; None = all, or as many as the run in
                `folder` began with.
            store: keeps the target's features, so that they are computed once.

        Raises:
            ConfigError: the corpus is too small or another target's, or the run in `folder` was
                made with other settings.
        """
        self.target = target
        self.corpus = corpus
        self.settings = settings
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        state = self._found_state(num_dialogues)
        count = num_dialogues or (state.run["dialogues"] if state else len(corpus.entries))
        if count > len(corpus.entries):
            raise ConfigError(
                f"The run in {folder} began with {count} dialogues, but the corpus in "
                f"{corpus.folder} has {len(corpus.entries)}. Give the corpus it began with."
            )
        self._run = {**self._identity(), "dialogues": count}
        self.train, self.held_out = split(corpus, count)
        self._packs = arrange(corpus, self.train, settings.pack_tokens, settings.seed)
        self._order: tuple[int, list[int]] = (-1, [])
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)
            self.student = settings.student(target, corpus, self.train)
        if settings.begin_with is not None:
            self.student.load(Path(settings.begin_with))
        self.teacher = Teacher(
            target,
            corpus,
            self.student.needs,
            self.student.vocabulary,
            answers_only=settings.answers_only,
            store=store,
        )
        self._optimizer = Optimizers(
            self.student, settings.optimizer, weight_decay=settings.weight_decay
        )
        self._average = {
            name: value.detach().clone() for name, value in self.student.named_parameters()
        }
        self.step = 0
        self.seconds = 0.0
        self.log: list[dict[str, Any]] = []
        self._stepping = False
        if state is not None:
            self._restore(state)

    def _identity(self) -> dict[str, Any]:
        """What makes a run this run and no other."""
        return {
            "method": self.settings.method,
            "settings": self.settings.model_dump(mode="json"),
            "vocab_size": self.target.vocab_size,
            "corpus seed": self.corpus.manifest["settings"]["seed"],
        }

    def _found_state(self, num_dialogues: int | None) -> State | None:
        """The state in the folder; without a number given, its own number of dialogues stands."""
        run = self._identity()
        if num_dialogues is not None:
            run["dialogues"] = num_dialogues
        return load_state(self.folder, run, self.target.device)

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the whole run."""
        packs = self.settings.epochs * len(self._packs) / self.settings.packs_per_step
        return max(1, math.ceil(packs))

    @property
    def num_train_tokens(self) -> int:
        return sum(entry.length for entry in self.train)

    def steps(
        self,
        *,
        report_every: int = 20,
        save_every_s: float = 120.0,
        stops: Collection[int] = (),
    ) -> Generator[Progress]:
        """Train to the end; yields a report now and then, after `stops`, and after the last step.

        A checkpoint is written every `save_every_s` seconds, at the end, and when the iterator is
        closed early.
        """
        began, saved, tally = time.perf_counter(), time.perf_counter(), _Tally()
        seconds_before = self.seconds
        try:
            while self.step < self.num_steps:
                self._one_step(tally)
                self.seconds = seconds_before + time.perf_counter() - began
                due = self.step % report_every == 0 or self.step in stops
                if due or self.step == self.num_steps:
                    progress = tally.progress(self)
                    self.log.append(
                        {
                            "step": progress.step,
                            "loss": progress.loss,
                            "top1": list(progress.top1),
                            "top4": list(progress.top(4)),
                            "tokens": progress.num_tokens,
                            "seconds": progress.seconds,
                        }
                    )
                    tally = _Tally()
                    yield progress
                if time.perf_counter() - saved > save_every_s:
                    self.save_state()
                    saved = time.perf_counter()
        finally:
            # What interrupts a step may leave weights that are half updated.
            if not self._stepping:
                self.save_state()

    def _one_step(self, tally: _Tally) -> None:
        settings = self.settings
        self._stepping = True
        self._optimizer.set_rate(rate_at(self.step, self.num_steps, settings))
        self._optimizer.zero_grad()
        generator = torch.Generator().manual_seed(seed_of(settings.seed, "step", self.step))
        for i in range(settings.packs_per_step):
            entries = self._packs[self._pack_at(self.step, i)]
            pack = self.teacher.read(entries, length=settings.pack_tokens)
            with self.autocast():
                judged = self.student.judge(pack, generator)
            (judged.loss / settings.packs_per_step).backward()
            tally.add(judged.loss.detach(), judged.hits, judged.rows, len(pack.tokens))
        torch.nn.utils.clip_grad_norm_(self.student.parameters(), settings.clip)
        self._optimizer.step()
        self.step += 1
        if settings.ema:
            self._update_average()
        self._stepping = False

    def _pack_at(self, step: int, i: int) -> int:
        """Which pack is the i-th of a step: every epoch has its own order."""
        at = step * self.settings.packs_per_step + i
        epoch, place = divmod(at, len(self._packs))
        if self._order[0] != epoch:
            order = list(range(len(self._packs)))
            random.Random(seed_of(self.settings.seed, "epoch", epoch)).shuffle(order)
            self._order = epoch, order
        return self._order[1][place]

    def autocast(self) -> AbstractContextManager[None]:
        """bfloat16 matrix products where the target computes in half precision."""
        half = self.target.dtype in (torch.bfloat16, torch.float16)
        # float16 would need a scaled loss; bfloat16 does not. The student's weights are float32.
        return torch.autocast(self.target.device.type, dtype=torch.bfloat16, enabled=half)

    @torch.no_grad()
    def _update_average(self) -> None:
        # Young averages follow faster, or the first weights would linger.
        decay = min(self.settings.ema, (1 + self.step) / (10 + self.step))
        for name, value in self.student.named_parameters():
            self._average[name].lerp_(value, 1 - decay)

    @contextmanager
    def averaged(self) -> Iterator[Student]:
        """The student to keep: with averaged weights for the time being, if there is an average."""
        if not self.settings.ema:
            yield self.student
            return
        trained = {name: value.detach().clone() for name, value in self.student.named_parameters()}
        self.student.load_state_dict(self._average, strict=False)
        try:
            yield self.student
        finally:
            self.student.load_state_dict(trained, strict=False)

    def save_state(self) -> None:
        """Write a checkpoint."""
        state = State(
            self.step,
            self._run,
            self.student.state_dict(),
            self._optimizer.state_dict(),
            self._average if self.settings.ema else {},
            self.log,
            self.seconds,
        )
        save_state(self.folder, state)

    def close(self) -> None:
        """Take the hooks off the target."""
        self.teacher.close()

    def _restore(self, state: State) -> None:
        self.step, self.seconds, self.log = state.step, state.seconds, state.log
        self.student.load_state_dict(state.student)
        self._optimizer.load_state_dict(state.optimizer)
        if state.average:
            self._average = state.average


class _Tally:
    """Sums since the last report; they stay on the device until it is due."""

    def __init__(self) -> None:
        self._loss: Tensor | float = 0.0
        self._hits: Tensor | float = 0.0
        self._rows: Tensor | float = 0.0
        self._packs = 0

    def add(self, loss: Tensor, hits: Tensor, rows: Tensor, tokens: int) -> None:
        self._loss = self._loss + loss
        self._hits = self._hits + hits
        self._rows = self._rows + rows
        self._packs += 1

    def progress(self, trainer: Trainer) -> Progress:
        assert isinstance(self._hits, Tensor) and isinstance(self._rows, Tensor)
        rates = self._hits / self._rows[:, None].clamp_min(1)
        share = trainer.step / trainer.num_steps
        return Progress(
            step=trainer.step,
            num_steps=trainer.num_steps,
            loss=float(self._loss) / self._packs,
            rates=tuple(tuple(ranks) for ranks in rates.tolist()),
            rate=rate_at(trainer.step - 1, trainer.num_steps, trainer.settings),
            seconds=trainer.seconds,
            num_tokens=round(share * trainer.settings.epochs * trainer.num_train_tokens),
        )


def rate_at(step: int, num_steps: int, settings: TrainSettings) -> float:
    """Learning rate of a step: a linear rise, then half a cosine."""
    rise = max(1, round(settings.warmup_share * num_steps))
    if step < rise:
        return settings.learning_rate * (step + 1) / rise
    done = (step - rise) / max(1, num_steps - rise)
    low = settings.final_rate_share
    return settings.learning_rate * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * done)))


@torch.no_grad()
def held_out_rates(trainer: Trainer, *, max_packs: int = 16) -> list[list[float]]:
    """Per depth, how often each rank is right on dialogues that were not trained on."""
    settings = trainer.settings
    packs = arrange(trainer.corpus, trainer.held_out, settings.pack_tokens, settings.seed)
    judged = []
    for entries in packs[:max_packs]:
        pack = trainer.teacher.read(entries, length=settings.pack_tokens)
        with trainer.autocast():
            judged.append(trainer.student.judge(pack, None))
    hits = torch.stack([one.hits for one in judged]).sum(dim=0)
    rows = torch.stack([one.rows for one in judged]).sum(dim=0)
    rates: list[list[float]] = (hits / rows[:, None].clamp_min(1)).tolist()
    return rates
