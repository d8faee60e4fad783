"""The comparison of selected runs: a table of the settings that differ and of their figures."""

from __future__ import annotations

from typing import Any

import gradio as gr

from engine.formats import plural
from playground.errors import Fault, attempt
from playground.runs.columns import FIGURES, formula
from playground.runs.compare import FIGURES as COMPARED
from playground.runs.compare import ComparedRuns, compare_runs
from playground.runs.query import TableQuery
from playground.runs.table import RunTable
from playground.web.results import HTML
from playground.web.run_details import message_html

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


class ComparisonView:
    """Components of the comparison.

    Attributes:
        outputs: what `show` fills, in its order.
    """

    def __init__(self, runs: RunTable) -> None:
        self.runs = runs
        with gr.Column(visible=False, elem_id="pg-runs-compare") as self.column:
            self.table = gr.HTML(elem_id="pg-runs-table", apply_default_css=False)
            self.close = gr.Button("Close", size="sm", elem_id="pg-runs-close")
        self.outputs = [self.column, self.table]

    def show(self, query: TableQuery) -> list[Any]:
        """The runs that the query compares, or the sentence why they are not."""
        if not query.compare:
            return [gr.Column(visible=False), ""]
        ids = query.compare
        compared = attempt(
            lambda: compare_runs(self.runs.log, ids, self.runs.types), where="comparing runs"
        )
        if isinstance(compared, Fault):
            return [gr.Column(visible=True), message_html(compared)]
        return [gr.Column(visible=True), comparison_html(compared)]


def comparison_html(compared: ComparedRuns) -> str:
    """A column per configuration, a row per setting that differs and per figure."""
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
