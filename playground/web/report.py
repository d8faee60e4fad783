"""The report of an experiment as HTML, for the Compare and Benchmark pages."""

from __future__ import annotations

import json

import presets
from engine.formats import figure, plural
from playground.experiments.plan import UnknownMethod
from playground.experiments.report.columns import Cell, summary
from playground.experiments.report.report import Results, Section
from playground.experiments.report.verdict import CAUSES, Divergence
from playground.experiments.statistics import LATENCY_COLUMNS
from playground.export import ExportSource, Resolve, engines_of
from playground.host.live import pieces
from playground.host.methods import stored_badge
from playground.web.results import HTML, table_html, term
from storage import RunLog

MAX_SKIPPED = 50
SHOWN_TOKENS, SHOWN_BEFORE = 16, 12
SEARCH = {
    "tried": "answers so far; after each repeat of the prompts, the slower half is dropped",
    "engines": "engines that run it on this target as it is; with losses: see Deploy",
}
"""Columns of a search."""
HTML.filters["visible"] = lambda text: text.translate({10: "⏎", 9: "⇥", 32: "·"})
"""Makes white space visible, since texts may differ in nothing else."""
HEAD = HTML.from_string("""
<div class="pg-card">
<h3>{{ name }}</h3>
{% if recommendation %}<p class="headline firm">{{ recommendation }}</p>{% endif %}
<p class="headline {{ 'firm' if firm else 'open' }}">{{ headline }}</p>
{% if reason %}<p>{{ reason }}</p>{% endif %}
<p class="remark">{{ about }} · one request at a time</p>
<p class="remark">{{ extent }} · <a href="?{{ link }}={{ id | urlencode }}">permalink</a> · <a
  href="?runs={{ runs | urlencode }}">runs</a></p>
</div>
""")
CARDS = HTML.from_string("""
{% macro side(name, before, text) %}
<dt>{{ name }}</dt><dd>…{{ before | visible }}<mark>{{ text | visible }}</mark></dd>
{% endmacro %}
{% macro to(run, text) %}
<a href="?run={{ run | urlencode }}" target="_blank" rel="noopener">{{ text }}</a>
{%- endmacro %}
{% for one, why, sentences, excerpt, differing in cards %}
<div class="pg-card" data-why="{{ one.name }}">
<h4>{{ one.name }}
  {%- if one.example_run and not one.reference %} · <a
  href="?deploy=vllm&amp;of=run:{{ one.example_run | urlencode }}" target="_blank"
  rel="noopener" title="{{ one.name }} as a config for a serving engine">deploy</a>{% endif %}</h4>
{% if one.fault %}<p class="pg-alert">{{ one.fault }}</p>{% endif %}
{% if why %}
<p>{{ why.because }}</p>
<p><code>{{ why.terms }}</code></p>
<p class="remark">{{ why.differs }}</p>
{% endif %}
{% for sentence in sentences %}<p class="remark">{{ sentence }}</p>
{% endfor %}
{% if excerpt %}
<dl class="pg-parting">{{ side("plain decoding", excerpt[0], excerpt[2]) }}
{{ side("this one", excerpt[0], excerpt[1]) }}</dl>
{% endif %}
{% if differing %}
<details><summary>{{ plural(differing | length, "answer") }} that differ from plain
decoding’s</summary><ul>
{% for it in differing %}
  <li>{{ it.suite }} {{ it.prompt }}, turn {{ it.turn + 1 }}, repeat {{ it.repeat + 1 }}, from token
  {{ it.at + 1 }} on ({{ causes[it.cause][2] }}): {{ to(it.run_id, "its run") }} ·
  {{ to(it.reference_run_id, "plain decoding’s") }}
  {%- if it.gap %}<span class="gap">{{ it.gap }}</span>{% endif %}</li>
{% endfor %}
</ul></details>
{% endif %}
</div>
{% endfor %}
{% if skipped %}
<details class="pg-card"><summary>{{ plural(skipped | length, "turn") }} left out</summary><ul>
{% for skip in skipped %}
  <li>{{ skip.suite }} {{ skip.prompt }}, turn {{ skip.turn + 1 }}: {{ skip.reason }}</li>
{% endfor %}
</ul></details>
{% endif %}
""")


