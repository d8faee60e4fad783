"""What pages show of results: figures as text, tables with formulas, cards, files to save.

Tables are escaped HTML: `gr.Dataframe` has no place for the formula of a column, nor for a second
line in a cell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import gradio as gr
from jinja2 import Environment
from markupsafe import Markup, escape

from engine.safe_text import visible, visible_value
from playground.errors import Fault, attempt
from playground.experiments.report.columns import Cell as Cell
from playground.experiments.report.columns import Table
from playground.web.forms import RAW

HTML = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, finalize=visible_value)
TERM = HTML.from_string(
    '<span class="pg-term" tabindex="0" data-about="{{ about }}">{{ title }}</span>'
)


def term(title: str, about: str) -> Markup:
    """A heading or label with its definition, under the pointer and for the keyboard."""
    return (
        Markup(TERM.render(title=title, about=about)) if about and title else escape(visible(title))
    )


HTML.filters["term"] = term
TABLE = HTML.from_string("""
<div class="pg-table" tabindex="0" role="region" aria-label="{{ label }}"><table>
<thead><tr>
{% for title, formula in heads.items() %}
  {% if title %}<th scope="col">{{ title | term(formula) }}</th>{% else %}<td></td>{% endif %}
{% endfor %}
</tr></thead>
<tbody>
{% for cells in rows %}
  <tr data-row="{{ cells[0].text | striptags }}" class="{{ 'best' if cells[0].text == best }}">
  {% for cell in cells %}
    <td class="{{ cell.mood }}" title="{{ cell.hint }}">{{ cell.text }}
    {%- if cell.small %}<small>{{ cell.small }}</small>{% endif %}</td>
  {% endfor %}
  </tr>
{% endfor %}
</tbody></table></div>
""")
STATE = HTML.from_string("""
<div class="pg-state" data-state="{{ state }}">
{% if share is not none %}<progress value="{{ share }}" max="1"></progress>{% endif %}
<span class="text" role="status">{{ text }}</span>
</div>
{% if error %}<div class="pg-alert" role="alert">{{ error }}</div>{% endif %}
""")
SAYING = HTML.from_string(
    '<span class="pg-said{{ " faulty" if faulty }}" role="status">{{ text }}</span>'
)
SAVE_JS = """(file) => {
  if (!file) return [];
  const url = URL.createObjectURL(new Blob([file.text]));
  const link = document.createElement("a");
  Object.assign(link, { href: url, download: file.name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
  return [];
}"""


def report_table(label: str, table: Table) -> str:
    """A table over the configurations of a report."""
    rows = [[Cell(s.name, hint=s.title), *cells] for s, cells in table.rows]
    return table_html(label, {"configuration": "", **table.heads}, rows)


def table_html(
    label: str,
    heads: Mapping[str, str],
    rows: Iterable[Sequence[Cell | str]],
    *,
    best: str | None = None,
) -> str:
    """A table; `heads` gives every column's definition.

    Args:
        best: first cell of the row that stands out.
    """
    cells = [[one if isinstance(one, Cell) else Cell(one) for one in row] for row in rows]
    return TABLE.render(label=label, heads=heads, rows=cells, best=best)


def state_html(state: str, text: str, *, share: float | None = None, error: str = "") -> str:
    """Where something long is, how much of it is done, and what broke it."""
    return STATE.render(state=state, text=text, share=share, error=error)


def saying(text: str | Fault) -> str:
    """A sentence under a form; a fault in another colour."""
    if isinstance(text, Fault):
        return SAYING.render(text=text.sentence, faulty=True)
    return SAYING.render(text=text, faulty=False)


def definitions(formulas: Mapping[str, str]) -> str:
    """Every figure with its formula, as Markdown."""
    return "\n".join(f"- **{name.replace('_', ' ')}**: {text}" for name, text in formulas.items())


def leads(
    button: gr.Button,
    lead: Callable[..., dict[Any, Any]],
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    state: gr.HTML,
) -> None:
    """Make a button go to another page by the updates that `lead` gives, or say why it cannot."""

    def go(*values: Any) -> dict[Any, Any]:
        updates = attempt(lambda: lead(*values), where="opening another page")
        if isinstance(updates, Fault):
            return {state: state_html("", "", error=updates.sentence)}
        return updates

    button.click(go, list(inputs), [state, *outputs], **RAW)


def saves(
    button: gr.Button, read: Callable[..., tuple[str, str]], inputs: Sequence[Any], message: gr.HTML
) -> None:
    """Make a button save what `read` gives, a file's name and text; or say why not."""
    file = gr.JSON(visible=False)

    def prepare(*values: Any) -> tuple[Any, str]:
        file = attempt(lambda: read(*values), where="saving a file")
        if isinstance(file, Fault):
            return None, saying(file)
        return {"name": file[0], "text": file[1]}, ""

    made = button.click(prepare, list(inputs), [file, message], **RAW)
    made.then(None, file, None, js=SAVE_JS, **RAW)
