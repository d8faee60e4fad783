"""What commands print: progress, tables, and the report of a benchmark."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich import box, progress
from rich.console import Console
from rich.table import Table
from rich.text import Text

from engine import formats
from engine.formats import DASH, figure, milliseconds
from engine.safe_text import visible
from playground.experiments.report.report import Cell, Report, Section
from playground.experiments.report.statistics import LATENCY_ROWS, LatencyTable
from playground.experiments.report.verdict import CAUSES

MOST_RATES = 8
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
    yield _by_group(
        report,
        "Speedup: Σ tokens / Σ decoding time, over the same of plain decoding",
        lambda cell: cell.speedup.text if cell.speedup else DASH,
        {
            "  95% interval": _interval,
            "tok/s": lambda s: formats.tok_s(s.overall.tok_s),
        },
    )
    yield _by_group(
        report,
        "MAT = 1 + accepted draft tokens / steps (new tokens / steps behind it)",
        lambda c: f"{formats.mat(c.mat)} ({c.num_new_tokens}/{c.num_steps})" if c.mat else DASH,
        {"position rates": _rates},
    )
    sections = report.configurations
    parts = dict.fromkeys(name for s in sections if s.time_split for name in s.time_split.ms)
    yield table(
        "Milliseconds of a step",
        [s.name for s in sections],
        [
            *((part, *(_part(s, part) for s in sections)) for part in parts),
            ("step", *(milliseconds(s.overall.step_ms) for s in sections)),
            ("TTFT", *(milliseconds(s.ttft_ms) for s in sections)),
            ("ITL", *(milliseconds(s.itl_ms) for s in sections)),
        ],
    )
    for section in sections:
        if section.latency is not None:
            yield _latency(section.name, section.latency)
        yield from _verdict(section)
    if report.headline:
        yield plain(report.headline, style="bold" if report.fastest else "")


def _by_group(
    report: Report,
    title: str,
    text_of: Callable[[Cell], str],
    more: dict[str, Callable[[Section], str]],
) -> Table:
    """A row per kind of task, one overall, and more rows."""
    sections = report.configurations
    cells = {group: [section.groups.get(group) for section in sections] for group in report.groups}
    cells["overall"] = [section.overall for section in sections]
    rows = [
        (name, *(DASH if cell is None else text_of(cell) for cell in row))
        for name, row in cells.items()
    ]
    rows += [(name, *(row(section) for section in sections)) for name, row in more.items()]
    return table(title, [section.name for section in sections], rows)


def _interval(section: Section) -> str:
    fast = None if section.reference else section.overall.speedup
    return (fast and fast.interval) or DASH


def _part(section: Section, part: str) -> str:
    return milliseconds(section.time_split.ms.get(part, 0.0)) if section.time_split else DASH


def _rates(section: Section) -> str:
    rates = " ".join(map(formats.percent, section.position_rates[:MOST_RATES]))
    return rates + " …" * (len(section.position_rates) > MOST_RATES) or DASH


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
    of = f"{verdict.num_identical} of {verdict.num_compared} answers identical to plain decoding"
    if verdict.cause is None:
        yield plain(f"{section.name}: {of}")
        return
    first = verdict.divergences[0]
    where = f"{first.suite} {first.prompt}, turn {first.turn + 1}, token {first.at + 1}"
    why = CAUSES[verdict.cause] if section.lossless else "a lossy method"
    yield plain(f"{section.name}: {of}: {why}; first difference: {where}", style="yellow")
    for sentence in first.gap:
        yield plain(f"  {sentence}", style="yellow")
