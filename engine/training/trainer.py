"""The training loop: packs through the target, a student's loss, an optimizer, checkpoints.

The order of packs and the noise of a step follow from the seed and the step's number, so weights,
optimizer and step suffice to resume a killed run exactly.
"""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.optim import AdamW

from engine.errors import ConfigError, SourceError
from engine.model.corpus import Corpus, Entry
from engine.model.files import read_pickle
from engine.model.sources import writing
from engine.model.target import Target
from engine.training.corpus.dialogues import seed_of
from engine.training.losses import LossOutput
from engine.training.optimization import AveragedWeights, learning_rate_at
from engine.training.packs import FeatureStore, Teacher, arrange, split
from engine.training.recipe import TrainSettings

CHECKPOINT = "training.pt"
SAVE_EVERY_S = 120.0
HELD_OUT_PACKS = 16
"""At most this many packs of held-out dialogues are evaluated."""


@dataclass(frozen=True, slots=True)
class TrainMetrics:
    """Metrics since the last report, and of training so far.

    Attributes:
        loss: mean per pack.
        rates: per depth, the share of rows that each rank got right.
    """

    step: int
    num_steps: int
    loss: float
    rates: tuple[tuple[float, ...], ...]
    seconds: float
    num_tokens: int

    def top(self, k: int) -> tuple[float, ...]:
        """Share of rows whose token was among the best k, per depth."""
        return tuple(sum(ranks[:k]) for ranks in self.rates)

    @property
    def log_entry(self) -> dict[str, Any]:
        """The entry in the checkpoint and on the training card."""
        return {
            "step": self.step,
            "loss": self.loss,
            "top1": list(self.top(1)),
            "top4": list(self.top(4)),
            "tokens": self.num_tokens,
            "seconds": self.seconds,
        }


