"""A benchmark as the page draws it: plain JSON."""

from __future__ import annotations

from typing import Any

from playground.experiments.bench.groups import group_title
from playground.experiments.bench.session import Results
from storage import Benchmark

MAX_SKIPPED = 50


def head_of(benchmark: Benchmark, *, here: bool) -> dict[str, Any]:
    """A line of the list of benchmarks."""
    plan = benchmark.plan
    turns = sum(len(item["turns"]) for item in plan["items"])
    return {
        "id": benchmark.id,
        "name": benchmark.name,
        "status": benchmark.status,
        "here": here,
        "created_at": benchmark.created_at.isoformat(),
        "target": plan["target"].get("title") or plan["target"]["name"],
        "target_name": plan["target"]["name"],
        "configurations": [c["name"] for c in plan["configurations"]],
        "num_prompts": len(plan["items"]),
        "num_repeats": plan["repeats"],
        "num_requests": turns * plan["repeats"] * len(plan["configurations"]),
        "error": benchmark.summary.get("error"),
    }


def view_of(results: Results) -> dict[str, Any]:
    """The report, and what it was made on."""
    plan, benchmark = results.benchmark.plan, results.benchmark
    sampling = plan["sampling"]
    greedy = sampling["temperature"] < 1e-5
    return {
        "report": results.report.to_dict(),
        "group_titles": {group: group_title(group) for group in results.report.groups},
        "conditions": {
            "dtype": results.environment.get("dtype", plan["dtype"]),
            "device": results.environment.get("device_name", ""),
            "sampling": "greedy" if greedy else f"temperature {sampling['temperature']:g}",
            "max_new_tokens": plan["limits"]["max_new_tokens"],
            "concurrency": 1,
        },
        "skipped": benchmark.summary.get("skipped", [])[:MAX_SKIPPED],
        "num_failed": benchmark.summary.get("num_failed", 0),
    }
