"""The Compare page's table: figures against plain decoding, verdicts, explanations."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from engine import formats
from engine.formats import DASH, duration, percent, plural
from engine.metrics import TimeSplit
from playground.experiments.report.report import FORMULAS
from playground.experiments.report.statistics import Speedup
from playground.web.results import HTML, Cell, speedup_cell, table_html

Row = Mapping[str, Any]
COLUMNS = {
    "speedup": "speedup",
    "tok_s": "tok/s",
    "mat": "MAT",
    "position_rates": "position rates",
    "time_split": "time per step",
    "ttft_ms": "TTFT",
    "itl_ms": "ITL",
    "verdict": "lossless?",
}
BARS = "▁▂▃▄▅▆▇█"
MOST_BARS, MOST_RATES = 10, 3
MOODS = {"identical": "good", "lossy": "warn", "diverged": "bad"}
HTML.filters["visible"] = lambda text: text.translate({10: "⏎", 9: "⇥", 32: "·"})
"""White space that differs can be seen."""
HEADLINE = HTML.from_string("""
<h3 class="{{ 'firm' if firm else 'open' }}">{{ said }}</h3>
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


def results_html(text: str) -> str:
    """Everything under the panels.

    Args:
        text: the report as JSON; empty before there is one.
    """
    if not text:
        return ""
    report = json.loads(text)
    rows = report["configurations"]
    heads = {"configuration": ""}
    heads |= {title: FORMULAS[name] for name, title in COLUMNS.items()}
    best = report["fastest"]
    table = table_html("Comparison", heads, [_cells(row) for row in rows], best=best)
    said = HEADLINE.render(said=report["headline"], firm=best is not None)
    return said + table + WHY.render(rows=_why(report), skipped=report["skipped"])


def _cells(row: Row) -> list[Cell | str]:
    overall, verdict = row["overall"], row["verdict"]
    about = " · ".join(filter(None, (row["badge"], row["settings"])))
    mood = "warn" if verdict["near_tie"] else MOODS.get(verdict["kind"], "")
    if verdict["kind"] == "baseline" and verdict["label"] != "baseline":
        mood = "warn"
    return [
        Cell(row["name"], about),
        _speedup(row),
        formats.tok_s(overall["tok_s"]),
        formats.mat(overall["mat"]),
        _rates(row["position_rates"]),
        _split(row["time_split"]),
        duration(row["ttft_ms"]),
        duration(row["itl_ms"]),
        Cell(DASH if verdict["label"] == "baseline" else verdict["label"], mood=mood),
    ]


def _speedup(row: Row) -> Cell | str:
    found = row["overall"]["speedup"]
    return speedup_cell(Speedup(**found) if found else None, reference=row["reference"])


def _rates(rates: list[float]) -> Cell | str:
    """A bar per draft token, and the first rates as numbers."""
    if not rates:
        return DASH
    bars = "".join(BARS[round(rate * (len(BARS) - 1))] for rate in rates[:MOST_BARS])
    hint = "\n".join(
        f"at least {plural(i + 1, 'draft token')} accepted in {percent(rate)} of steps"
        for i, rate in enumerate(rates[:MOST_BARS])
    )
    return Cell(bars, ", ".join(map(percent, rates[:MOST_RATES])), hint=hint)


def _split(split: Mapping[str, float] | None) -> Cell | str:
    if not split:
        return DASH
    mean = TimeSplit(**split)
    return Cell(duration(1000 * mean.total_s), formats.time_split(mean.ms))


def _why(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What is to be said of every configuration under its figures."""
    prompts = dict(report["prompts"])
    last = {name: run for _, _, name, run in report["runs"]}
    said = []
    for row in report["configurations"]:
        verdict, sentences = row["verdict"], []
        measured = bool(row["overall"]["num_requests"])
        if measured and verdict["label"] != "baseline" and verdict["kind"] != "none":
            sentences.append(verdict["sentence"])
        sentences += verdict["gap"]
        if len(row["by_prompt"]) > 1 and not row["reference"]:
            each = (
                f"{prompts.get(key, key):.32} {formats.speedup(ratio)}"
                for key, ratio in row["by_prompt"]
            )
            sentences.append(f"speedup by prompt: {' · '.join(each)}")
        found = {key: row[key] for key in ("name", "fault", "why")}
        found |= {"sentences": sentences, "parting": verdict["parting"]}
        if row["reference"] and not any((row["fault"], row["why"], sentences)):
            continue
        said.append(
            {**found, "run": last.get(row["name"]) if measured and not row["reference"] else None}
        )
    return said
