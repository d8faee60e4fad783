"""The page writes figures as Python does: one notation for every kind."""

from __future__ import annotations

import random

from engine import formats
from tests.scripts.conftest import Scripts

HALVES = [0.125, 0.375, 0.005, 0.025, 0.5, 1.005, 2.5, 12.5, 0.0, 19.95, 19.94, 20.0, 999.5, 1000.0]


def test_the_kit_writes_every_figure_as_python_does(scripts: Scripts) -> None:
    rng = random.Random(0)
    values: list[float | None] = [None, *HALVES, *(10 ** rng.uniform(-4, 5) for _ in range(500))]
    written = scripts.evaluate(
        """(values, { kit }) => values.map((value) => [kit.speedup(value), kit.percent(value),
             kit.number(value, 1), kit.milliseconds(value), kit.duration(value)])""",
        values,
        "kit.js",
    )
    for value, texts in zip(values, written, strict=True):
        assert texts == [
            formats.speedup(value),
            formats.percent(value),
            formats.tok_s(value),
            formats.milliseconds(value),
            formats.duration(value),
        ], value


def test_what_is_no_number_and_halves_have_their_notation() -> None:
    """docs/figures.md has an example of every kind."""
    assert formats.durations(310, 1302) == "0.31 / 1.30 s"
    assert formats.figure(0.125) == "0.13", "a half is rounded up, as by JavaScript"
    for write in (formats.speedup, formats.percent, formats.duration, formats.milliseconds):
        assert write(None) == write(float("nan")) == formats.DASH
