"""The tables of a benchmark's report."""

from __future__ import annotations

from engine import formats
from engine.config import Sampling
from engine.formats import DASH, duration, figure, plural
from playground.experiments.benchmarks import MAX_SKIPPED, BenchmarkState, num_planned
from playground.experiments.plan import extent
from playground.experiments.report import report as figures
from playground.experiments.report.report import FORMULAS, Report, Section
from playground.experiments.report.statistics import LATENCY_ROWS
from playground.experiments.report.verdict import NEAR_TIES
from playground.experiments.suites import GROUPS
from playground.web.results import HTML, Cell, speedup_cell, table_html, term

CAUSES = {
    "near ties": ("near-ties", "warn"),
    "fault": ("a fault", "bad"),
    "unknown": ("unexplained", "warn"),
}
"""Why answers differ from plain decoding's, and how bad that is."""
STATISTICS = ("avg", "min", "max", "p99", "p90", "p75")
HEAD = HTML.from_string("""
<div class="pg-card">
<h3>{{ name }}</h3>
<p class="headline {{ 'firm' if firm else 'open' }}">{{ headline }}</p>
<p class="remark">{{ about }}</p>
<p class="remark">{{ extent }} · <a href="?benchmark={{ id | urlencode }}">permalink</a></p>
</div>
""")
DIFFERING = HTML.from_string("""
{% if answers %}
<details class="pg-card"><summary>{{ num_answers }} that differ from plain decoding’s</summary>
<ul>
{% for name, one, why in answers %}
  <li>{{ name }}: {{ one.suite }} {{ one.prompt }}, turn {{ one.turn + 1 }}, repeat
  {{ one.repeat + 1 }} differs from token {{ one.at + 1 }} on ({{ why }}):
  <a href="?run={{ one.run_id | urlencode }}" target="_blank" rel="noopener">its run</a> ·
  <a href="?run={{ one.reference_run_id | urlencode }}" target="_blank" rel="noopener">plain
  decoding’s</a>{% for line in one.gap %}<span class="gap">{{ line }}</span>{% endfor %}</li>
{% endfor %}
</ul></details>
{% endif %}
{% if skipped %}
<details class="pg-card"><summary>{{ left_out }} left out</summary><ul>
{% for skip in skipped %}
  <li>{{ skip.suite }} {{ skip.prompt }}, turn {{ skip.turn + 1 }}: {{ skip.reason }}</li>
{% endfor %}
</ul></details>
{% endif %}
""")
THROUGHPUT = HTML.from_string("""
<p class="remark">
{{ "output token throughput" | term(formulas.output_token_throughput) }} {{ output }} per second ·
{{ "request throughput" | term(formulas.request_throughput) }} {{ requests }} per second
· {{ extent }}
</p>
""")


def head(found: BenchmarkState) -> str:
    """What was measured, on what, and which configuration is fastest."""
    benchmark, results = found.benchmark, found.results
    plan, environment = benchmark.plan, results.environment
    about = [
        plan["target"].get("title") or plan["target"]["name"],
        environment.get("dtype", plan["dtype"]),
        environment.get("device_name", ""),
        Sampling.parse(plan["sampling"]).words,
        f"{plan['limits']['max_new_tokens']} new tokens at most",
        "concurrency 1",
    ]
    planned, items = num_planned(plan), plan["items"]
    turns = sum(len(item["turns"]) for item in items)
    asked = extent(len(items), turns, len(plan["configurations"]), plan["repeats"])
    if results.report.num_done != planned:
        asked += f", {results.report.num_done} done"
    return HEAD.render(
        id=benchmark.id,
        name=benchmark.name,
        headline=results.report.headline,
        firm=results.report.fastest is not None,
        about=" · ".join(filter(None, about)),
        extent=asked,
    )


