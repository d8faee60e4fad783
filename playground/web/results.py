"""HTML of results: tables with formulas, states and messages; buttons that navigate or save.

Tables are escaped HTML: `gr.Dataframe` has no place for a column's formula or a second line in a
cell.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gradio as gr
from gradio.utils import get_upload_folder
from jinja2 import Environment
from markupsafe import Markup, escape

from engine.safe_text import visible, visible_value
from playground.errors import Fault
from playground.experiments.report.columns import Cell as Cell
from playground.web.forms import RAW, Listener, Updates, on_fault

Components = Sequence[Any]
HTML = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, finalize=visible_value)
TERM = HTML.from_string(
    '<span class="pg-term" tabindex="0" data-about="{{ about }}">{{ title }}</span>'
)


def term(title: str, about: str) -> Markup:
    """A heading or label with its definition, shown on hover and on keyboard focus."""
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
DEFINITIONS = HTML.from_string("""
<dl class="{{ kind }}">
{% for name, text in rows %}<dt>{{ name }}</dt><dd>{{ text }}</dd>{% endfor %}
</dl>
""")
STATE = HTML.from_string("""
{% if state or text %}
<div class="pg-state" data-state="{{ state }}">
{% if share is not none %}<progress value="{{ share }}" max="1"></progress>{% endif %}
<span class="text" role="status">{{ text }}</span>
</div>
{% endif %}
{% if error %}<div class="pg-alert" role="alert">{{ error }}</div>{% endif %}
""")
SENTENCE = HTML.from_string(
    '<span class="pg-said{{ " faulty" if faulty }}" role="{{ "alert" if faulty else "status" }}">'
    "{{ text }}</span>"
)
DOWNLOAD_JS = """(file) => {
  if (!file) return [];
  const link = document.createElement("a");
  Object.assign(link, { href: file.url, download: file.orig_name }).click();
  return [];
}"""


def table_html(
    label: str,
    heads: Mapping[str, str],
    rows: Iterable[Sequence[Cell | str]],
    *,
    best: str | None = None,
) -> str:
    """A table; `heads` maps titles of columns to their definitions.

    Args:
        best: text of the first cell of the row to highlight.
    """
    cells = [[one if isinstance(one, Cell) else Cell(one) for one in row] for row in rows]
    return TABLE.render(label=label, heads=heads, rows=cells, best=best)


def definitions_html(rows: Iterable[tuple[str, str]], kind: str = "pg-facts") -> Markup:
    """Names and what they stand for, in two columns."""
    return Markup(DEFINITIONS.render(rows=rows, kind=kind))


def state_html(state: str, text: str, *, share: float | None = None, error: str = "") -> str:
    """The state of a long task: its progress from 0 to 1, and the error that ended it."""
    return STATE.render(state=state, text=text, share=share, error=error)


def sentence_html(text: str | Fault) -> str:
    """A sentence below a form or buttons; a fault has another colour."""
    if isinstance(text, Fault):
        return SENTENCE.render(text=text.sentence, faulty=True)
    return SENTENCE.render(text=text, faulty=False)


def show_fault_in(
    message: Any, *, where: str, render: Callable[[Fault], Any] = sentence_html
) -> Callable[[Listener], Listener]:
    """Decorates a listener: if it fails, `message` shows why and no other output changes."""
    return on_fault(lambda fault: {message: render(fault)}, where=where)


def save_on_click(
    button: gr.Button, read: Callable[..., tuple[str, str]], inputs: Components, message: gr.HTML
) -> None:
    """Let a button save the file whose name and text `read` returns; `message` shows a fault."""
    file = gr.File(visible=False)

    @show_fault_in(message, where="saving a file")
    def save(*values: Any) -> Updates:
        return {file: download_of(*read(*values)), message: ""}

    saved = button.click(
        lambda *values: {file: None, **save(*values)}, list(inputs), [file, message], **RAW
    )
    saved.then(None, file, None, js=DOWNLOAD_JS, **RAW)


def download_of(name: str, text: str) -> str:
    """Path of a new file that a browser may download.

    It is in Gradio's own folder, which is served, and deleted when the server ends.
    """
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    folder = Path(get_upload_folder()) / f"download-{digest}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text, encoding="utf-8")
    return str(folder / name)
