"""The table of the Runs page: a page of runs or groups of the log, in columns."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Any
from urllib.parse import urlencode

from engine import formats
from engine.figures import FIGURES
from engine.formats import DASH
from playground.host.catalog import MethodTypes
from playground.host.result import sure_speedup
from playground.host.speedup import Measured, speedups_of
from playground.runs.columns import (
    COLUMNS,
    GROUP_COLUMNS,
    GROUP_FIGURES,
    RUN_FIGURES,
    Column,
    spread_text,
)
from playground.runs.query import FLAT, NUM_RUNS, PAGE_SIZE, TableQuery
from playground.runs.settings import non_default
from storage import (
    LABEL_PREFIX,
    PLAIN,
    ExperimentRow,
    RunGroup,
    RunLog,
    RunSummary,
)

KINDS = {
    "benchmark": "Benchmark",
    "sweep": "Sweep",
    "compare": "Comparison",
    "replay": "Replay",
}
"""Titles of the kinds of experiments."""
REPORTS = ("benchmark", "compare")
"""Kinds of experiments whose report has an address."""
MAX_GROUPS = MAX_BENCHMARKS = 200
GROUPS = {
    "method_title": "method",
    "setup_id": "configuration",
    "prompt_id": "prompt",
    "experiment_id": "benchmark",
    "status": "run status",
    **{name: name for name in ("target", "dtype", "device", "tag")},
}


class RunTable:
    """Rows, groups and menus of the table.

    Args:
        types: config class of each decoding type; settings at their defaults are not shown.
    """

    def __init__(self, log: RunLog, types: MethodTypes | None = None) -> None:
        self.log = log
        self.types = types or {}

    def view(self, query: TableQuery, columns: Collection[str] = ()) -> dict[str, Any]:
        """The table as the page draws it: heads, rows of cells, number of rows."""
        if query.grouped:
            return self._grouped_view(query)
        shown_columns = [c for c in COLUMNS if c.key in columns or (c.default and not columns)]
        run_query = query.run_query()
        page = self.log.experiments.page(run_query) if query.folded else self.log.find(run_query)
        single = [row for row in page.rows if isinstance(row, RunSummary)]
        metrics = self.log.metrics([run.id for run in single])
        measured = speedups_of(self.log, [r.id for r in page.rows if isinstance(r, ExperimentRow)])
        rows = [
            self._row(row, metrics.get(row.id, {}))
            if isinstance(row, RunSummary)
            else experiment_row(row, measured[row.id])
            for row in page.rows
        ]
        if "benchmark_id" in columns:
            names = self._benchmark_names()
            rows = [
                {**row, "benchmark_id": names.get(str(row.get("experiment_id")), "")}
                for row in rows
            ]
        first = PAGE_SIZE * query.page
        nothing = "No run matches." if query.filters else "No runs yet. Generate something."
        return {
            "heads": _heads(shown_columns, query.sort, query.descending),
            "rows": [_cells(row, shown_columns) for row in rows],
            "count": f"{first + 1}–{first + len(rows)} of {page.total:,}" if rows else "",
            "nothing": nothing,
            "pages": [query.page, -(-page.total // PAGE_SIZE)],
        }

    def _row(self, run: RunSummary, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """The cells of a run by column."""
        row = asdict(run) | {
            "created_at": _when(run.created_at),
            "method_title": [run.method_title, run.lossless],
            "settings": non_default(run, self.types),
            "prompt": [run.name, " ".join(run.prompt_text.split())],
            "labels": " · ".join(f"{key} {value}" for key, value in run.labels.items()),
            "temperature": run.sampling.get("temperature"),
            "seed": run.sampling.get("seed"),
            "num_steps": run.num_steps or None,  # of another engine, unless it reports them
            "speedup": own_speedup(run, metrics),
        }
        return row | {name: FIGURES[name].text(row[name]) for name in RUN_FIGURES}

    def _grouped_view(self, query: TableQuery) -> dict[str, Any]:
        by = query.group or ""
        sort = query.sort if query.sort in (*GROUP_FIGURES, "created_at") else NUM_RUNS
        benchmarks = self._benchmark_names() if by == "experiment_id" else {}
        groups = self.log.groups(query.run_query(), by, MAX_GROUPS)
        ordered = _ordered(groups, sort, query.descending)
        rows = [
            {
                "id": group.value,
                "value": self._group_title(group, by, benchmarks),
                "num_runs": group.num_runs,
                "newest_at": _when(group.newest_at),
                **{n: spread_text(FIGURES[n], group.figures.get(n)) for n in GROUP_FIGURES},
            }
            for group in ordered
        ]
        more = ", the largest" if len(rows) == MAX_GROUPS else ""
        return {
            "heads": _heads(GROUP_COLUMNS, sort, query.descending),
            "rows": [_cells(row, GROUP_COLUMNS) for row in rows],
            "count": f"{formats.plural(len(rows), 'group')}{more}",
            "nothing": "No run matches.",
            "pages": [0, 1],
            "grouped": True,
        }

    def _group_title(
        self, group: RunGroup, by: str, benchmarks: Mapping[str, str]
    ) -> tuple[str, str]:
        """The common value of a group, and a remark beside it."""
        run, value = group.example, group.value
        if value is None:
            return "none", ""
        if by == "setup_id":
            texts = (non_default(run, self.types), run.target, run.dtype)
            return run.method_title, " · ".join(filter(None, texts))
        if by == "prompt_id":
            return " ".join(run.prompt_text.split())[:110] or "token ids", ""
        return benchmarks.get(value, value), ""

    def menus(self, chosen: Iterable[str]) -> dict[str, list[tuple[str, str]]]:
        """Titles and values that can be filtered and grouped by.

        Args:
            chosen: selected filters, listed even where the log has no such value.
        """
        values = self.log.distinct_values
        filters = {f"tag = {tag}": f"tag {tag}" for tag in values("tag")}
        names = self._benchmark_names()
        filters |= {f"experiment_id = {i}": f"benchmark {name}" for i, name in names.items()}
        groups = [("experiment", ""), ("single requests", FLAT)]
        groups += [(title, key) for key, title in GROUPS.items()]
        groups += [(key, LABEL_PREFIX + key) for key in values("label")]
        return {
            "targets": [("any", ""), *((name, name) for name in values("target"))],
            "methods": [("any", ""), *((name, name) for name in values("method_title"))],
            "filters": [(filters.get(v, v), v) for v in dict.fromkeys([*filters, *chosen])],
            "groups": groups,
        }

    def _benchmark_names(self) -> dict[str, str]:
        """Names of the newest benchmarks by id."""
        return {one.id: one.name for one in self.log.benchmarks.list(MAX_BENCHMARKS)}


def experiment_row(experiment: ExperimentRow, measured: Sequence[Measured]) -> dict[str, Any]:
    """The cells of an experiment: its kind, how much of it is done, and its speedups."""
    run = experiment.example
    begin = " ".join(run.prompt_text.split())
    num_completed, num_runs = experiment.num_completed, experiment.num_runs
    done = "" if num_completed == num_runs else f", {num_completed} completed"
    report = (
        f"?{urlencode([(experiment.kind, experiment.id)])}" if experiment.kind in REPORTS else ""
    )
    return {
        "id": experiment.id,
        "experiment": report,
        "created_at": _when(experiment.newest_at),
        "method_title": [KINDS[experiment.kind], True],
        "settings": f"{num_runs} requests{done}",
        "target": run.target,
        "prompt": [experiment.name, "" if experiment.name else begin],
        "tags": [],
        "speedup": _range(measured),
        "dtype": run.dtype,
        "device": run.device,
        "status": "completed" if not done else run.status if run.status == "running" else "partial",
    }


def _range(measured: Sequence[Measured]) -> str:
    """Smallest and largest reliable speedup of an experiment."""
    speedups = [one.ratio for _, one in measured if one.ratio is not None]
    if not speedups:
        return DASH
    low, high = min(speedups), max(speedups)
    text = formats.speedup(high)
    return text if formats.speedup(low) == text else formats.interval(low, high)


def own_speedup(run: RunSummary, metrics: Mapping[str, Any]) -> float | None:
    """The speedup in a run's own summary, over plain decoding as it was timed around the run.

    None without a reliable baseline. The requests of an experiment have none: its report compares
    them.
    """
    if run.experiment_id or run.decoding_type == PLAIN:
        return None
    return sure_speedup(metrics)


def _when(at: datetime) -> str:
    """A time of today, or of another day with its date, in the server's time zone."""
    local = at.astimezone()
    is_today = local.date() == datetime.now().date()
    return f"{local:%H:%M:%S}" if is_today else f"{local:%d %b %Y %H:%M}"


def _heads(columns: Sequence[Column], sort: str, descending: bool) -> list[dict[str, Any]]:
    order = "descending" if descending else "ascending"
    return [
        asdict(column) | {"sorted": order if column.sort == sort else None} for column in columns
    ]


def _cells(row: Mapping[str, Any], columns: Sequence[Column]) -> dict[str, Any]:
    values = [row.get(column.key) for column in columns]
    cells = [DASH if value in (None, "") else value for value in values]
    about = {"experiment": row["experiment"]} if "experiment" in row else {}
    return {"id": row["id"], "deleted": row.get("deleted", False), "cells": cells, **about}


def _ordered(groups: Sequence[RunGroup], sort: str, descending: bool) -> list[RunGroup]:
    """Groups sorted by a mean, their size or their newest run; those without the figure last."""

    def key(group: RunGroup) -> Any:
        if sort in GROUP_FIGURES:
            return getattr(group.figures.get(sort), "mean", None)
        return group.newest_at if sort == "created_at" else group.num_runs

    with_key = [group for group in groups if key(group) is not None]
    without_key = [group for group in groups if key(group) is None]
    return sorted(with_key, key=key, reverse=descending) + without_key
