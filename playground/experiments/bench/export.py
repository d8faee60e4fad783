"""A report as JSON and as CSV tables."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from playground.experiments.bench.latency import DEFINITIONS, ROWS
from playground.experiments.bench.measured import Measured
from playground.experiments.bench.report import FORMULAS, Cell, Section
from playground.experiments.bench.session import Results
from playground.experiments.bench.stats import Statistic

OVERALL = "overall"
_STATISTICS = tuple(field.name for field in fields(Statistic))
_NOT_IN_CSV = ("at_least", "split_s", "output_ids", "text")


def as_dict(results: Results) -> dict[str, Any]:
    """The whole report as plain JSON, with what was run and how each figure is defined."""
    benchmark = results.benchmark
    plan = {key: value for key, value in benchmark.plan.items() if key != "items"}
    return {
        "benchmark": benchmark.id,
        "name": benchmark.name,
        "status": benchmark.status,
        "created_at": benchmark.created_at.isoformat(),
        "concurrency": 1,
        **plan,
        "environment": results.environment,
        "num_prompts": len(benchmark.plan["items"]),
        "skipped": benchmark.summary.get("skipped", []),
        "definitions": {**FORMULAS, **DEFINITIONS},
        "report": results.report.to_dict(),
        "requests": [_request(request) for request in results.requests],
    }


def json_text(results: Results) -> str:
    return json.dumps(as_dict(results), ensure_ascii=False, indent=1)


def _request(request: Measured) -> dict[str, Any]:
    facts = {k: v for k, v in asdict(request).items() if k not in ("output_ids", "text")}
    shown = {k: getattr(request, k) for k in ("latency_s", "tok_s", "mat", "step_s")}
    return {**facts, **shown}


def speedup_csv(results: Results) -> str:
    """One line per configuration and group, and one per configuration overall."""
    head = (
        "configuration,decoding_type,lossless,group,requests,new_tokens,steps,mat,tok_s,step_ms,"
        "speedup,mean_of_ratios,speedup_low,speedup_high,spread_over,speedup_std,pairs"
    )
    rows = []
    for section in results.report.configurations:
        for group, cell in [*section.groups.items(), (OVERALL, section.overall)]:
            rows.append(_speedup_row(section, group, cell))
    return _csv(head.split(","), rows)


def _speedup_row(section: Section, group: str, cell: Cell) -> list[Any]:
    fast = cell.speedup
    known = ("ratio", "mean_of_ratios", "low", "high", "spread_over", "std", "num_pairs")
    return [
        *(section.name, section.decoding_type, section.lossless, group),
        *(cell.num_requests, cell.num_new_tokens, cell.num_steps),
        *(cell.mat, cell.tok_s, cell.step_ms),
        *(None if fast is None else getattr(fast, name) for name in known),
    ]


def latency_csv(results: Results) -> str:
    """genai-perf's table of every configuration, one under the other."""
    rows: list[list[Any]] = []
    for section in results.report.configurations:
        table = section.latency
        if table is None:
            continue
        for key, title in ROWS.items():
            statistic = table.rows[key]
            values = [None] * len(_STATISTICS) if statistic is None else asdict(statistic).values()
            rows.append([section.name, title, *values])
        for key in ("output_token_throughput", "request_throughput"):
            title = key.replace("_", " ").capitalize() + " (per sec)"
            rows.append([section.name, title, getattr(table, key)])
    return _csv(["configuration", "metric", *_STATISTICS], rows)


def requests_csv(results: Results) -> str:
    """One line per finished request."""
    names = [f.name for f in fields(Measured) if f.name not in _NOT_IN_CSV]
    split = ("draft_s", "verify_s", "accept_s", "other_s")
    rows = [
        [*(getattr(r, n) for n in names), r.latency_s, r.tok_s, r.mat, *r.split_s]
        for r in results.requests
    ]
    return _csv([*names, "latency_s", "tok_s", "mat", *split], rows)


def _csv(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(head)
    writer.writerows([_field(value) for value in row] for row in rows)
    return out.getvalue()


def _field(value: Any) -> Any:
    """A text that a spreadsheet would take for a formula is quoted with an apostrophe."""
    if isinstance(value, str) and value[:1] in ("=", "+", "-", "@"):
        return "'" + value
    return "" if value is None else value


FILES = {
    "report.json": json_text,
    "speedup.csv": speedup_csv,
    "latency.csv": latency_csv,
    "requests.csv": requests_csv,
}
"""What `write_files` writes."""


def write_files(results: Results, folder: Path) -> list[Path]:
    """Write every file of a report into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, text_of in FILES.items():
        path = folder / name
        path.write_text(text_of(results), encoding="utf-8")
        written.append(path)
    return written