class Trainer:
    """One training run: of a method, for a target, on the dialogues that the corpus has now.

    Attributes:
        average: of the student's weights; the final result.
        seconds: of training so far, including earlier sessions.
    """

    def __init__(
        self,
        target: Target,
        corpus: Corpus,
        settings: TrainSettings,
        folder: Path,
        *,
        store: FeatureStore | None = None,
    ) -> None:
        """Begin a run, or resume the one in `folder`.

        Args:
            store: stores the target's features, so that they are computed once.

        Raises ConfigError: the corpus is too small or another target's, or the run in `folder` was
        made with other settings.
        """
        self.target = target
        self.corpus = corpus
        self.settings = settings
        self.folder = folder
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        self._identity = {
            "method": settings.method,
            "settings": settings.model_dump(mode="json"),
            "vocab_size": target.vocab_size,
            "corpus seed": corpus.manifest["settings"]["seed"],
        }
        state = load_state(folder, self._identity, target.device)
        count = self._identity["dialogues"] = self._num_dialogues(state)
        self.train, self.held_out = split(corpus, count)
        self._packs = arrange(self.train, settings.pack_tokens, settings.seed)
        self._order: tuple[int, list[int]] = (-1, [])
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)
            self.student = settings.student(target, self.train)
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
        self._optimizer = AdamW(
            self.student.parameters(),
            betas=(0.9, 0.95),
            weight_decay=settings.weight_decay,
            fused=True,
        )
        self.average = AveragedWeights(self.student, settings.ema)
        self.step = 0
        self.seconds = 0.0
        self.log: list[dict[str, Any]] = []
        self._stepping = False
        if state is not None:
            self._restore(state)

    def _restore(self, state: Mapping[str, Any]) -> None:
        self.step, self.seconds, self.log = state["step"], state["seconds"], state["log"]
        self.student.load_state_dict(state["student"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.average.values = state["average"]

    def _num_dialogues(self, state: Mapping[str, Any] | None) -> int:
        """The number at the run's beginning; ConfigError if the corpus has fewer."""
        available = len(self.corpus.entries)
        count = int(state["run"]["dialogues"]) if state else available
        if count > available:
            raise ConfigError(
                f"The run in {self.folder} began with {count} dialogues, but the corpus in "
                f"{self.corpus.folder} has {available}. Give the corpus it began with."
            )
        return count

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the whole run."""
        packs = self.settings.epochs * len(self._packs) / self.settings.packs_per_step
        return max(1, math.ceil(packs))

    @property
    def num_train_tokens(self) -> int:
        return sum(entry.length for entry in self.train)

    def steps(
        self, *, report_every: int = 20, stops: Collection[int] = ()
    ) -> Generator[TrainMetrics]:
        """Train to the end; yields metrics regularly, after `stops`, and after the last step.

        A checkpoint is written every `SAVE_EVERY_S`, at the end, and when the iterator is closed.
        """
        saved, tally = time.perf_counter(), _Tally()
        began = saved - self.seconds
        try:
            while self.step < self.num_steps:
                self._one_step(tally)
                self.seconds = time.perf_counter() - began
                due = self.step % report_every == 0 or self.step in stops
                if due or self.step == self.num_steps:
                    done = self.step / self.num_steps * self.settings.epochs
                    metrics = TrainMetrics(
                        self.step,
                        self.num_steps,
                        tally.loss,
                        tally.rates,
                        self.seconds,
                        round(done * self.num_train_tokens),
                    )
                    self.log.append(metrics.log_entry)
                    tally = _Tally()
                    yield metrics
                if time.perf_counter() - saved > SAVE_EVERY_S:
                    self._save()
                    saved = time.perf_counter()
        finally:
            # An interrupted step may leave weights half updated.
            if not self._stepping:
                self._save()

    def _one_step(self, tally: _Tally) -> None:
        settings = self.settings
        self._stepping = True
        self._optimizer.zero_grad()
        generator = torch.Generator().manual_seed(seed_of(settings.seed, "step", self.step))
        for i in range(settings.packs_per_step):
            output = self._loss_of(self._packs[self._pack_at(self.step, i)], generator)
            (output.loss / settings.packs_per_step).backward()
            tally.add(output)
        torch.nn.utils.clip_grad_norm_(self.student.parameters(), settings.clip)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate_at(self.step, self.num_steps, settings)
        self._optimizer.step()
        self.step += 1
        self.average.update(self.step)
        self._stepping = False

    def _loss_of(self, entries: Sequence[Entry], generator: torch.Generator | None) -> LossOutput:
        pack = self.teacher.read(entries, length=self.settings.pack_tokens)
        # float16 would need a scaled loss; bfloat16 does not. The student's weights are float32.
        half = self.target.dtype in (torch.bfloat16, torch.float16)
        with torch.autocast(self.target.device.type, dtype=torch.bfloat16, enabled=half):
            return self.student.compute_loss(pack, generator)

    def _pack_at(self, step: int, i: int) -> int:
        """Which pack is the i-th of a step: every epoch has its own order."""
        at = step * self.settings.packs_per_step + i
        epoch, place = divmod(at, len(self._packs))
        if self._order[0] != epoch:
            order = list(range(len(self._packs)))
            random.Random(seed_of(self.settings.seed, "epoch", epoch)).shuffle(order)
            self._order = epoch, order
        return self._order[1][place]

    @torch.no_grad()
    def held_out_rates(self, packs: int = HELD_OUT_PACKS) -> tuple[tuple[float, ...], ...]:
        """Per depth, how often each rank is right on held-out dialogues, of at most `packs`."""
        tally = _Tally()
        arranged = arrange(self.held_out, self.settings.pack_tokens, self.settings.seed)
        for entries in arranged[:packs]:
            tally.add(self._loss_of(entries, None))
        return tally.rates

    def _save(self) -> None:
        state = {
            "step": self.step,
            "run": self._identity,
            "student": self.student.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "average": self.average.values,
            "log": self.log,
            "seconds": self.seconds,
        }
        save_state(self.folder, state)

    def close(self) -> None:
        """Take the hooks off the target."""
        self.teacher.close()


class _Tally:
    """Losses of packs; they stay on the device until their means are read."""

    def __init__(self) -> None:
        self._outputs: list[LossOutput] = []

    def add(self, output: LossOutput) -> None:
        self._outputs.append(LossOutput(output.loss.detach(), output.hits, output.rows))

    @property
    def loss(self) -> float:
        return float(torch.stack([one.loss for one in self._outputs]).mean())

    @property
    def rates(self) -> tuple[tuple[float, ...], ...]:
        hits = torch.stack([one.hits for one in self._outputs]).sum(0)
        rows = torch.stack([one.rows for one in self._outputs]).sum(0)
        return tuple(map(tuple, (hits / rows[:, None].clamp_min(1)).tolist()))


def save_state(folder: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint whole or not at all."""
    partial = folder / (CHECKPOINT + ".partial")
    with writing(folder), partial.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
        os.replace(partial, folder / CHECKPOINT)


def load_state(
    folder: Path, identity: Mapping[str, Any], device: torch.device
) -> dict[str, Any] | None:
    """The checkpoint of the run in this folder; None where there is none.

    Raises ConfigError: damaged, or of another run; names what differs.
    """
    file = folder / CHECKPOINT
    if not file.is_file():
        return None
    try:
        state: dict[str, Any] = read_pickle(file, device)
        run = state["run"]
    except (SourceError, TypeError, KeyError) as error:
        raise ConfigError(
            f"{file} could not be read: it is damaged. Remove it to start anew."
        ) from error
    for key, value in identity.items():
        if run.get(key) != value:
            raise ConfigError(
                f"The run in {folder} was made with {key} = {run.get(key)!r:.200}, but now it is "
                f"{value!r:.200}. Give the same, or another --output."
            )
    return state
