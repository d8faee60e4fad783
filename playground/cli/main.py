"""Command line, as `app.py` and as `specdec`: `serve` (default), `generate`, `bench`, `sweep`, …

Nothing heavy is imported before a command runs, so that `--help` answers at once.
"""

from __future__ import annotations

import atexit
import errno
import gc
import io
import os
import sys
from contextlib import suppress
from typing import Any

import typer
from typer.core import TyperGroup

from engine.safe_text import as_text, disk_is_full, write_error_text
from playground.cli.bench import bench
from playground.cli.connect import connect
from playground.cli.export import export, import_
from playground.cli.generate import generate
from playground.cli.runs import runs
from playground.cli.serve import doctor, methods, models, serve, triton
from playground.cli.streams import EXIT_INTERRUPTED, interrupt_on_termination, note
from playground.cli.suites import suites
from playground.cli.sweep import sweep
from playground.cli.train import train

EXIT_USER_ERROR = 2


class CommandGroup(TyperGroup):
    """Reports the playground's own errors as one sentence on stderr."""

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")
        try:
            for argument in ctx.args:
                as_text(argument, what=f"The argument {argument[:40]!r}")
            result = super().invoke(ctx)
            sys.stdout.flush()  # raises here if the disk is full, so that it is reported
            return result
        except KeyboardInterrupt as error:
            note("Stopped.")
            raise typer.Exit(EXIT_INTERRUPTED) from error
        except OSError as error:
            if error.errno == errno.EPIPE:  # the reader has closed the pipe
                raise
            # Else Python flushes to the failed stream again at exit.
            with suppress(OSError), open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), sys.stdout.fileno())
            what = error.filename or "The output"
            full = disk_is_full(error)
            reason = (
                write_error_text(what, error) if full else f"{what}: {error.strerror or error}."
            )
            note(f"error: {reason:.2000}")
            raise typer.Exit(EXIT_USER_ERROR) from error
        except Exception as error:  # errors are imported only when needed, to keep --help fast
            from engine.errors import PlaygroundError
            from storage import StorageError

            if not isinstance(error, PlaygroundError | StorageError):
                raise
            note(f"error: {error!s:.2000}")
            raise typer.Exit(EXIT_USER_ERROR) from error


app = typer.Typer(
    cls=CommandGroup,
    name="specdec",
    help="See, tune and compare speculative decoding on your own machine.",
    no_args_is_help=False,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(runs)
app.add_typer(suites)
commands = (serve, doctor, triton, generate, bench, sweep, connect, train, export, models, methods)
for command in commands:
    app.command()(command)
app.command("import")(import_)


def run() -> None:
    """Run the command of the arguments."""
    atexit.register(gc.freeze)  # else the final garbage collection takes seconds
    interrupt_on_termination()
    app()


@app.callback(invoke_without_command=True)
def default(context: typer.Context) -> None:
    """Without a command: serve the page on 127.0.0.1:7860."""
    if context.invoked_subcommand is None:
        serve()
