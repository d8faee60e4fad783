"""A comparison of the log as one HTML file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine.model.audit import Audit
from playground.experiments.compare.report import Comparison, stored_runs
from playground.experiments.finished import in_pairs
from playground.experiments.report.audits import audits_of_pairs
from playground.experiments.report.page import report_page
from playground.experiments.report.report import make_report
from storage import RunDetail, RunLog


def comparison_page(log: RunLog, compare_id: str) -> str:
    """Raises ConfigError: no such comparison is in the log."""
    details = stored_runs(log, compare_id)
    comparison = Comparison.stored(log, compare_id)
    finished = comparison.finished
    plain = [r for r in finished if r.configuration == comparison.names[0]]
    audits: dict[tuple[str, str], Audit] = {}
    for name in comparison.names[1:]:
        own = [r for r in finished if r.configuration == name]
        audits |= audits_of_pairs(log, in_pairs(own, plain))
    report = make_report(comparison.plan, finished, audits, planned=comparison.planned)
    begin = next(iter(comparison.prompts.values()))
    more = len(comparison.prompts) - 1
    title = f"Comparison: {begin}" + (f" and {more} more prompts" if more else "")
    plan = {**comparison.plan, **_workload(details)}
    return report_page(title, plan, report, finished, details[0].environment)


def _workload(details: Sequence[RunDetail]) -> Mapping[str, Any]:
    """What was asked, as a plan holds it."""
    first = details[0]
    turns: dict[str, dict[int, RunDetail]] = {}
    for run in details:
        turns.setdefault(run.labels["prompt"], {}).setdefault(int(run.labels.get("turn", 0)), run)
    items = []
    for prompt, by_turn in turns.items():
        run = by_turn[min(by_turn)]
        items.append(
            {
                "id": prompt,
                "category": run.labels["category"],
                "turns": [by_turn[turn].prompt_text for turn in sorted(by_turn)],
                "raw": not run.messages,
                "history": [dict(message) for message in run.messages[:-1]],
            }
        )
    return {
        "target": {"name": first.target},
        "dtype": first.dtype,
        "limits": dict(first.limits),
        "repeats": 1 + max(int(run.labels["repeat"]) for run in details),
        "items": items,
    }
