"""Notation of the figures of runs, and the columns of the tables of runs and of groups."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from engine import formats
from engine.formats import DASH
from engine.metrics import FORMULAS
from storage import Spread

Kind = Literal["text", "number", "when", "method", "prompt", "tags", "status"]


@dataclass(frozen=True, slots=True)
class Figure:
    """The title and notation of a figure.

    Attributes:
        scale: factor from the stored unit to that of the title.
        best: `max` or `min`, whichever picks the better value, if either does.
    """

    title: str
    form: Callable[[float | None], str] = formats.milliseconds
    scale: float = 1.0
    best: Callable[..., float] | None = None

    def text(self, value: float | None) -> str:
        return self.form(None if value is None else self.scale * value)

    def spread_text(self, spread: Spread | None) -> str:
        """Mean ± sample standard deviation."""
        if spread is None:
            return DASH
        std = "" if spread.std is None else f" ± {self.text(spread.std)}"
        return self.text(spread.mean) + std


FIGURES: dict[str, Figure] = {
    "num_prompt_tokens": Figure("prompt tokens", formats.count),
    "num_new_tokens": Figure("tokens", formats.count),
    "num_steps": Figure("steps", formats.count),
    "tok_s": Figure("tok/s", formats.tok_s, best=max),
    "speedup": Figure("speedup", formats.speedup, best=max),
    "mat": Figure("MAT", formats.mat, best=max),
    "draft_acceptance": Figure("acceptance", formats.percent, best=max),
    "ttft_s": Figure("TTFT ms", scale=1000, best=min),
    "itl_ms": Figure("ITL ms", best=min),
    "step_p50_ms": Figure("step p50 ms", best=min),
    "step_p95_ms": Figure("step p95 ms", best=min),
    "draft_s": Figure("draft ms", scale=1000),
    "verify_s": Figure("verify ms", scale=1000),
    "accept_s": Figure("accept ms", scale=1000),
    "other_s": Figure("other ms", scale=1000),
}
SPLIT = ("draft_s", "verify_s", "accept_s", "other_s")
"""Mean seconds of the parts of a step."""


def formula(name: str) -> str:
    """The definition of a figure, as its tooltip."""
    if name == "speedup":
        return (
            f"{FORMULAS[name]}, where that was timed around the run and the timing is reliable; "
            "the report of an experiment has the speedups of its requests"
        )
    return FORMULAS.get("time_split" if name in SPLIT else name, "")


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
    return Column(key, FIGURES[key].title, "number", sort, formula(key), default)


def _field(key: str, title: str = "") -> Column:
    return Column(key, title or key, sort=key)


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
GROUP_FIGURES = ("tok_s", "mat", "draft_acceptance", "ttft_s")
SPREAD = "; mean ± standard deviation over the runs, rates weighted by their seconds"
GROUP_COLUMNS: tuple[Column, ...] = (
    Column("value", "group", "prompt"),
    Column("num_runs", "runs", "number", "num_runs"),
    *(Column(k, FIGURES[k].title, "number", k, formula(k) + SPREAD) for k in GROUP_FIGURES),
    Column("newest_at", "newest", "when", "created_at"),
)
