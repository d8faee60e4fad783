"""What a process loads; the contracts of imports are in pyproject.toml."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import storage", "torch gradio pydantic"),
        pytest.param("import engine", "gradio sqlalchemy", marks=pytest.mark.slow),
        pytest.param(
            "import playground.web.shell; from playground.host.catalog import Catalog; "
            "Catalog.shipped()",  # seconds of the page's start
            "transformers.modeling_utils",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_layer_is_loaded_without_the_others(statement: str, absent: str) -> None:
    heavy = f"{set(absent.split())!r} & sys.modules.keys()"
    code = f"import sys; {statement}; print(*sorted({heavy}), sep=',')"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1] == ""
