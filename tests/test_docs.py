"""The pages under docs/ tell of every method, setting and command; links lead somewhere."""

from __future__ import annotations

import pkgutil
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_generated_pages_are_up_to_date() -> None:
    run = subprocess.run(
        [sys.executable, "scripts/docs_pages", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, "run scripts/docs_pages" + run.stderr


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_linked_file_is_there(page: Path) -> None:
    links = [part.split(")")[0] for part in page.read_text(encoding="utf-8").split("](")[1:]]
    for link in links:
        assert link.startswith("http") or (page.parent / link.partition("#")[0]).exists(), link


def test_the_flows_name_what_is_there() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    names = re.findall(r"`((?:engine|playground|presets|storage)\.[A-Za-z_.]+)`", text)
    assert len(names) > 30
    for name in names:
        pkgutil.resolve_name(name)
    files = re.findall(r"`([a-z_/]+\.(?:js|py|toml))`", text)
    assert len(files) > 4
    for file in files:
        assert (ROOT / file).is_file(), file
    for flow in text.split("\n## ")[1:]:
        assert 1 <= len(re.findall(r"^\d+\. ", flow, re.MULTILINE)) <= 10, flow.splitlines()[0]


def test_the_example_on_the_page_is_the_one_that_is_tested() -> None:
    page = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    source = (ROOT / "tests" / "engine" / "drafters" / "example_drafter.py").read_text()
    code = source[source.index("from collections") :].rstrip()
    shown = textwrap.indent(code, "    ").replace("\n    \n", "\n\n")
    assert shown in page
