"""The trainings of one server: start, watch, stop, resume, and use their drafters as methods."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from engine.drafters.base import BuildContext
from engine.errors import ConfigError
from engine.model.target import Target
from engine.training.methods.eagle import write_speculators
from engine.training.session import Evaluation, HeldOutRates
from playground.errors import attempt
from playground.host.runner import EngineHost
from playground.host.task import ClosingError, Task, TaskState, TaskThreads, time_left
from playground.training.folder import CARD, Card, TrainingFolder, TrainingProgress
from playground.training.plan import TrainPlan, slug
from playground.training.work import Event, Speeds, TrainingWork

DRAFT_LEN = 3
"""Default draft length of an exported head in a serving engine."""
EXPORTED = ("*.json", "*.safetensors", "README.md", "tokenizer*", "*.txt", "*.jinja", "*.model")


class Training(Task):
    """One training, which yields the engine to waiting jobs between two steps."""

    def __init__(self, host: EngineHost, work: TrainingWork) -> None:
        super().__init__(owner=work.folder.name, id=work.folder.name)
        self._host, self._work = host, work
        self._target: Target | None = None
        self._events: Generator[Event] | None = None

    def train(self) -> None:
        """Train to the end; the folder records how it ended.

        Raises CancelledError: it was stopped.
        """
        with self._work.recorded():
            try:
                on = self._work.plan.target, self._work.plan.dtype
                while not self._host.turn(self, *on, self._turn, wait_for_room=True).result():
                    if self.cancelled():
                        raise CancelledError
            except ClosingError as error:  # between two turns
                raise CancelledError from error
            finally:
                self._close()

    def _turn(self, context: BuildContext) -> bool:
        """Train until another job waits for the engine; whether the training is complete."""
        if self._events is None or context.target is not self._target:
            self._close()
            self._target, self._events = context.target, self._work.run(context.target)
        while True:
            event = next(self._events, None)
            if event is None:
                return True
            if isinstance(event, HeldOutRates | Evaluation):
                continue  # the step's own event follows: only between two steps is nothing lost
            if self.cancelled():
                return False
            if self._host.occupancy[1]:
                self.activity = "paused for other runs"
                return False
            self.activity = self._work.activity

    def _close(self) -> None:
        """Write the checkpoint, and release the target."""
        if self._events is not None:
            self._events.close()
        self._target = self._events = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingState(TaskState):
    """The state of a training, and the data of its report.

    Attributes:
        curve: points by kind: `loss`, `held out`, `measured`.
        card: None before the first evaluation, and where it is damaged.
        where: its folder.
    """

    plan: TrainPlan
    progress: TrainingProgress
    curve: Mapping[str, Sequence[Mapping[str, Any]]]
    card: Card | None
    where: Path

    @classmethod
    def of(cls, folder: TrainingFolder, task: Training | None) -> TrainingState:
        """Raises ConfigError: the folder has no sound plan or curve."""
        plan, now, curve, card = folder.plan, folder.progress, folder.curve(), folder.card
        counts, share = [], None
        if now.status == "running":
            if now.phase == "writing":
                counts.append(f"{now.corpus_tokens:,} tokens")
            elif now.phase == "training" and now.num_steps:
                counts.append(f"step {now.step:,} of {now.num_steps:,}")
            counts.append(time_left(now.left_s))
            written = min(1.0, now.corpus_tokens / (plan.budget.tokens or math.inf))
            share = now.step / now.num_steps if now.num_steps else written
        elif now.status == "completed" and card is None:
            counts.append(f"{CARD} is missing or damaged; Resume measures and writes it again")
        num_points = {kind: len(points) for kind, points in curve.items()}
        num_losses = num_points.pop("loss", 0) // 6  # the report is drawn anew every six steps
        seen = (now.status, now.phase, num_losses, sum(num_points.values()), now.text)
        return cls(
            status=now.status,
            task=task,
            version=repr(seen),
            counts=counts,
            share=share,
            error=now.error,
            is_whole=card is not None,
            plan=plan,
            progress=now,
            curve=curve,
            card=card,
            where=folder.path,
        )


class Trainings:
    def __init__(self, host: EngineHost, folder: Path) -> None:
        """`folder`: of drafters, corpora and measured speeds."""
        self.catalog = host.catalog
        self.folder = folder
        self.corpora, self._heads = self.folder / "corpora", self.folder / "heads"
        self.speeds = Speeds(self.folder / "speeds.json", host.device)
        self._host, self._tasks = host, TaskThreads[Training]()
        self.stop = self._tasks.stop
        self._folders: dict[str, TrainingFolder] = {}
        host.before_close(self._tasks.close)
        for name in self.newest():  # a damaged one is reported when it is opened
            one = TrainingFolder(self._heads / name)
            attempt(partial(self._offer, one), where="listing a trained drafter")

    # ---- running

    def start(self, plan: TrainPlan) -> str:
        """Start a training; returns its name. Raises ConfigError: one is running."""
        folder = new_folder(self._heads, plan.method, plan.target.name)
        self._folders[folder.name] = folder  # one of this name may have been deleted
        self._launch(folder, plan)
        return folder.name

    def resume(self, name: str) -> None:
        """Resume a training. Raises ConfigError: there is none, or one is running."""
        folder = self._folder(name)
        self._launch(folder, folder.plan)

    def _launch(self, folder: TrainingFolder, plan: TrainPlan) -> None:
        for other in self._tasks.running():
            raise ConfigError(f"{other.id} is being trained. Stop it, or wait until it is done.")
        folder.write_plan(plan)
        work = TrainingWork(plan, folder, self.speeds, cache_dir=self._host.cache_dir)
        job = Training(self._host, work)

        def conduct() -> None:
            try:
                job.train()
            finally:
                self._offer(folder)

        self._tasks.start(job, lambda: conduct)

    # ---- reading

    def newest(self) -> list[str]:
        """Names of trainings, the newest first."""
        plans = self._heads.glob("*/training/plan.json")
        ordered = sorted(plans, key=lambda file: file.stat().st_mtime, reverse=True)
        return [file.parents[1].name for file in ordered]

    def look(self, name: str) -> TrainingState:
        """The state of a training. Raises ConfigError: none has this name."""
        folder = self._folder(name)
        self._offer(folder)  # from its first measurement on
        return TrainingState.of(folder, self._tasks.get(name))

    def _folder(self, name: str) -> TrainingFolder:
        if name not in self.newest():
            raise ConfigError(f"No training is named {name!r:.80}.")
        return self._folders.setdefault(name, TrainingFolder(self._heads / name))

    def _measured(self, name: str) -> TrainingFolder:
        folder = self._folder(name)
        if not self._offer(folder):
            raise ConfigError(f"This drafter has no sound {CARD} yet. Wait, or resume it.")
        return folder

    # ---- the drafter

    def _offer(self, folder: TrainingFolder) -> bool:
        """Add a drafter to the methods of its target, if it has been measured."""
        preset = folder.preset()
        if preset is not None:
            self.catalog.admit(str(folder.path))
            self.catalog.presets[preset.name] = preset
        return preset is not None

    def method(self, name: str) -> tuple[str, str]:
        """Target and method of a trained drafter.

        Raises ConfigError: it has not been measured yet.
        """
        target = self._measured(name).plan.target
        if target.name not in self.catalog.targets:
            raise ConfigError(f"Open the target {target.name} on the Generate page first.")
        return target.name, name

    def export(self, name: str, into: Path) -> Path:
        """Weights, config and card in the layout of published drafters, as one .zip file.

        For an EAGLE-3 head also in the layout of `speculators`, in a folder of its own.

        Raises ConfigError: it has not been measured yet.
        """
        folder = self._measured(name)
        into.mkdir(parents=True, exist_ok=True)
        file = into / f"{name}.zip"
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive, TemporaryDirectory() as own:
            for one in sorted({f for kind in EXPORTED for f in folder.path.glob(kind)}):
                archive.write(one, f"{name}/{one.name}")
            plan = folder.plan
            if plan.method == "eagle3":
                verifier = plan.target.hub or plan.target.name
                write_speculators(folder.path, Path(own), verifier=verifier, draft_len=DRAFT_LEN)
                for one in sorted(Path(own).iterdir()):
                    archive.write(one, f"{name}/speculators/{one.name}")
        return file


def new_folder(heads: Path, method: str, target: str) -> TrainingFolder:
    """A new folder for a training, with the first free number: `eagle3-smollm2-135m-instruct-1`."""
    start = f"{method.replace('_', '-')}-{slug(target)}"
    number = 1
    while (heads / f"{start}-{number}").exists():
        number += 1
    return TrainingFolder(heads / f"{start}-{number}")
