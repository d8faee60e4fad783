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
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock, Timeout

from engine.config import Settings
from engine.drafters import parse_method
from engine.errors import ConfigError, PlaygroundError
from engine.model.files import read_settings
from engine.model.sources import atomic_write, writing
from engine.safe_text import read_json
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


class TrainingFolder:
    """Reads and writes the files of one training; several processes may read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._own = path / "training"

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def exists(self) -> bool:
        return (self._own / "plan.json").is_file()

    # ---- the plan

    @property
    def plan(self) -> TrainPlan:
        """Raises ConfigError, SourceError: there is none, or it is damaged."""
        return TrainPlan.parse(read_settings(self._own / "plan.json"), where=str(self.path))

    def write_plan(self, plan: TrainPlan) -> None:
        self._write("plan.json", plan.model_dump_json(indent=2))

    # ---- the progress

    @property
    def progress(self) -> TrainingProgress:
        """The last progress; `interrupted` if its process died."""
        file = self._own / "standing.json"
        if not file.is_file():
            return TrainingProgress(status="interrupted")
        now = TrainingProgress.parse(read_settings(file), where=str(file))
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
        """The points by kind; a resumed training replaces those of repeated steps."""
        curve: dict[str, dict[int, dict[str, Any]]] = {}
        file = self._own / "curve.jsonl"
        for line in file.read_text(encoding="utf-8").split("\n")[:-1] if file.is_file() else ():
            point = read_json(line, what=str(file))
            points = curve.setdefault(point["kind"], {})
            for later in [step for step in points if step >= point["step"]]:
                del points[later]
            points[point["step"]] = point
        return {kind: list(points.values()) for kind, points in curve.items()}

    # ---- the drafter

    @property
    def card(self) -> Mapping[str, Any] | None:
        """None before the first evaluation, and where it is damaged: the next one replaces it."""
        try:
            return read_settings(self.path / CARD)
        except PlaygroundError:
            return None

    def preset(self) -> MethodPreset | None:
        """The drafter as a method of its target; None before the first evaluation."""
        card = self.card
        if card is None:
            return None
        values = {**card["evaluated_with"], "speculative_model": str(self.path)}
        mat, number = card["held_out"]["overall"]["mat"], self.name.rpartition("-")[2]
        return MethodPreset(
            name=self.name,
            title=f"{KINDS[card['method']]} {number}, trained here",
            description=f"MAT {mat:.2f} on held-out texts; {card['num_tokens_read']:,} tokens in "
            f"{card['seconds'] / 60:.1f} minutes. {self.path}",
            target=self.plan.target.name,
            config=parse_method(values, where=str(self.path)),
        )

    def _write(self, name: str, text: str) -> None:
        """Replace a file atomically."""
        with atomic_write(self._own / name) as partial:
            partial.write_text(text, encoding="utf-8")
