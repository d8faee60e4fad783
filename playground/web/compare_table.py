"""The Compare page's table: figures against plain decoding, verdicts, explanations."""

from __future__ import annotations

from typing import Any

from engine import formats
from playground.experiments.compare.report import ComparisonResults
from playground.experiments.report.columns import Cell, summary
from playground.web.results import HTML, table_html

HTML.filters["visible"] = lambda text: text.translate({10: "⏎", 9: "⇥", 32: "·"})
"""White space that differs can be seen."""
HEADLINE = HTML.from_string("""
<h3 class="{{ 'firm' if firm else 'open' }}">{{ text }}</h3>
""")
WHY = HTML.from_string("""
{% macro side(name, before, text) %}
<dt>{{ name }}</dt><dd>…{{ before | visible }}<mark>{{ text | visible }}</mark></dd>
{% endmacro %}
{% for row in rows %}
<div class="pg-card" data-why="{{ row.name }}">
<h4>{{ row.name }}
  {%- if row.run %} · <a href="?deploy=vllm&amp;of=run:{{ row.run | urlencode }}" target="_blank"
  rel="noopener" title="{{ row.name }} as a config for a serving engine">deploy</a>{% endif %}</h4>
{% if row.fault %}<p class="pg-alert">{{ row.fault }}</p>{% endif %}
{% if row.why %}
<p>{{ row.why.because }}</p>
<p><code>{{ row.why.terms }}</code></p>
<p class="remark">{{ row.why.differs }}</p>
{% endif %}
{% for sentence in row.sentences %}<p class="remark">{{ sentence }}</p>
{% endfor %}
{% if row.parting %}
<dl class="pg-parting">{{ side("plain decoding", row.parting.before, row.parting.plain) }}
{{ side("this one", row.parting.before, row.parting.own) }}</dl>
{% endif %}
</div>
{% endfor %}
{% for name, why in skipped %}<p class="remark">Prompt {{ name }} was left out: {{ why }}</p>
{% endfor %}
""")


def results_html(results: ComparisonResults | None) -> str:
    """Everything under the panels; empty before there is a report."""
    if results is None:
        return ""
    report, best = results.report, results.report.fastest
    heads, rows = summary(report)
    names = (
        Cell(section.name, " · ".join(filter(None, (remarks.badge, remarks.settings))))
        for (section, _), remarks in zip(rows, results.remarks, strict=True)
    )
    cells = [[name, *cells] for name, (_, cells) in zip(names, rows, strict=True)]
    table = table_html("Comparison", {"configuration": "", **heads}, cells, best=best)
    headline = HEADLINE.render(text=report.headline, firm=best is not None)
    skipped = results.comparison.skipped.items()
    return headline + table + WHY.render(rows=_why(results), skipped=skipped)


def _why(results: ComparisonResults) -> list[dict[str, Any]]:
    """What is to be said of every configuration under its figures."""
    prompts = results.comparison.prompts
    last = {name: run for (_, _, name), run in results.comparison.runs.items()}
    cards = []
    for section, remarks in zip(results.report.configurations, results.remarks, strict=True):
        verdict, sentences = remarks.verdict, []
        measured = bool(section.overall.num_requests)
        if measured and verdict["label"] != "baseline" and verdict["kind"] != "none":
            sentences.append(verdict["sentence"])
        sentences += verdict["gap"]
        if len(remarks.by_prompt) > 1 and not section.reference:
            each = (
                f"{prompts.get(key, key):.32} {formats.speedup(ratio)}"
                for key, ratio in remarks.by_prompt
            )
            sentences.append(f"speedup by prompt: {' · '.join(each)}")
        if section.reference and not any((remarks.fault, section.why, sentences)):
            continue
        cards.append(
            {
                "name": section.name,
                "fault": remarks.fault,
                "why": section.why,
                "sentences": sentences,
                "parting": verdict["parting"],
                "run": last.get(section.name) if measured and not section.reference else None,
            }
        )
    return cards
