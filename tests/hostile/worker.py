"""Runs a command line in a process that may end with it; imports nothing else."""

from __future__ import annotations

import time
import traceback
from typing import Any

from typer.testing import CliRunner

from playground.cli.main import app


def outcome(arguments: list[str]) -> dict[str, Any]:
    """Exit code, what was printed, and the exception that no command caught."""
    began = time.process_time()
    result = CliRunner().invoke(app, arguments, input="")
    trace = ""
    if result.exc_info is not None and not isinstance(result.exception, SystemExit | None):
        trace = "".join(traceback.format_exception(*result.exc_info))
    return {
        "code": result.exit_code,
        "output": result.output[-20_000:],
        "stderr": result.stderr[-40_000:],
        "trace": trace[-1500:],
        "took_s": time.process_time() - began,
    }
