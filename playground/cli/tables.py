"""The report of a benchmark as commands print it."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table
from rich.text import Text

from engine.figures import POOLED_FORMULAS
from engine.formats import figure
from playground.cli.terminal import plain, table
from playground.experiments.report import columns
from playground.experiments.report.columns import COLUMNS, by_group, summary
from playground.experiments.report.report import Report, Section
from playground.experiments.statistics import LATENCY_COLUMNS, LatencyTable


def tables(report: Report) -> Iterator[Table | Text]:
    """Everything a terminal shows of a report."""
    for name in ("speedup", "mat"):
        column = COLUMNS[name]
        title = f"{column.title} by kind of task: {POOLED_FORMULAS[name]}"
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
    title = f"{name}: {latency.num_requests} requests, concurrency 1"
    rows = [(row, *map(figure, values)) for row, _, values in latency.lines()]
    return table(title, LATENCY_COLUMNS, rows)


def _verdict(section: Section) -> Iterator[Text]:
    verdict = section.verdict
    if verdict is None:
        return
    style = "" if verdict.identical else "yellow"
    of = f"{verdict.num_identical} of {verdict.num_compared} answers identical to plain decoding"
    yield plain(f"{section.name}: {of}. {section.verdict_sentence}", style=style)
    if verdict.divergences and (gap := verdict.divergences[0].gap):
        yield plain(f"  {gap}", style=style)
