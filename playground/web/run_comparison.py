"""The comparison of selected runs: a table of differing settings and of figures."""

from __future__ import annotations

from typing import Any

from engine.formats import plural
from playground.runs.columns import FIGURES, formula
from playground.runs.compare import FIGURES as COMPARED
from playground.runs.compare import ComparedRuns
from playground.web.results import HTML

TABLE = HTML.from_string("""
<h3>{{ title }}</h3>
<div class="frame"><table>
<thead><tr><td></td>
{% for each in configurations %}
  <th class="setup">
  {{ each.title }}{% if each.lossless is false %}<span class="pg-lossy">lossy</span>{% endif %}
  <span class="remark">{{ each.settings }}</span>
  <span class="remark">{{ plural(each.run_ids | length, "run") }}{% if each.num_prompts > 1 %} on
  {{ each.num_prompts }} prompts{% endif %}</span>
  </th>
{% endfor %}
</tr></thead>
<tbody>
{% for part, rows in parts if rows %}
  <tr class="part"><th colspan="{{ configurations | length + 1 }}">{{ part }}</th></tr>
  {% for name, title, help, cells in rows %}
    <tr data-name="{{ name }}">
    {% if title %}<th>{{ title | term(help) }}</th>{% else %}<td></td>{% endif %}
    {% for text, best in cells %}
      <td title="{{ text }}"{% if best %} class="best"{% endif %}>{{ text }}</td>
    {% endfor %}
    </tr>
  {% endfor %}
{% endfor %}
</tbody></table></div>
""")


def comparison_html(compared: ComparedRuns) -> str:
    """A column per configuration, a row per differing setting and per figure."""
    configurations = compared.configurations
    runs = sum(len(each.run_ids) for each in configurations)
    figures = [
        (name, FIGURES[name].title, formula(name), _figure_cells(compared, name))
        for name in COMPARED
        if any(each.spread(name) for each in configurations)
    ]
    same, machines = "all settings are the same", "machine and versions that differ"

    def texts(table: Any) -> list[Any]:
        return [(name, name, "", [(t, False) for t in row]) for name, row in table.items()]

    return TABLE.render(
        title=f"{plural(runs, 'run')} in {plural(len(configurations), 'configuration')}",
        plural=plural,
        configurations=configurations,
        parts=[
            ("settings that differ", texts(compared.differences)),
            (same, [] if compared.differences else [("", "", "", [])]),
            (machines, texts(compared.machine)),
            ("figures: mean ± standard deviation over the runs; rates weighted by time", figures),
        ],
    )


def _figure_cells(compared: ComparedRuns, name: str) -> list[tuple[str, bool]]:
    """A text per configuration, and whether it is the best."""
    spreads = [each.spread(name) for each in compared.configurations]
    means = [spread.mean for spread in spreads if spread is not None]
    figure = FIGURES[name]
    best = figure.best(means) if figure.best and len(means) > 1 else None
    return [
        (figure.spread_text(spread), spread is not None and spread.mean == best)
        for spread in spreads
    ]
