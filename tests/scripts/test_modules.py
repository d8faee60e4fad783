"""The modules' own unit tests, and that every module is sound."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from playground.web.components import STATIC
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
