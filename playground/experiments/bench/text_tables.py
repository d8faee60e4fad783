"""A report as tables for a terminal: a column per configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from playground.experiments.bench.latency import ROWS, LatencyTable
from playground.experiments.bench.report import Cell, Report, Section
from playground.experiments.bench.stats import Statistic

DASH = "–"
WIDE = 160
"""Columns of text where no terminal says how many there are."""
MOST_RATES = 8
Row = tuple[str, Callable[[Section], str]]


def tables(report: Report) -> Iterator[Table | Text]:
    """Everything a terminal shows of a report."""
    sections = report.configurations
    yield _speedups(report)
    yield _acceptance(report)
    yield _by_section("Milliseconds of a step", sections, _time_rows())
    for section in sections:
        if section.latency is not None:
            yield _latency(section, section.latency)
    yield from _verdicts(report)
    if report.headline:
        yield Text(report.headline, style="bold")


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", overflow="fold")
    return table


def _by_section(title: str, sections: Sequence[Section], rows: Sequence[Row]) -> Table:
    table = _table(title, [section.name for section in sections])
    for name, text_of in rows:
        table.add_row(name, *(text_of(section) for section in sections))
    return table


def _of_group(group: str, text_of: Callable[[Cell], str]) -> Callable[[Section], str]:
    def text(section: Section) -> str:
        cell = section.groups.get(group)
        return DASH if cell is None else text_of(cell)

    return text


def _speedups(report: Report) -> Table:
    rows: list[Row] = [(group, _of_group(group, _ratio)) for group in report.groups]
    rows.append(("overall", lambda s: _ratio(s.overall)))
    rows.append((f"  spread over {_spread_over(report)}", lambda s: _spread(s.overall)))
    rows.append(("  mean of ratios", lambda s: _mean_of_ratios(s.overall)))
    rows.append(("tok/s", lambda s: _number(s.overall.tok_s, 1)))
    title = "Speedup: Σ tokens / Σ decoding time, over the same of plain decoding"
    return _by_section(title, report.configurations, rows)


def _spread_over(report: Report) -> str:
    fast = report.configurations[0].overall.speedup
    return "requests (quartiles)" if fast is None or fast.spread_over == "requests" else "repeats"


def _ratio(cell: Cell) -> str:
    return DASH if cell.speedup is None else f"{cell.speedup.ratio:.2f}x"


def _spread(cell: Cell) -> str:
    fast = cell.speedup
    return DASH if fast is None else f"{fast.low:.2f}…{fast.high:.2f}"


def _mean_of_ratios(cell: Cell) -> str:
    return DASH if cell.speedup is None else f"{cell.speedup.mean_of_ratios:.2f}x"


def _acceptance(report: Report) -> Table:
    rows: list[Row] = [(group, _of_group(group, _mat)) for group in report.groups]
    rows.append(("overall", lambda s: _mat(s.overall)))
    rows.append(("position rates (%)", _rates))
    title = "MAT = 1 + accepted draft tokens / steps (new tokens / steps behind it)"
    return _by_section(title, report.configurations, rows)


def _mat(cell: Cell) -> str:
    if cell.mat is None:
        return DASH
    return f"{cell.mat:.2f} ({cell.num_new_tokens}/{cell.num_steps})"


def _rates(section: Section) -> str:
    rates = " ".join(f"{100 * rate:.0f}" for rate in section.position_rates[:MOST_RATES])
    return rates + " …" * (len(section.position_rates) > MOST_RATES) or DASH


def _time_rows() -> list[Row]:
    def part(name: str) -> Callable[[Section], str]:
        return lambda section: _number((section.split_ms or {}).get(name), 2)

    rows: list[Row] = [(name, part(name)) for name in ("draft", "verify", "accept", "other")]
    rows.append(("step", lambda s: _number(s.overall.step_ms, 2)))
    rows.append(("TTFT", lambda s: _number(s.ttft_ms, 1)))
    rows.append(("ITL, mean over steps", lambda s: _number(s.itl_ms, 2)))
    return rows


def _latency(section: Section, latency: LatencyTable) -> Table:
    title = f"{section.name}: {latency.num_requests} requests, concurrency {latency.concurrency}"
    table = _table(title, ("avg", "min", "max", "p99", "p90", "p75"))
    for key, name in ROWS.items():
        table.add_row(name, *_statistic(latency.rows[key]))
    table.add_row("Output token throughput (per sec)", f"{latency.output_token_throughput:.2f}")
    table.add_row("Request throughput (per sec)", f"{latency.request_throughput:.2f}")
    return table


def _statistic(row: Statistic | None) -> list[str]:
    if row is None:
        return [DASH] * 6
    return [f"{value:.2f}" for value in (row.avg, row.min, row.max, row.p99, row.p90, row.p75)]


CAUSES = {
    "near ties": "near-ties, which rounding alone flips",
    "fault": "no rounding does this, the method is at fault",
    "unknown": "why was not looked into",
}


def _verdicts(report: Report) -> Iterator[Text]:
    for section in report.configurations:
        verdict = section.verdict
        if verdict is None:
            continue
        of = f"{verdict.num_identical} of {verdict.num_compared} answers identical to plain"
        if verdict.cause is None:
            yield Text(f"{section.name}: {of}")
            continue
        first = verdict.divergences[0]
        where = f"{first.suite} {first.prompt}, turn {first.turn + 1}, token {first.at + 1}"
        why = CAUSES[verdict.cause] if section.lossless else "a lossy method"
        yield Text(f"{section.name}: {of}: {why}; first difference: {where}", style="yellow")
        for words in first.gap:
            yield Text(f"  {words}", style="yellow")


def _number(value: float | None, digits: int) -> str:
    return DASH if value is None else f"{value:.{digits}f}"
