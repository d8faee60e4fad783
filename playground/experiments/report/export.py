"""A report as an HTML page, as JSON and as CSV tables."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields
from typing import Any

from engine import safe_text
from engine.safe_text import csv_line, file_name
from playground.experiments.finished import SPLIT, FinishedRequest
from playground.experiments.report.page import page_html
from playground.experiments.report.report import FORMULAS, Figures, Results, Section
from playground.experiments.report.statistics import LATENCY_ROWS, LatencyTable, Statistic

OVERALL = "overall"
GENAI_PERF = "profile_export_genai_perf"
GENAI_UNITS = {"ms": "ms", "length": "tokens"}
"""By the end of a row's name."""
_STATISTICS = tuple(field.name for field in fields(Statistic))


def json_text(results: Results) -> str:
    """The whole report, with what was run and how each figure is defined."""
    benchmark = results.benchmark
    plan = {key: value for key, value in results.plan.to_dict().items() if key != "items"}
    whole = {
        "benchmark": benchmark.id,
        "name": benchmark.name,
        "status": benchmark.status,
        "created_at": benchmark.created_at.isoformat(),
        "concurrency": 1,
        **plan,
        "environment": results.environment,
        "num_prompts": len(results.plan.items),
        "skipped": benchmark.summary.get("skipped", []),
        "definitions": FORMULAS,
        "report": results.report.to_dict(),
        "requests": [_request(request) for request in results.requests],
    }
    return safe_text.json_text(whole, indent=1)


def _request(request: FinishedRequest) -> dict[str, Any]:
    facts = {k: v for k, v in asdict(request).items() if k not in ("output_ids", "text")}
    return facts | {k: getattr(request, k) for k in ("latency_s", "tok_s", "mat", "step_s")}


def speedup_csv(results: Results) -> str:
    """One line per configuration and group, and one per configuration overall."""
    head = (
        "configuration,decoding_type,lossless,group,requests,new_tokens,steps,mat,tok_s,step_ms,"
        "speedup,speedup_low,speedup_high,prompts,repeats,pairs,doubt"
    )
    return _csv(
        head.split(","),
        [
            _speedup_row(section, group, cell)
            for section in results.report.configurations
            for group, cell in [*section.groups.items(), (OVERALL, section.overall)]
        ],
    )


def _speedup_row(section: Section, group: str, cell: Figures) -> list[Any]:
    known = ("ratio", "low", "high", "num_prompts", "num_repeats", "num_pairs", "doubt")
    return [
        *(section.name, section.decoding_type, section.lossless, group),
        *(cell.num_requests, cell.num_new_tokens, cell.num_steps),
        *(cell.mat, cell.tok_s, cell.step_ms),
        *(getattr(cell.speedup, name, None) for name in known),
    ]


def latency_csv(results: Results) -> str:
    """genai-perf's table of every configuration, one under the other."""
    rows: list[list[Any]] = []
    for section in results.report.configurations:
        table = section.latency
        if table is None:
            continue
        for key, (title, _) in LATENCY_ROWS.items():
            values = [getattr(table.rows[key], name, None) for name in _STATISTICS]
            rows.append([section.name, title, *values])
        for key in ("output_token_throughput", "request_throughput"):
            title = key.replace("_", " ").capitalize() + " (per sec)"
            rows.append([section.name, title, getattr(table, key)])
    return _csv(["configuration", "metric", *_STATISTICS], rows)


def genai_perf_files(results: Results) -> dict[str, str]:
    """What genai-perf leaves of a run, JSON and CSV, in a folder per configuration."""
    files: dict[str, str] = {}
    config = {"model": results.environment.get("target"), "concurrency": 1}
    for section in results.report.configurations:
        if section.latency is None:
            continue
        folder = f"genai-perf/{file_name(section.name)}"
        values, table = _genai_perf(section.latency)
        whole = {**values, "input_config": {**config, "method": section.name}}
        files[f"{folder}/{GENAI_PERF}.json"] = json.dumps(whole, indent=2)
        files[f"{folder}/{GENAI_PERF}.csv"] = table
    return files


def _genai_perf(latency: LatencyTable) -> tuple[dict[str, Any], str]:
    """The values as its JSON has them, and its two tables one under the other.

    Source: genai-perf, export_data/json_exporter.py and csv_exporter.py.
    """
    totals = {
        "output_token_throughput": ("tokens/sec", latency.output_token_throughput),
        "request_throughput": ("requests/sec", latency.request_throughput),
        "request_count": ("count", latency.num_requests),
    }
    values: dict[str, Any] = {
        name: {"unit": unit, "avg": value} for name, (unit, value) in totals.items()
    }
    rows: list[list[Any]] = []
    names = ("avg", "min", "max", "p99", "p95", "p90", "p75", "p50", "p25")
    for key, row in latency.rows.items():
        if row is None:
            continue
        name, unit = key.removesuffix("_ms"), GENAI_UNITS[key.rsplit("_", 1)[1]]
        values[name] = {"unit": unit, **asdict(row)}
        title = f"{name.replace('_', ' ').title()} ({unit})"
        rows.append([title, *(round(getattr(row, one), 2) for one in names)])
    below = [
        [f"{name.replace('_', ' ').title()} ({unit})", round(value, 2)]
        for name, (unit, value) in totals.items()
    ]
    return values, _csv(["Metric", *names], rows) + "\n" + _csv(["Metric", "Value"], below)


def requests_csv(results: Results) -> str:
    """One line per finished request."""
    left_out = ("at_least", "split_s", "output_ids", "text")
    names = [f.name for f in fields(FinishedRequest) if f.name not in left_out]
    names += ["latency_s", "tok_s", "mat"]
    rows = [[*(getattr(r, n) for n in names), *r.split_s] for r in results.requests]
    return _csv([*names, *SPLIT], rows)


def _csv(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    return "".join(map(csv_line, (head, *rows)))


FILES = {
    "report.html": page_html,
    "report.json": json_text,
    "speedup.csv": speedup_csv,
    "latency.csv": latency_csv,
    "requests.csv": requests_csv,
}
"""The files of a report, by name."""
