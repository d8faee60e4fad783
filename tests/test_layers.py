"""What import contracts cannot say: which libraries a layer may use, and what it never reads.

The contracts themselves, layers and circles, are in pyproject.toml; scripts/check holds them.
"""

from __future__ import annotations

import ast
import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
STDLIB = sys.stdlib_module_names
ENGINE = {"torch", "transformers", "pydantic", "pydantic_core", "numpy", "safetensors"}
ENGINE |= {"huggingface_hub", "jinja2"}
"""The last line and numpy, safetensors come with transformers."""
ALLOWED = {
    "engine": ENGINE | {"engine"},
    "storage": {"sqlalchemy", "alembic", "storage"},
    "presets": {"yaml", "pydantic", "engine", "presets"},
}
ONE_FILE = {
    "engine/grammar.py": {"llguidance"},
    "engine/kernels/cpu/gguf.py": {"gguf"},
    "engine/kernels/cpu/gguf_model.py": {"gguf"},
    "engine/model/placement.py": {"accelerate", "psutil"},
    "engine/model/random_weights.py": {"tokenizers"},
    "engine/training/corpus/writer.py": {"filelock"},
}
"""What one file alone may import besides."""


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def runtime_imports(file: Path) -> set[str]:
    """Packages that a module imports when it runs (not only for type checking)."""
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            node.body = []
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None and node.level == 0, f"{file} has a relative import"
            names.append(node.module)
    return {name.split(".")[0] for name in names}


@pytest.mark.parametrize("package", ALLOWED)
def test_a_package_imports_only_what_its_layer_may(package: str) -> None:
    for file in modules(package):
        place = file.relative_to(ROOT).as_posix()
        allowed = STDLIB | ALLOWED[package] | ONE_FILE.get(place, set())
        used = runtime_imports(file)
        assert used <= allowed, f"{place}: {used - allowed}"


def test_nothing_imports_the_command_line_or_the_tests() -> None:
    for file in itertools.chain.from_iterable(map(modules, (*ALLOWED, "playground"))):
        assert not runtime_imports(file) & {"app", "tests"}, file


def test_only_the_command_line_reads_arguments_and_environment() -> None:
    reads = re.compile(r"\bsys\.argv|\bos\.getenv|\bos\.environ(?!\[.*\] = )")
    for file in itertools.chain.from_iterable(map(modules, ALLOWED)):
        assert not reads.search(file.read_text()), file


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import storage", {"torch", "transformers", "gradio", "pydantic"}),
        ("import engine", {"gradio", "sqlalchemy"}),
        (
            "import playground.web.shell; from playground.host.catalog import Catalog; "
            "Catalog.shipped()",  # seconds of the page's start
            {"transformers.modeling_utils"},
        ),
    ],
)
@pytest.mark.slow
def test_importing_a_layer_leaves_others_unloaded(statement: str, absent: set[str]) -> None:
    code = f"import sys; {statement}; print(*sorted({absent!r} & sys.modules.keys()))"
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert run.stdout.strip() == ""