def summary(report: Report) -> str:
    """A line per configuration."""
    heads = {
        "configuration": "",
        "speedup": f"{FORMULAS['speedup']}; below it: {FORMULAS['interval']}",
        "MAT": f"{FORMULAS['mat']}; below it: new tokens / steps",
        "accepted": FORMULAS["draft_acceptance"],
        "tok/s": FORMULAS["tok_s"],
        "time per step": FORMULAS["time_split"],
        "TTFT": FORMULAS["ttft_ms"],
        "ITL": FORMULAS["itl_ms"],
        "answers": FORMULAS["verdict"],
    }
    rows = [
        [
            _name(section),
            speedup_cell(section.overall.speedup, reference=section.reference),
            _mat(section.overall),
            formats.percent(section.draft_acceptance),
            formats.tok_s(section.overall.tok_s),
            _split(section),
            duration(section.ttft_ms),
            duration(section.itl_ms),
            _verdict(section),
        ]
        for section in report.configurations
    ]
    return table_html("Summary", heads, rows)


def by_group(report: Report, kind: str) -> str:
    """Spec-Bench's table: a column per kind of task."""
    fast = kind == "speedup"
    below = FORMULAS["interval"] if fast else "new tokens / steps"
    formula = f"{FORMULAS['speedup' if fast else 'mat']}; below it: {below}"

    def cell(section: Section, of: figures.Cell | None) -> Cell | str:
        if of is None:
            return DASH
        return speedup_cell(of.speedup, reference=section.reference) if fast else _mat(of)

    titles = {group: f"{GROUPS.get(group, group)}: {formula}" for group in report.groups}
    rows = [
        [_name(s), *(cell(s, s.groups.get(g)) for g in report.groups), cell(s, s.overall)]
        for s in report.configurations
    ]
    heads = {"configuration": "", **titles, "overall": formula}
    return table_html(f"By kind of task: {kind}", heads, rows)


def latency(section: Section) -> str:
    """genai-perf's table of one configuration."""
    table = section.latency
    if table is None:
        return ""
    rows: list[list[Cell | str]] = [
        [
            Cell(term(title, formula)),
            *(figure(getattr(table.rows[key], name, None), 2) for name in STATISTICS),
        ]
        for key, (title, formula) in LATENCY_ROWS.items()
    ]
    heads = dict.fromkeys(("", *STATISTICS), "")
    drawn = table_html(f"Latency of {section.name}", heads, rows)
    return drawn + THROUGHPUT.render(
        formulas=FORMULAS,
        output=figure(table.output_token_throughput, 2),
        requests=figure(table.request_throughput, 2),
        extent=f"{plural(table.num_requests, 'request')}, concurrency {table.concurrency}",
    )


def differing(found: BenchmarkState) -> str:
    """Answers that are not plain decoding's, and turns that were left out."""
    answers = [
        (section.name, one, NEAR_TIES[one.near_tie])
        for section in found.results.report.configurations
        if section.verdict
        for one in section.verdict.divergences
    ]
    skipped = found.benchmark.summary.get("skipped", [])[:MAX_SKIPPED]
    return DIFFERING.render(
        answers=answers,
        num_answers=plural(len(answers), "answer"),
        skipped=skipped,
        left_out=plural(len(skipped), "turn"),
    )


def _name(section: Section) -> Cell:
    return Cell(section.name, hint=section.title)


def _mat(cell: figures.Cell) -> Cell:
    return (
        Cell(formats.mat(cell.mat), f"{cell.num_new_tokens} / {cell.num_steps}")
        if cell.num_steps
        else Cell(DASH)
    )


def _split(section: Section) -> Cell | str:
    split = section.time_split
    step = duration(section.overall.step_ms)
    return Cell(step, formats.time_split(split.ms)) if split else DASH


def _verdict(section: Section) -> Cell | str:
    verdict = section.verdict
    if not verdict:
        return "reference" if section.reference else DASH
    if verdict.cause is None:
        return Cell("identical", mood="good")
    text = f"{verdict.num_identical} of {verdict.num_compared}"
    if not section.lossless:
        return Cell(text, "lossy by design", "warn")
    return Cell(text, *CAUSES[verdict.cause])
