"""The tables of a benchmark's report."""

from __future__ import annotations

from engine.formats import figure, plural
from playground.experiments.report.columns import Cell
from playground.experiments.report.report import FORMULAS, Section
from playground.experiments.report.statistics import LATENCY_ROWS
from playground.experiments.report.verdict import NEAR_TIES
from playground.experiments.service import ExperimentState
from playground.web.results import HTML, table_html, term

MAX_SKIPPED = 50
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


def head(state: ExperimentState) -> str:
    """What was measured, on what, and which configuration is fastest."""
    row, results = state.row, state.results
    plan, environment = results.plan, results.environment
    about = [
        plan.target.title or plan.target.name,
        environment.get("dtype", plan.dtype),
        environment.get("device_name", ""),
        plan.sampling.words,
        f"{plan.limits.max_new_tokens} new tokens at most",
        "concurrency 1",
    ]
    requests = plan.extent
    if results.report.num_done != plan.num_requests:
        requests += f", {results.report.num_done} done"
    return HEAD.render(
        id=row.id,
        name=row.name,
        headline=results.report.headline,
        firm=results.report.fastest is not None,
        about=" · ".join(filter(None, about)),
        extent=requests,
    )


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


def differing(state: ExperimentState) -> str:
    """Answers that are not plain decoding's, and turns that were left out."""
    answers = [
        (section.name, one, NEAR_TIES[one.near_tie])
        for section in state.results.report.configurations
        if section.verdict
        for one in section.verdict.divergences
    ]
    skipped = state.row.summary.get("skipped", [])[:MAX_SKIPPED]
    return DIFFERING.render(
        answers=answers,
        num_answers=plural(len(answers), "answer"),
        skipped=skipped,
        left_out=plural(len(skipped), "turn"),
    )
