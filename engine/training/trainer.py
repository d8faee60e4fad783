"""The training loop: the target's features of packs, a student's loss, an optimizer, checkpoints.

The order of packs and the noise of a step are determined by the seed and the step's number, so
weights, optimizer and step suffice to resume a killed run exactly.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
import random
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from engine.errors import ConfigError, SourceError
from engine.model.corpus import Corpus, Entry
from engine.model.files import read_pickle
from engine.model.sources import atomic_write, writing
from engine.model.target import Target
from engine.training.corpus.dialogues import seed_of
from engine.training.losses import LossOutput
from engine.training.packs import FeatureStore, Teacher, make_packs, split_held_out
from engine.training.recipe import TrainSettings

CHECKPOINT = "training.pt"
SAVE_EVERY_S = 120.0
HELD_OUT_PACKS = 16
"""Maximum number of packs of held-out dialogues that are evaluated."""
MAX_GRAD_NORM = 1.0
WARMUP_SHARE, FINAL_RATE_SHARE = 0.04, 0.05
"""Share of the steps in which the learning rate rises, and its last value relative to the peak."""


@dataclass(frozen=True, slots=True)
class TrainMetrics:
    """Metrics of one step, and of training so far.

    Attributes:
        loss: mean per pack.
        rates: per depth, the share of rows whose label has each rank.
    """

    step: int
    num_steps: int
    loss: float
    rates: tuple[tuple[float, ...], ...]
    seconds: float
    num_tokens: int

    def top(self, k: int) -> tuple[float, ...]:
        """Share of rows whose token was among the top k, per depth."""
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
    """One training run of a method for a target, on the corpus's current dialogues.

    Attributes:
        average: of the student's weights; the final result.
        seconds: of training so far, earlier sessions included; pauses between steps excluded.
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
        """Start a run, or resume the one in `folder`.

        Args:
            store: caches the target's features.

        Raises ConfigError: the corpus is too small or another target's, or the run in `folder` has
        other settings.
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
        self.train, self.held_out = split_held_out(corpus, count)
        self._packs = make_packs(self.train, settings.pack_tokens, settings.seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)
            self.student = settings.student(target, self.train)
        if settings.begin_with is not None:
            self.student.load(Path(settings.begin_with))
        self.teacher = Teacher(
            target,
            corpus,
            self.student.target_layers,
            self.student.vocabulary,
            store=store,
        )
        self._optimizer = AdamW(
            self.student.parameters(),
            betas=(0.9, 0.95),
            weight_decay=settings.weight_decay,
            fused=True,
        )
        self.average = AveragedWeights(self.student, settings.ema)
        self.step, self.seconds, self.log = 0, 0.0, list[dict[str, Any]]()
        self._mid_step = False
        if state is not None:
            self._resume(state)

    def _resume(self, state: Mapping[str, Any]) -> None:
        self.step, self.seconds, self.log = state["step"], state["seconds"], state["log"]
        self.student.load_state_dict(state["student"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.average.values = state["average"]

    def _num_dialogues(self, state: Mapping[str, Any] | None) -> int:
        """The number at the start of the run; ConfigError if the corpus has fewer."""
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

    def steps(self) -> Generator[TrainMetrics]:
        """Train to the end; yields metrics after every step.

        A checkpoint is written every `SAVE_EVERY_S`, at the end, and when the iterator is closed.
        """
        saved = began = time.perf_counter()
        try:
            while self.step < self.num_steps:
                outputs = self._one_step()
                loss = float(torch.stack([one.loss for one in outputs]).mean())
                rates = _rates(outputs)  # waits for the device
                self.seconds += time.perf_counter() - began
                done = self.step / self.num_steps * self.settings.epochs
                metrics = TrainMetrics(
                    self.step,
                    self.num_steps,
                    loss,
                    rates,
                    self.seconds,
                    round(done * self.num_train_tokens),
                )
                self.log.append(metrics.log_entry)
                yield metrics
                began = time.perf_counter()
                if began - saved > SAVE_EVERY_S:
                    self._save()
                    saved = began
        finally:
            # An interrupted step may leave the weights partly updated.
            if not self._mid_step:
                self._save()

    def _one_step(self) -> list[LossOutput]:
        """Losses of the step's packs."""
        settings, outputs = self.settings, list[LossOutput]()
        self._mid_step = True
        self._optimizer.zero_grad()
        generator = torch.Generator().manual_seed(seed_of(settings.seed, "step", self.step))
        for i in range(settings.packs_per_step):
            output = self._loss_of(self._packs[self._pack_idx(self.step, i)], generator)
            (output.loss / settings.packs_per_step).backward()
            outputs.append(replace(output, loss=output.loss.detach()))
        torch.nn.utils.clip_grad_norm_(self.student.parameters(), MAX_GRAD_NORM)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate_at(self.step, self.num_steps, settings)
        self._optimizer.step()
        self.step += 1
        self.average.update(self.step)
        self._mid_step = False
        return outputs

    def _loss_of(self, entries: Sequence[Entry], generator: torch.Generator | None) -> LossOutput:
        pack = self.teacher.read(entries, length=self.settings.pack_tokens)
        # float16 would need a scaled loss; bfloat16 does not. The student's weights are float32.
        half = self.target.dtype in (torch.bfloat16, torch.float16)
        with torch.autocast(self.target.device.type, dtype=torch.bfloat16, enabled=half):
            return self.student.compute_loss(pack, generator)

    def _pack_idx(self, step: int, i: int) -> int:
        """The index of a step's i-th pack; every epoch has its own order."""
        at = step * self.settings.packs_per_step + i
        epoch, place = divmod(at, len(self._packs))
        return _order(len(self._packs), seed_of(self.settings.seed, "epoch", epoch))[place]

    @torch.no_grad()
    def held_out_rates(self, packs: int = HELD_OUT_PACKS) -> tuple[tuple[float, ...], ...]:
        """Per depth, the share of each rank on up to `packs` packs of held-out dialogues."""
        held_out = make_packs(self.held_out, self.settings.pack_tokens, self.settings.seed)
        return _rates([self._loss_of(entries, None) for entries in held_out[:packs]])

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
        with atomic_write(self.folder / CHECKPOINT) as partial, partial.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())


