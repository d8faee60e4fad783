"""Every benchmark and every Python script finds what it imports."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FIRST_LINE = "#!/usr/bin/env python3"


def _programs() -> list[Path]:
    scripts = [
        file
        for file in (ROOT / "scripts").iterdir()
        if file.is_file() and file.read_text(encoding="utf-8").startswith(FIRST_LINE)
    ]
    return sorted([*scripts, *(ROOT / "benchmarks").glob("*.py")])


@pytest.mark.parametrize("program", _programs(), ids=lambda file: f"{file.parent.name}/{file.name}")
def test_a_program_finds_what_it_imports(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path])
    runpy.run_path(str(program), run_name="imported")


def test_programs_are_found() -> None:
    assert {file.parent.name for file in _programs()} == {"scripts", "benchmarks"}
