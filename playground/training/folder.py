"""The folder of a training: its plan, progress and curve, and the drafter's weights and card.

    training/plan.json        the plan
    training/standing.json    its progress, or how it ended
    training/curve.jsonl      losses, ranks on held-out texts, MAT and speed, a point per line
    training/training.pt      the trainer's checkpoint
    card.json, README.md, …   the drafter, from the first evaluation on

The folder of a process that died says `running`, but its lock is free.
"""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

from filelock import FileLock, Timeout
from pydantic import AliasPath, BeforeValidator, Field, SerializeAsAny, ValidationError

from engine.config import Settings
from engine.drafters import parse_method
from engine.drafters.method import MethodConfig
from engine.errors import ConfigError, PlaygroundError
from engine.model.files import read_settings
from engine.model.sources import atomic_write, writing
from engine.safe_text import short
from playground.training.plan import KINDS, TrainPlan
from presets import MethodPreset

Status = Literal["running", "completed", "cancelled", "failed", "interrupted"]
CARD = "card.json"


class TrainingProgress(Settings, extra="ignore"):
    """The progress of a training, or how it ended.

    Attributes:
        seconds: time spent writing texts; the trainer counts its own.
        corpus_tokens: tokens in the corpus so far.
        text: the newest text of the target.
        num_steps: 0 until the texts are written.
    """

    status: Status = "running"
    phase: str = "waiting"
    seconds: float = 0.0
    corpus_tokens: int = 0
    text: str = ""
    step: int = 0
    num_steps: int = 0
    left_s: float | None = None
    error: str = ""


class _Point(Settings, extra="ignore"):
    """A point of the curve; values of other kinds, or that are missing, are no numbers."""

    kind: Literal["loss", "held out", "measured"]
    step: int = Field(ge=0)
    loss: float = math.nan
    seconds: float = math.nan
    mat: float = math.nan
    speedup: float | None = None
    top1: list[float] = []


class Card(Settings, extra="ignore"):
    """What is read of a drafter's card."""

    method: str
    num_parameters: int
    seconds: float
    num_dialogues: int = Field(validation_alias=AliasPath("data", "num_dialogues"))
    num_tokens: int = Field(validation_alias=AliasPath("data", "num_tokens"))
    epochs: float = Field(validation_alias=AliasPath("settings", "epochs"))
    mat: float = Field(validation_alias=AliasPath("held_out", "overall", "mat"))
    evaluated_with: Annotated[SerializeAsAny[MethodConfig], BeforeValidator(parse_method)]

    @property
    def num_tokens_read(self) -> float:
        return self.num_tokens * self.epochs


class TrainingFolder:
    """Reads and writes the files of one training; several processes may read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._own = path / "training"
        self._reading_curve = threading.Lock()
        self._forget_curve()

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def exists(self) -> bool:
        return (self._own / "plan.json").is_file()

    # ---- the plan

    @property
    def plan(self) -> TrainPlan:
        """Raises ConfigError: there is none, or it is damaged."""
        try:
            return TrainPlan.parse(read_settings(self._own / "plan.json"), where=str(self.path))
        except PlaygroundError as error:
            raise ConfigError(f"{error} This training cannot go on; start a new one.") from error

    def write_plan(self, plan: TrainPlan) -> None:
        self._write("plan.json", plan.model_dump_json(indent=2))

    # ---- the progress

    @property
    def progress(self) -> TrainingProgress:
        """The last progress; `interrupted` if its process died, or the file is damaged."""
        file = self._own / "standing.json"
        if not file.is_file():
            return TrainingProgress(status="interrupted")
        try:
            now = TrainingProgress.parse(read_settings(file), where=str(file))
        except PlaygroundError as error:
            return TrainingProgress(status="interrupted", error=f"{error} Resume writes it anew.")
        if now.status != "running":
            return now
        try:
            with self._lock.acquire(blocking=False):
                return now.replace(status="interrupted")
        except Timeout:  # a process trains here
            return now

    def write_progress(self, progress: TrainingProgress) -> None:
        self._write("standing.json", progress.model_dump_json())

    @property
    def _lock(self) -> FileLock:
        return FileLock(self._own / "running.lock", thread_local=False)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Lock the folder while this process trains into it.

        Raises ConfigError: another process trains into it.
        """
        with writing(self.path):
            self._own.mkdir(parents=True, exist_ok=True)
        try:
            with self._lock.acquire(timeout=1.0):  # readers hold it for an instant
                self._drop_partial_point()
                yield
        except Timeout as error:
            raise ConfigError(f"Another process trains into {self.path}. Stop it there.") from error

    # ---- the curve

    def add(self, kind: str, step: int, **values: Any) -> None:
        """Append a point of the curve."""
        line = json.dumps({"kind": kind, "step": step, **values})
        with writing(self.path), (self._own / "curve.jsonl").open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def _drop_partial_point(self) -> None:
        """Cut off the line that a kill left without its end."""
        file = self._own / "curve.jsonl"
        if file.is_file():
            with writing(self.path):
                os.truncate(file, file.read_bytes().rfind(b"\n") + 1)

    def curve(self) -> dict[str, list[dict[str, Any]]]:
        """The points by kind; a resumed training replaces those of repeated steps.

        Raises ConfigError: a line is damaged.
        """
        file = self._own / "curve.jsonl"
        if not file.is_file():
            return {}
        with self._reading_curve, file.open("rb") as content:
            if content.seek(0, os.SEEK_END) < self._num_bytes_read:
                self._forget_curve()
            content.seek(self._num_bytes_read)
            for line in content.read().split(b"\n")[:-1]:
                self._read_point(line)
            return {kind: points.copy() for kind, points in self._curve.items()}

    def _read_point(self, line: bytes) -> None:
        try:
            point = _Point.model_validate_json(line)
        except ValidationError as error:
            file = self._own / "curve.jsonl"
            raise ConfigError(f"{file} has a damaged line: {short(line)}. Delete it.") from error
        points = self._curve.setdefault(point.kind, [])
        while points and points[-1]["step"] >= point.step:
            points.pop()
        points.append(point.model_dump())
        self._num_bytes_read += len(line) + 1

    def _forget_curve(self) -> None:
        self._num_bytes_read = 0
        self._curve: dict[str, list[dict[str, Any]]] = {}

    # ---- the drafter

    @property
    def card(self) -> Card | None:
        """None before the first evaluation, and where it is damaged: the next one replaces it."""
        try:
            return Card.parse(read_settings(self.path / CARD))
        except PlaygroundError:
            return None

    def preset(self) -> MethodPreset | None:
        """The drafter as a method of its target; None before the first evaluation."""
        card = self.card
        if card is None:
            return None
        number = self.name.rpartition("-")[2]
        return MethodPreset(
            name=self.name,
            title=f"{KINDS.get(card.method, card.method)} {number}, trained here",
            description=f"MAT {card.mat:.2f} on held-out texts; {card.num_tokens_read:,.0f} tokens "
            f"in {card.seconds / 60:.1f} minutes. {self.path}",
            target=self.plan.target.name,
            config=card.evaluated_with.replace(speculative_model=str(self.path)),
        )

    def _write(self, name: str, text: str) -> None:
        """Replace a file atomically."""
        with atomic_write(self._own / name) as partial:
            partial.write_text(text, encoding="utf-8")
