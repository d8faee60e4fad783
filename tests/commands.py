"""Command lines in this process: what they print, and the one sentence of those refused."""

from __future__ import annotations

from typer.testing import CliRunner, Result

from playground.cli.main import app


def invoke(*words: object, code: int = 0, text: str | None = None) -> Result:
    result = CliRunner().invoke(app, [str(word) for word in words], input=text)
    assert result.exit_code == code, result.output
    return result


def refused(*words: object) -> str:
    """What a wrong command line is answered: one sentence, no traceback."""
    result = invoke(*words, code=2)
    (error,) = (line for line in result.stderr.splitlines() if line.startswith("error: "))
    assert "Traceback" not in result.output
    return error
