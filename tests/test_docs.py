"""The pages under docs/ tell of every method, setting, command and figure; links lead somewhere.

Every figure has one function and one notation.
"""

from __future__ import annotations

import ast
import inspect
import pkgutil
import re
import subprocess
import sys
import textwrap
from dataclasses import fields
from pathlib import Path
from typing import get_args

import pytest

from engine import metrics
from storage import Figure

ROOT = Path(__file__).parent.parent


def test_generated_pages_are_up_to_date() -> None:
    run = subprocess.run(
        [sys.executable, "scripts/docs_pages", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, "run scripts/docs_pages" + run.stderr


PAGES = [ROOT / f"{name}.md" for name in ("README", "PERFORMANCE", "SECURITY")]
PAGES += sorted((ROOT / "docs").glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_linked_file_is_there(page: Path) -> None:
    links = [part.split(")")[0] for part in page.read_text(encoding="utf-8").split("](")[1:]]
    for link in links:
        assert link.startswith("http") or (page.parent / link.partition("#")[0]).exists(), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_name_and_file_that_a_page_mentions_is_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    rooms = "engine|playground|presets|storage|scripts|tests|benchmarks|docs"
    for file in re.findall(rf"`((?:{rooms})/[\w/.-]+\.\w+)`", text):
        assert (ROOT / file).exists(), file
    for name, file in re.findall(r"`(\w+)`\s+in\s+`([\w/]+\.py)`", text):
        assert re.search(rf"\b{name}\b", (ROOT / file).read_text("utf-8")), (name, file)


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


MACHINERY = {
    *("ratio", "mean_or_none", "first_divergence", "common_len", "measure"),
}
"""Functions of `engine.metrics` that compute no figure of their own."""


def test_the_figures_page_has_every_figure_and_every_function() -> None:
    page = (ROOT / "docs" / "figures.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^\| (\w+) \|", page, re.MULTILINE))
    counts = {"num_steps", "num_drafted", "num_accepted", "num_cut", "num_cached"}
    counts |= {"num_disturbed", "bypasses", "num_undrafted"}
    assert {field.name for field in fields(metrics.Metrics)} - counts <= named
    assert set(get_args(Figure)) - counts - {*metrics.TimeSplit.__slots__} <= named
    functions = {
        name
        for name, value in vars(metrics).items()
        if inspect.isfunction(value) and value.__module__ == metrics.__name__ and name[0] != "_"
    }
    assert functions - MACHINERY <= set(re.findall(r"`engine\.metrics\.(\w+)`", page))
    for name in re.findall(r"`((?:engine|playground)\.[A-Za-z_.]+)`", page):
        pkgutil.resolve_name(name)


SPACED = re.compile(r"[\d}] (%(?![\w({])|×( plain|[.,;:)`|'\"]|$))")
"""A number, and its sign after a space; a product, `3 prompts × 2 repeats`, is none."""


def test_no_text_separates_a_speedup_or_a_percentage_from_its_sign() -> None:
    for file in (file for name in ("engine", "playground") for file in (ROOT / name).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                text = ast.unparse(node)[1:]
                found = SPACED.search(text)
                assert not found, f"{file}:{node.lineno}: {text:.80}"
    scripts = (ROOT / "playground" / "web" / "static").rglob("*.js")
    for file in (*scripts, *PAGES):
        for number, line in enumerate(file.read_text("utf-8").splitlines(), start=1):
            assert not SPACED.search(line), f"{file}:{number}: {line:.80}"
