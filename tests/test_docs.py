"""The pages under docs/ tell of every method, setting and command; links lead somewhere."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_generated_pages_are_up_to_date() -> None:
    run = subprocess.run(
        [sys.executable, "scripts/docs_pages", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, "run scripts/docs_pages" + run.stderr


def test_every_linked_file_is_there() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    images = [part.split(")")[0] for part in text.split("](")[1:]]
    for link in images:
        assert link.startswith("http") or (ROOT / link).is_file(), link
