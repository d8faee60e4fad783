"""What commands read, print and write, and Ctrl+C."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer

from engine.safe_text import MAX_CHARS, as_text, visible, write_error_text

EXIT_INTERRUPTED = 130


def echo(text: str) -> None:
    """Print for people: control characters are shown, not obeyed."""
    typer.echo(visible(text))


def note(text: str) -> None:
    """Print for people on stderr."""
    typer.echo(visible(text), err=True)


def as_output(text: str) -> str:
    """A result verbatim for a file or pipe, and with visible control characters for a terminal."""
    return visible(text) if sys.stdout.isatty() else text


@contextmanager
def until_interrupt() -> Iterator[Callable[[], bool]]:
    """Yield a function that tells whether Ctrl+C was pressed; a second press ends the program."""
    interrupted = threading.Event()

    def interrupt(number: int, frame: Any) -> None:
        if interrupted.is_set():
            raise KeyboardInterrupt
        interrupted.set()

    previous = signal.signal(signal.SIGINT, interrupt)
    try:
        yield interrupted.is_set
    finally:
        signal.signal(signal.SIGINT, previous)


def interrupt_on_termination() -> None:
    """Let SIGTERM, and SIGHUP of a closed terminal, do what Ctrl+C does, unless ignored (nohup)."""

    def interrupt(number: int, frame: Any) -> None:
        handler = signal.getsignal(signal.SIGINT)
        (handler if callable(handler) else signal.default_int_handler)(number, frame)

    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)  # Windows has no SIGHUP
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, interrupt)


def read_stdin() -> str:
    """Standard input. Raises ConfigError: it is not text, or too long."""
    return as_text(sys.stdin.buffer.read(MAX_CHARS + 1), what="The input")


def write_files(folder: Path, texts: Mapping[str, str]) -> list[Path]:
    """Write texts under their names; returns their paths."""
    from engine.errors import ConfigError

    try:
        for name, text in texts.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(write_error_text(folder, error)) from error
    return [folder / name for name in texts]


def write_output(text: str, file: Path | None) -> None:
    """Print a text, or write it to a file and print its path."""
    if file is None:
        typer.echo(as_output(text), nl=False)
    else:
        echo(str(write_files(file.parent, {file.name: text})[0]))
