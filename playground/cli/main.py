"""Command line, as `app.py` and as `specdec`: `serve` (default), `generate`, `bench`, `sweep`, …

A command's own module is imported when it runs, so that `--help` answers at once.
"""

from __future__ import annotations

import atexit
import gc

import typer

from playground.cli.commands import ServeOptions
from playground.cli.commands import app as app
from playground.cli.options import call_command
from playground.cli.streams import interrupt_on_termination


def run() -> None:
    """Run the command of the arguments."""
    atexit.register(gc.freeze)  # else the final garbage collection takes seconds
    interrupt_on_termination()
    app()


@app.callback(invoke_without_command=True)
def default(context: typer.Context) -> None:
    """Without a command: serve the page on 127.0.0.1:7860."""
    if context.invoked_subcommand is None:
        call_command("serve:serve", ServeOptions())
