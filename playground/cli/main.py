"""Command line, as `app.py` and as `specdec`: `serve` (default), `generate`, `bench`, `sweep`, …

Nothing heavy is imported before a command runs, so that `--help` answers at once.
"""

from __future__ import annotations

import atexit
import gc

import typer

from playground.cli.bench import bench
from playground.cli.connect import connect
from playground.cli.export import export, import_
from playground.cli.generate import generate
from playground.cli.options import CommandGroup
from playground.cli.runs import runs
from playground.cli.serve import doctor, methods, models, serve, triton
from playground.cli.suites import suites
from playground.cli.sweep import sweep
from playground.cli.train import train

app = typer.Typer(
    cls=CommandGroup,
    name="app.py",
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
    app()


@app.callback(invoke_without_command=True)
def default(context: typer.Context) -> None:
    """Without a command: serve the page on 127.0.0.1:7860."""
    if context.invoked_subcommand is None:
        serve()
