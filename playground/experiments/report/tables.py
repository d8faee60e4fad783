"""A report as tables for a terminal: a column per configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from playground.experiments.report.report import Cell, Report, Section
from playground.experiments.report.statistics import LATENCY_ROWS, LatencyTable
from playground.experiments.report.verdict import CAUSES

DASH = "–"
MOST_RATES = 8


def tables(report: Report) -> Iterator[Table | Text]:
    """Everything a terminal shows of a report."""
    yield _by_group(
        report,
        "Speedup: Σ tokens / Σ decoding time, over the same of plain decoding",
        lambda cell: f"{cell.speedup.ratio:.2f}x" if cell.speedup else DASH,
        {
            f"  spread over {_spread_over(report)}": lambda s: _spread(s.overall),
            "  mean of ratios": lambda s: _mean_of_ratios(s.overall),
            "tok/s": lambda s: _number(s.overall.tok_s, 1),
        },
    )
    yield _by_group(
        report,
        "MAT = 1 + accepted draft tokens / steps (new tokens / steps behind it)",
        lambda c: DASH if c.mat is None else f"{c.mat:.2f} ({c.num_new_tokens}/{c.num_steps})",
        {"position rates (%)": _rates},
    )
    times = _table("Milliseconds of a step", [s.name for s in report.configurations])
    for part in ("draft", "verify", "accept", "other"):
        row = (_number((s.split_ms or {}).get(part), 2) for s in report.configurations)
        times.add_row(part, *row)
    times.add_row("step", *(_number(s.overall.step_ms, 2) for s in report.configurations))
    times.add_row("TTFT", *(_number(s.ttft_ms, 1) for s in report.configurations))
    times.add_row("ITL, mean over steps", *(_number(s.itl_ms, 2) for s in report.configurations))
    yield times
    for section in report.configurations:
        if section.latency is not None:
            yield _latency(section.name, section.latency)
        yield from _verdict(section)
    if report.headline:
        yield Text(report.headline, style="bold")


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", overflow="fold")
    return table


def _by_group(
    report: Report,
    title: str,
    text_of: Callable[[Cell], str],
    more: dict[str, Callable[[Section], str]],
) -> Table:
    """A row per kind of task, one overall, and more rows."""
    sections = report.configurations
    table = _table(title, [section.name for section in sections])
    for group in report.groups:
        cells = (section.groups.get(group) for section in sections)
        table.add_row(group, *(DASH if cell is None else text_of(cell) for cell in cells))
    table.add_row("overall", *(text_of(section.overall) for section in sections))
    for name, row in more.items():
        table.add_row(name, *(row(section) for section in sections))
    return table


def _spread_over(report: Report) -> str:
    fast = report.configurations[0].overall.speedup
    return "requests (quartiles)" if fast is None or fast.spread_over == "requests" else "repeats"


def _spread(cell: Cell) -> str:
    fast = cell.speedup
    return DASH if fast is None else f"{fast.low:.2f}…{fast.high:.2f}"


def _mean_of_ratios(cell: Cell) -> str:
    return DASH if cell.speedup is None else f"{cell.speedup.mean_of_ratios:.2f}x"


def _rates(section: Section) -> str:
    rates = " ".join(f"{100 * rate:.0f}" for rate in section.position_rates[:MOST_RATES])
    return rates + " …" * (len(section.position_rates) > MOST_RATES) or DASH


def _latency(name: str, latency: LatencyTable) -> Table:
    title = f"{name}: {latency.num_requests} requests, concurrency {latency.concurrency}"
    names = ("avg", "min", "max", "p99", "p90", "p75")
    table = _table(title, names)
    for key, (row, _) in LATENCY_ROWS.items():
        table.add_row(row, *(_number(getattr(latency.rows[key], n, None), 2) for n in names))
    table.add_row("Output token throughput (per sec)", f"{latency.output_token_throughput:.2f}")
    table.add_row("Request throughput (per sec)", f"{latency.request_throughput:.2f}")
    return table


def _verdict(section: Section) -> Iterator[Text]:
    verdict = section.verdict
    if verdict is None:
        return
    of = f"{verdict.num_identical} of {verdict.num_compared} answers identical to plain"
    if verdict.cause is None:
        yield Text(f"{section.name}: {of}")
        return
    first = verdict.divergences[0]
    where = f"{first.suite} {first.prompt}, turn {first.turn + 1}, token {first.at + 1}"
    why = CAUSES[verdict.cause] if section.lossless else "a lossy method"
    yield Text(f"{section.name}: {of}: {why}; first difference: {where}", style="yellow")
    for sentence in first.gap:
        yield Text(f"  {sentence}", style="yellow")


def _number(value: float | None, digits: int) -> str:
    return DASH if value is None else f"{value:.{digits}f}"
