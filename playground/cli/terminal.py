"""Terminal output of commands: progress, tables and plain texts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich import box, progress
from rich.console import Console
from rich.table import Table
from rich.text import Text

from engine.safe_text import visible

WIDE = 160
"""Width in characters where there is no terminal."""


@contextmanager
def progress_bar(
    console: Console, title: str = "", total: float | None = None
) -> Iterator[Callable[..., None]]:
    """A progress bar, updated by a function of the completed amount, a `note` and `total`."""
    columns = (
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(bar_width=30),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
        progress.TextColumn("{task.fields[note]}", markup=False),
    )
    with progress.Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(visible(title), total=total, note="")
        yield lambda done, note="", **more: bar.update(
            task, completed=done, note=visible(note), **more
        )


class Terminal(Console):
    """A console on which texts are shown literally: no markup, no control characters."""

    def __init__(self, *, stderr: bool = False, width: int | None = None) -> None:
        super().__init__(stderr=stderr, width=width, highlight=False)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(visible(text), **{**options, "markup": False})


def plain(text: str, *, style: str = "") -> Text:
    """A literal text for functions that accept markup or styled texts."""
    return Text(visible(text), style=style)


def print_wide(*renderables: Any) -> None:
    """Print tables, at `WIDE` characters where there is no terminal."""
    out = Terminal()
    if not out.is_terminal:
        out = Terminal(width=WIDE)
    for renderable in renderables:
        out.print(renderable)


def table(title: str, columns: Iterable[str], rows: Iterable[Sequence[str]] = ()) -> Table:
    """A table of numbers with a first column of names."""
    result = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    result.add_column("", no_wrap=True)
    for column in columns:
        result.add_column(column, justify="right", overflow="fold")
    for row in rows:
        result.add_row(*row)
    return result
