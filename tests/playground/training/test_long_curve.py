"""A curve of a hundred thousand points: every point is read once, and drawn."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from playground.training import folder as folder_module
from playground.training.figures import FIGURES
from playground.training.folder import TrainingFolder

NUM_POINTS = 100_000


@pytest.fixture
def points_read(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The lines of curves that are parsed from now on."""
    read: list[bytes] = []
    parse = folder_module._Point.model_validate_json
    monkeypatch.setattr(
        folder_module._Point, "model_validate_json", lambda line: read.append(line) or parse(line)
    )
    return read


@pytest.mark.slow
def test_a_long_curve_is_drawn_and_each_of_its_points_read_once(
    tmp_path: Path, points_read: list[bytes]
) -> None:
    folder = TrainingFolder(tmp_path)
    with folder.running():
        folder.add("loss", 0, loss=1.0, seconds=0)
        with (tmp_path / "training" / "curve.jsonl").open("a") as file:
            for step in range(1, NUM_POINTS):
                point = {"kind": "loss", "step": step, "loss": 1.0, "seconds": step}
                file.write(json.dumps(point) + "\n")
        curve = folder.curve()
        assert len(curve["loss"]) == len(points_read) == NUM_POINTS
        (line,) = FIGURES["loss"](curve).data
        assert len(line.y) == NUM_POINTS
        assert folder.curve() == curve and len(points_read) == NUM_POINTS, "nothing is read twice"
        folder.add("loss", NUM_POINTS, loss=1.0, seconds=0)
        folder.curve()
        assert len(points_read) == NUM_POINTS + 1


def test_points_of_repeated_steps_replace_earlier_ones_and_later_looks_read_what_is_new(
    tmp_path: Path, points_read: list[bytes]
) -> None:
    folder = TrainingFolder(tmp_path)
    with folder.running():
        for step in range(100):
            folder.add("loss", step, loss=1.0, seconds=step)
        folder.curve()
        folder.add("loss", 50, loss=1.0, seconds=2000)
        folder.add("held out", 50, top1=[0.5])
        assert [point["step"] for point in folder.curve()["loss"]] == [*range(51)]
        assert len(points_read) == 102
        assert TrainingFolder(tmp_path).curve() == folder.curve()
