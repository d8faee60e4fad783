"""Modules of the page under node, without a browser."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from playground.web.components import STATIC

NODE = shutil.which("node")


class Scripts:
    """Modules by the name of their file, as a function's argument sees them."""

    def evaluate(self, function: str, given: Any, *modules: str) -> Any:
        """What a JavaScript function of `(given, modules)` returns, by way of JSON."""
        imports = "".join(
            f"import * as {Path(name).stem} from {json.dumps((STATIC / name).as_uri())};\n"
            for name in modules
        )
        names = ", ".join(Path(name).stem for name in modules)
        code = (
            f'{imports}import {{ readFileSync }} from "node:fs";\n'
            'const given = JSON.parse(readFileSync(0, "utf8"));\n'
            f"console.log(JSON.stringify(await ({function})(given, {{ {names} }}) ?? null));"
        )
        assert NODE is not None
        run = subprocess.run(
            [NODE, "--input-type=module", "-e", code],
            input=json.dumps(given),
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert run.returncode == 0, run.stderr
        return json.loads(run.stdout)


@pytest.fixture(scope="session")
def scripts() -> Scripts:
    if NODE is None:
        pytest.skip("no node: install Node.js 20 or newer")
    return Scripts()
