"""A report as an HTML page, as JSON and as CSV tables."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields
from typing import Any

from engine import safe_text
from engine.figures import POOLED_FORMULAS
from engine.safe_text import csv_line, file_name
from playground.experiments.report.page import page_html
from playground.experiments.report.report import Results
from playground.experiments.statistics import (
    LATENCY_ROWS,
    PARTS,
    THROUGHPUTS,
    FinishedRequest,
    LatencyTable,
    Statistic,
)

GENAI_PERF = "profile_export_genai_perf"
DEFINITIONS = POOLED_FORMULAS | {
    key: definition for key, (_, definition) in (LATENCY_ROWS | THROUGHPUTS).items()
}
"""The formula of every figure of a report."""
GENAI_UNITS = {"ms": "ms", "length": "tokens"}
"""By the end of a row's name."""


def json_text(results: Results, **more: Any) -> str:
    """The whole report, with its plan, the definition of each figure, and further fields."""
    benchmark = results.benchmark
    plan = {key: value for key, value in results.plan.to_dict().items() if key != "items"}
    names = [f.name for f in fields(FinishedRequest) if f.name not in ("output_ids", "text")]
    names += ["latency_s", "tok_s", "mat", "step_s"]
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
        "definitions": DEFINITIONS,
        "report": asdict(results.report),
        "requests": [
            {name: getattr(request, name) for name in names} for request in results.requests
        ],
        **more,
    }
    return safe_text.json_text(whole, indent=1)


def speedup_csv(results: Results) -> str:
    """One line per configuration and group, and one per configuration overall."""
    measured = ("num_requests", "num_new_tokens", "num_steps", "mat", "tok_s", "step_ms")
    compared = ("ratio", "low", "high", "num_prompts", "num_repeats", "num_pairs", "doubt")
    head = (
        "configuration,decoding_type,lossless,group,requests,new_tokens,steps,mat,tok_s,step_ms,"
        "speedup,speedup_low,speedup_high,prompts,repeats,pairs,doubt"
    )
    return _csv(
        head.split(","),
        [
            [
                *(section.name, section.decoding_type, section.lossless, group),
                *(getattr(figures, name) for name in measured),
                *(getattr(figures.speedup, name, None) for name in compared),
            ]
            for section in results.report.configurations
            for group, figures in {**section.groups, "overall": section.overall}.items()
        ],
    )


def latency_csv(results: Results) -> str:
    """genai-perf's tables of all configurations, one below the other."""
    columns = [field.name for field in fields(Statistic)]
    rows = (
        [section.name, title, *values]
        for section in results.report.configurations
        if section.latency is not None
        for title, _, values in section.latency.lines(columns)
    )
    return _csv(["configuration", "metric", *columns], rows)


def genai_perf_files(results: Results) -> dict[str, str]:
    """The files that genai-perf writes, JSON and CSV, in a folder per configuration."""
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
    """The values of its JSON file, and its two CSV tables one below the other.

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
    left_out = ("experiment_id", "kind", "trial", "at_least", "split_s", "output_ids", "text")
    names = [f.name for f in fields(FinishedRequest) if f.name not in left_out]
    names += ["latency_s", "tok_s", "mat"]
    rows = [[*(getattr(r, n) for n in names), *r.split_s] for r in results.requests]
    return _csv([*names, *PARTS], rows)


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