def head_html(results: Results) -> str:
    """What was measured, on what, and which configuration is fastest."""
    row, plan, report = results.benchmark, results.plan, results.report
    is_whole = report.num_done == plan.num_requests
    why = report.section(report.leader).why if report.recommendation else None
    return HEAD.render(
        id=row.id,
        link="compare" if plan.kind == "compare" else "benchmark",
        runs=json.dumps({"experiment_id": row.id}),
        name=row.name,
        recommendation=report.recommendation,
        headline=report.headline,
        reason=why and why.because,
        firm=report.fastest is not None,
        about=results.about,
        extent=plan.extent if is_whole else f"{plan.extent}; {plural(report.num_done, 'answer')}",
    )


def summary_html(results: Results, resolve: Resolve = presets.resolve) -> str:
    """Every figure of every configuration; the fastest one stands out.

    Args:
        resolve: finds targets and drafters, to name the engines that run what a search has found.
    """
    report = results.report
    heads, rows = summary(report)
    cells = []
    for section, own in rows:
        badge = "baseline"
        if not section.reference:
            values = results.plan.configuration(section.name).values
            badge = stored_badge(values, results.environment, lossless=section.lossless)
        about = (badge, section.settings or section.title)
        speedup, *others = own
        search = _search_cells(results, section, resolve)
        name = Cell(section.name, hint=" · ".join(filter(None, about)))
        cells.append([name, speedup, *search.values(), *others])
    first = {"configuration": "", "speedup": heads["speedup"], **{n: SEARCH[n] for n in search}}
    return table_html("Summary", {**first, **heads}, cells, best=report.fastest)


def _search_cells(results: Results, section: Section, resolve: Resolve) -> dict[str, Cell]:
    """Further cells of a search; engines are named once that can disturb no timing."""
    if results.plan.kind != "fastest":
        return {}
    state = "failed" if section.fault else "dropped" * (section.name in results.report.dropped)
    answers = plural(section.overall.num_requests, "answer")
    cells = {"tried": Cell(answers, state, "bad" if section.fault else "", section.fault)}
    if results.benchmark.status != "running":
        cells["engines"] = _engines(results, section, resolve)
    return cells


def _engines(results: Results, section: Section, resolve: Resolve) -> Cell:
    """The engines that run a configuration; empty for plain decoding and unknown methods."""
    config = results.plan.configuration(section.name).settings
    if section.reference or isinstance(config, UnknownMethod):
        return Cell("")
    source = ExportSource(config, results.plan.target.name, section.name)
    exact, losses = engines_of(source, resolve)
    neither = "its parts alone" if config.nested() else "none"
    return Cell(exact or neither * (not losses), losses and f"with losses: {losses}")


def cards_html(results: Results, log: RunLog) -> str:
    """Why every configuration is faster or slower, and where its answers differ."""
    cards = []
    for section in results.report.configurations:
        verdict = section.verdict
        differing = verdict.divergences if verdict else ()
        sentences = _sentences(section)
        if section.fault or section.why or sentences or differing:
            excerpt = _divergence_excerpt(log, differing[0]) if differing else None
            cards.append((section, section.why, sentences, excerpt, differing))
    return CARDS.render(
        cards=cards,
        plural=plural,
        causes=CAUSES,
        skipped=results.benchmark.summary.get("skipped", [])[:MAX_SKIPPED],
    )


def report_html(results: Results | None, log: RunLog) -> str:
    """The whole report, as the Compare page shows it; empty if there is none yet."""
    if results is None:
        return ""
    return head_html(results) + summary_html(results) + cards_html(results, log)


def _sentences(section: Section) -> list[str]:
    sentences = [section.verdict_sentence] if section.overall.num_requests else []
    if section.verdict and section.verdict.divergences:
        sentences.append(section.verdict.divergences[0].gap)
    return list(filter(None, sentences))


def _divergence_excerpt(log: RunLog, first: Divergence) -> tuple[str, str, str]:
    """Where two texts diverge: the last text in common, then each one's next tokens."""
    own, plain = pieces(log, first.run_id), pieces(log, first.reference_run_id)
    after = slice(first.at, first.at + SHOWN_TOKENS)
    common = plain[max(0, first.at - SHOWN_BEFORE) : first.at]
    return "".join(common), "".join(own[after]), "".join(plain[after])


def latency_html(section: Section) -> str:
    """genai-perf's table of one configuration."""
    table = section.latency
    if table is None:
        return ""
    rows = [
        [Cell(term(title, formula)), *map(Cell, map(figure, values))]
        for title, formula, values in table.lines()
    ]
    extent = f"{plural(table.num_requests, 'request')}, concurrency 1"
    heads = dict.fromkeys((extent, *LATENCY_COLUMNS), "")
    return table_html(f"Latency of {section.name}", heads, rows)