@functools.lru_cache(maxsize=4)
def _order(count: int, seed: int) -> list[int]:
    """The numbers below `count`, shuffled."""
    numbers = list(range(count))
    random.Random(seed).shuffle(numbers)
    return numbers


def _rates(outputs: Sequence[LossOutput]) -> tuple[tuple[float, ...], ...]:
    """Per depth, the share of these packs' rows whose label has each rank."""
    hits = torch.stack([one.hits for one in outputs]).sum(0)
    rows = torch.stack([one.rows for one in outputs]).sum(0)
    return tuple(map(tuple, (hits / rows[:, None].clamp_min(1)).tolist()))


def load_state(
    folder: Path, identity: Mapping[str, Any], device: torch.device
) -> dict[str, Any] | None:
    """The checkpoint of the run in this folder; None where there is none.

    Raises ConfigError: it is damaged, or another run's; names what differs.
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


def learning_rate_at(step: int, num_steps: int, settings: TrainSettings) -> float:
    """The learning rate: linear warmup, then cosine decay."""
    warmup = max(1, round(WARMUP_SHARE * num_steps))
    if step < warmup:
        return settings.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, num_steps - warmup)
    low = FINAL_RATE_SHARE
    return settings.learning_rate * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * progress)))


class AveragedWeights:
    """An exponential moving average of a module's parameters; none with decay 0."""

    def __init__(self, module: nn.Module, decay: float) -> None:
        self._module = module
        self._decay = decay
        self.values = self._copy() if decay else {}

    def _copy(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self._module.named_parameters()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        # A smaller decay in the first steps, so that the initial weights fade.
        decay = min(self._decay, (1 + step) / (10 + step))
        for name, average in self.values.items():
            average.lerp_(self._module.get_parameter(name), 1 - decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """A context within which the module has the averaged weights."""
        trained = self._copy() if self.values else {}
        self._module.load_state_dict(self.values, strict=False)
        try:
            yield
        finally:
            self._module.load_state_dict(trained, strict=False)


def keep_freed_memory() -> None:
    """Let glibc, if it is the C library, keep freed memory in the process.

    glibc returns every block above a few hundred KiB to the system at once, and the next step,
    which allocates the same arrays, spends more time on page faults than on computing.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mmap_threshold, largest = -3, 32 << 20  # as much as glibc allows
        trim_threshold, never = -1, (1 << 31) - 1
        mallopt(mmap_threshold, largest)
        mallopt(trim_threshold, never)
