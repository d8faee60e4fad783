"""The modules' own unit tests; every module is sound and writes figures as Python does."""

from __future__ import annotations

import random
import re
import subprocess
from pathlib import Path

import pytest

from engine import formats
from engine.figures import TREE_FIGURES
from playground.web.components import STATIC, panel_figures
from tests.scripts.conftest import NODE, Scripts

HERE = Path(__file__).parent


@pytest.mark.parametrize("file", sorted(HERE.glob("*.test.mjs")), ids=lambda file: str(file.stem))
def test_unit_tests_under_node(file: Path) -> None:
    if NODE is None:
        pytest.skip("no node: install Node.js 20 or newer")
    run = subprocess.run(
        [NODE, "--test", "--test-reporter=tap", str(file)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stdout
    passed = re.search(r"^# pass (\d+)$", run.stdout, re.MULTILINE)
    assert passed and int(passed[1]) > 0, run.stdout


def test_every_module_finds_what_it_imports(scripts: Scripts) -> None:
    """A module is loaded under node; only those of the pages do something when they are."""
    modules = [
        str(file.relative_to(STATIC))
        for file in STATIC.rglob("*.js")
        if "\nexport " in (text := file.read_text(encoding="utf-8")) and "export {};" not in text
    ]
    assert len(modules) > 10
    files = [(STATIC / name).as_uri() for name in modules]
    names = scripts.evaluate(
        """async (files) => Promise.all(files.map(async (file) =>
             Object.keys(await import(file)).length))""",
        files,
    )
    assert all(names)


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


def test_the_modules_show_figures_of_the_catalogue() -> None:
    panel = (STATIC / "panel" / "panel.js").read_text("utf-8")
    (listed,) = re.findall(r"const FIGURES = \[(.*?)\]", panel, re.DOTALL)
    shown = {name for name in re.findall(r'"(\w+)"', listed)} | {"position_rates", "time_split"}
    assert shown <= set(panel_figures()) and all(panel_figures()[name][1] for name in shown)
    tree = (STATIC / "tree" / "figures.js").read_text("utf-8")
    (notation,) = re.findall(r"const NOTATION = \{(.*?)\n\};", tree, re.DOTALL)
    assert re.findall(r"^  (\w+):", notation, re.MULTILINE) == list(TREE_FIGURES)
