"""What import contracts cannot say: which libraries a layer may use, and what it never reads.

The contracts themselves, layers and circles, are in pyproject.toml; scripts/check holds them.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
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
    "engine/model/placement.py": {"accelerate"},
    "engine/model/random_weights.py": {"tokenizers"},
    "engine/model/tokenizer.py": {"tokenizers"},
    "engine/training/corpus/writer.py": {"filelock"},
}
"""What one file alone may import besides."""
OURS = {"app", "playground", "engine", "storage", "presets"}


def modules(package: str) -> list[Path]:
    return sorted(p for p in (ROOT / package).rglob("*.py") if "__pycache__" not in p.parts)


def runtime_imports(file: Path) -> Iterator[str]:
    """Dotted names that a module imports when it runs (not only for type checking)."""
    tree = ast.parse(file.read_text())
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for child in node.body
        for inner in ast.walk(child)
    }
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} has a relative import"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def top(name: str) -> str:
    return name.split(".")[0]


@pytest.mark.parametrize("package", ALLOWED)
def test_a_package_imports_only_what_its_layer_may(package: str) -> None:
    files = modules(package)
    for file in files:
        used = {top(name) for name in runtime_imports(file)} - set(STDLIB)
        used -= ONE_FILE.get(file.relative_to(ROOT).as_posix(), set())
        assert used <= ALLOWED[package], f"{file.relative_to(ROOT)}: {used - ALLOWED[package]}"


def test_nothing_imports_the_command_line_or_the_tests() -> None:
    for package in OURS - {"app"}:
        for file in modules(package):
            used = {top(name) for name in runtime_imports(file)}
            assert not used & {"app", "tests"}, file.relative_to(ROOT)


def test_only_the_command_line_reads_arguments_and_environment() -> None:
    for package in ("engine", "storage", "presets"):
        for file in modules(package):
            nodes = list(ast.walk(ast.parse(file.read_text())))
            # what libraries are told before they start
            written = {
                id(node.value)
                for node in nodes
                if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)
            }
            reads = {
                f"{node.value.id}.{node.attr}"
                for node in nodes
                if isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and id(node) not in written
            }
            assert not reads & {"sys.argv", "os.environ", "os.getenv"}, file.relative_to(ROOT)


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
