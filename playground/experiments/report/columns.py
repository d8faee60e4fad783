"""The figures of a configuration as columns.

The tables of the pages, of the command line and of the HTML report are made from these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engine import formats
from engine.errors import validate_choice
from engine.figures import FIGURES, POOLED_FORMULAS
from engine.formats import DASH, duration, percent, plural
from playground.experiments.report.report import Figures, Report, Section
from playground.experiments.report.verdict import CAUSES
from playground.host.speedup import DOUBTS, Speedup

BARS = "▁▂▃▄▅▆▇█"
MAX_BARS, MAX_RATES = 10, 3


class Cell(NamedTuple):
    """A cell of a table.

    Attributes:
        small: a second line.
        mood: good, warn or bad, for its colour.
        hint: tooltip.
    """

    text: str
    small: str = ""
    mood: str = ""
    hint: str = ""

    @property
    def line(self) -> str:
        """The cell in one line."""
        return f"{self.text} ({self.small})" if self.small else self.text


def speedup_cell(speedup: Speedup | None, *, reference: bool = False) -> Cell:
    """A speedup with its interval; the mood follows from the interval, never from the ratio alone.

    Args:
        reference: whether it is plain decoding's own, which is 1 and has no interval.
    """
    if reference:
        return Cell(formats.speedup(1.0))
    if speedup is None:
        return Cell(DASH)
    mood = "good" if speedup.faster else "bad" if speedup.slower else ""
    hint = f"{plural(speedup.num_pairs, 'request')}: {plural(speedup.num_prompts, 'prompt')} × "
    hint += f"{plural(speedup.num_repeats, 'repeat')}; below: 95% interval"
    hint = f"No number: {DOUBTS[speedup.doubt]}" if speedup.doubt else hint
    return Cell(speedup.text, speedup.interval, mood, hint)


def _mat(section: Section, figures: Figures) -> Cell:
    if not figures.num_steps:
        return Cell(DASH)
    return Cell(formats.mat(figures.mat), f"{figures.num_new_tokens} / {figures.num_steps}")


def _rates(section: Section, figures: Figures) -> Cell:
    """A bar per draft token, and the first rates as numbers."""
    rates = section.position_rates[:MAX_BARS]
    bars = "".join(BARS[round(rate * (len(BARS) - 1))] for rate in rates)
    hint = "\n".join(
        f"at least {plural(i, 'draft token')} accepted in {percent(rate)} of steps"
        for i, rate in enumerate(rates, start=1)
    )
    return (
        Cell(bars, ", ".join(map(percent, rates[:MAX_RATES])), hint=hint) if rates else Cell(DASH)
    )


def _step(section: Section, figures: Figures) -> Cell:
    split = section.time_split
    text = duration(section.overall.step_ms)
    return Cell(text, formats.time_split(split.ms)) if split else Cell(DASH)


def _answers(section: Section, figures: Figures) -> Cell:
    """Whether its answers equal plain decoding's."""
    verdict = section.verdict
    if section.reference:
        unsteady = section.num_unsteady
        return (
            Cell("not repeatable", plural(unsteady, "prompt"), "warn") if unsteady else Cell(DASH)
        )
    if verdict is None:
        return Cell(DASH)
    same = f"{verdict.num_identical} of {verdict.num_compared}"
    if not section.lossless:
        return Cell("identical" if verdict.cause is None else same, "lossy by design", "warn")
    if verdict.cause is None:
        return Cell("identical", mood="good")
    cause, mood, _ = CAUSES[verdict.cause]
    return Cell(same, f"{cause}, from token {verdict.divergences[0].at + 1}", mood)


@dataclass(frozen=True, slots=True)
class Column:
    """One figure of a configuration, over all prompts or over one kind of task."""

    title: str
    formula: str
    cell: Callable[[Section, Figures], Cell]


def _column(
    name: str, cell: Callable[[Section, Figures], Cell], *, title: str = "", below: str = ""
) -> Column:
    """The catalogue's figure; `below` is the formula of its second line."""
    formula = POOLED_FORMULAS[name] + (f"; below it: {below}" if below else "")
    return Column(title or FIGURES[name].title, formula, cell)


COLUMNS: dict[str, Column] = {
    "speedup": _column(
        "speedup",
        lambda section, figures: speedup_cell(figures.speedup, reference=section.reference),
        below=POOLED_FORMULAS["interval"],
    ),
    "request_speedup": _column(
        "request_speedup",
        lambda s, f: Cell(formats.speedup(1.0 if s.reference else f.request_speedup)),
        title="request speedup",
    ),
    "tok_s": _column("tok_s", lambda _, figures: Cell(formats.tok_s(figures.tok_s))),
    "mat": _column("mat", _mat, below="new tokens / steps"),
    "draft_acceptance": _column("draft_acceptance", lambda s, _: Cell(percent(s.draft_acceptance))),
    "position_rates": _column("position_rates", _rates),
    "time_split": _column("time_split", _step, title="time per step"),
    "ttft_ms": _column("ttft_ms", lambda s, _: Cell(duration(s.ttft_ms)), title="TTFT"),
    "itl_ms": _column("itl_ms", lambda s, _: Cell(duration(s.itl_ms))),
    "verdict": _column("verdict", _answers, title="answers"),
}


class Table(NamedTuple):
    """Column titles with their formulas, and the cells of every configuration."""

    heads: Mapping[str, str]
    rows: Sequence[tuple[Section, Sequence[Cell]]]


def summary(report: Report) -> Table:
    """Every figure of every configuration."""
    heads = {column.title: column.formula for column in COLUMNS.values()}
    return Table(
        heads,
        [
            (s, [column.cell(s, s.overall) for column in COLUMNS.values()])
            for s in report.configurations
        ],
    )


def by_group(report: Report, name: str, titles: Mapping[str, str]) -> Table:
    """Spec-Bench's table of one figure: a column per kind of task, and one overall.

    Args:
        titles: titles of the groups.
    """
    column = COLUMNS[validate_choice("the figure", name, ("speedup", "mat"))]
    heads = {group: f"{titles.get(group, group)}: {column.formula}" for group in report.groups}
    rows = []
    for section in report.configurations:
        figures = [*(section.groups.get(group) for group in report.groups), section.overall]
        cells = [Cell(DASH) if one is None else column.cell(section, one) for one in figures]
        rows.append((section, cells))
    return Table({**heads, "overall": column.formula}, rows)
