"""The columns of the tables of runs and of groups of runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.figures import FIGURES, Figure
from engine.formats import DASH
from storage import Spread

Kind = Literal["text", "number", "when", "method", "prompt", "tags", "status"]


def spread_text(figure: Figure, spread: Spread | None) -> str:
    """Mean ± sample standard deviation."""
    if spread is None:
        return DASH
    std = "" if spread.std is None else f" ± {figure.text(spread.std)}"
    return figure.text(spread.mean) + std


def formula(name: str) -> str:
    """The definition of a figure of a run, as its tooltip."""
    if name == "speedup":
        return (
            f"{FIGURES[name].formula}, where that was timed around the run and the timing is "
            "reliable; the report of an experiment has the speedups of its requests"
        )
    return FIGURES[name].formula


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the table of runs.

    Attributes:
        kind: the type of its cells, for the page.
        sort: the field that its head sorts by, if any.
        default: whether it is shown by default.
    """

    key: str
    title: str
    kind: Kind = "text"
    sort: str | None = None
    help: str = ""
    default: bool = False


def _figure(key: str, default: bool = False) -> Column:
    sort = None if key == "speedup" else key  # the database does not have it
    return Column(key, FIGURES[key].heading, "number", sort, formula(key), default)


def _field(key: str, title: str = "") -> Column:
    return Column(key, title or key, sort=key)


SPLIT = ("draft_s", "verify_s", "accept_s", "other_s")
"""Mean seconds of the parts of a step."""
NAMED = "the run's name, if it has one, and its prompt; sorts by name"
COLUMNS: tuple[Column, ...] = (
    Column("created_at", "when", "when", "created_at", default=True),
    Column("method_title", "method", "method", "method_title", default=True),
    Column("settings", "settings", help="settings that differ from their defaults", default=True),
    _field("target"),
    Column("prompt", "prompt", "prompt", "name", NAMED, default=True),
    Column("tags", "tags", "tags", default=True),
    Column("note", "note"),
    Column("labels", "labels", help="what a benchmark groups by"),
    Column("benchmark_id", "benchmark"),
    _figure("num_prompt_tokens"),
    _figure("num_new_tokens", default=True),
    _figure("num_steps"),
    *(_figure(key, default=True) for key in ("tok_s", "speedup", "mat")),
    *map(_figure, ("draft_acceptance", "ttft_s", "itl_ms", "step_p50_ms", "step_p95_ms")),
    *map(_figure, SPLIT),
    Column("temperature", "temperature"),
    Column("seed", "seed"),
    _field("dtype"),
    _field("device"),
    Column("status", "run status", "status", "status", default=True),
    _field("finish_reason", "ended by"),
)
RUN_FIGURES = tuple(column.key for column in COLUMNS if column.key in FIGURES)
GROUP_FIGURES = ("tok_s", "mat", "draft_acceptance", "ttft_s")
SPREAD = "; mean ± standard deviation over the runs, rates weighted by their seconds"
GROUP_COLUMNS: tuple[Column, ...] = (
    Column("value", "group", "prompt"),
    Column("num_runs", "runs", "number", "num_runs"),
    *(Column(k, FIGURES[k].heading, "number", k, formula(k) + SPREAD) for k in GROUP_FIGURES),
    Column("newest_at", "newest", "when", "created_at"),
)
