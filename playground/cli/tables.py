"""What commands print: progress, tables, and the report of a benchmark."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich import box, progress
from rich.console import Console
from rich.table import Table
from rich.text import Text

from engine.formats import figure
from engine.safe_text import visible
from playground.experiments.report import columns
from playground.experiments.report.columns import COLUMNS, by_group, summary
from playground.experiments.report.report import FORMULAS, Report, Section
from playground.experiments.report.statistics import LATENCY_ROWS, LatencyTable

WIDE = 160
"""Columns of text where no terminal says how many there are."""


@contextmanager
def progress_bar(
    console: Console, title: str = "", total: float | None = None
) -> Iterator[Callable[..., None]]:
    """A bar as a function of what is done; takes `total` and a `note` to show beside it, too."""
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
    """Where a command says something to a person; texts are shown, neither styled nor obeyed."""

    def __init__(self, *, stderr: bool = False, width: int | None = None) -> None:
        super().__init__(stderr=stderr, width=width, highlight=False)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(visible(text), **{**options, "markup": False})


def plain(text: str, *, style: str = "") -> Text:
    """A text as it is, for what takes markup or styled texts."""
    return Text(visible(text), style=style)


def print_wide(*shown: Any) -> None:
    """Tables as wide as they need to be where nobody's terminal limits them."""
    out = Terminal()
    if not out.is_terminal:
        out = Terminal(width=WIDE)
    for one in shown:
        out.print(one)


def table(title: str, columns: Iterable[str], rows: Iterable[Sequence[str]] = ()) -> Table:
    """Numbers behind a first column of names."""
    made = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    made.add_column("", no_wrap=True)
    for column in columns:
        made.add_column(column, justify="right", overflow="fold")
    for row in rows:
        made.add_row(*row)
    return made


# ---- a benchmark's report


def tables(report: Report) -> Iterator[Table | Text]:
    """Everything a terminal shows of a report."""
    for name in ("speedup", "mat"):
        column = COLUMNS[name]
        title = f"{column.title} by kind of task: {FORMULAS[name]}"
        yield _by_configuration(title, by_group(report, name, {}))
    yield _by_configuration("All figures", summary(report))
    for section in report.configurations:
        if section.latency is not None:
            yield _latency(section.name, section.latency)
        yield from _verdict(section)
    if report.headline:
        yield plain(report.headline, style="bold" if report.fastest else "")


def _by_configuration(title: str, figures: columns.Table) -> Table:
    """A column per configuration, which has fewer of them than figures."""
    names = [section.name for section, _ in figures.rows]
    by_figure = zip(*(cells for _, cells in figures.rows), strict=True)
    rows = [
        (head, *(cell.line for cell in cells))
        for head, cells in zip(figures.heads, by_figure, strict=True)
    ]
    return table(title, names, rows)


def _latency(name: str, latency: LatencyTable) -> Table:
    title = f"{name}: {latency.num_requests} requests, concurrency {latency.concurrency}"
    names = ("avg", "min", "max", "p99", "p90", "p75")
    rows = [
        (row, *(figure(getattr(latency.rows[key], name, None)) for name in names))
        for key, (row, _) in LATENCY_ROWS.items()
    ]
    rows.append(("Output token throughput (per sec)", figure(latency.output_token_throughput)))
    rows.append(("Request throughput (per sec)", figure(latency.request_throughput)))
    return table(title, names, rows)


def _verdict(section: Section) -> Iterator[Text]:
    verdict = section.verdict
    if verdict is None:
        return
    style = "" if verdict.identical else "yellow"
    of = f"{verdict.num_identical} of {verdict.num_compared} answers identical to plain decoding"
    yield plain(f"{section.name}: {of}. {section.verdict_sentence}", style=style)
    for sentence in verdict.divergences[0].gap if verdict.divergences else ():
        yield plain(f"  {sentence}", style=style)
