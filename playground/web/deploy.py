"""The Deploy page: export a method to other engines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gradio as gr

from engine.figures import FIGURES
from playground.deploy import ENGINES, find_engine
from playground.deploy.files import Export
from playground.errors import Fault, attempt
from playground.export import (
    ExportForm,
    Exports,
    ExportSource,
    exports_of,
    matrix,
    offered_runs,
)
from playground.host.menu import Choices
from playground.host.runner import EngineHost
from playground.runs.settings import short
from playground.web.address import link_params
from playground.web.forms import RAW, RAW_LATEST, UNQUEUED, Updates
from playground.web.results import HTML, Cell, download_of, sentence_html, table_html

MARKS = {"exact": ("✓", "good"), "with losses": ("~", "warn"), "not supported": ("✕", "dim")}
"""Sign and CSS class of every verdict."""
LEGEND = "✓ complete · ~ with losses · ✕ not supported; default releases, default settings."
FIRST_FILES, MAX_FILES = 2, 9
"""Number of files shown at once, and of all files of the largest export."""
WRITE_LINK = """(query) => {
  if (!query?.startsWith("deploy=")) return;
  const params = Object.fromEntries(new URLSearchParams(query));
  const detail = { tab: "deploy", whole: true, query: params };
  document.dispatchEvent(new CustomEvent("pg-address", { detail }));
}"""


class DeployPage:
    """Components and listeners of the page."""

    def __init__(self, host: EngineHost, tab: gr.Tab) -> None:
        self._log, self._catalog, self._menu = host.log, host.catalog, host.menu
        with gr.Row(elem_id="pg-deploy"):
            with gr.Column(elem_id="pg-deploy-side", elem_classes="pg-side"):
                self._export_form()
            with gr.Column(scale=3, elem_id="pg-deploy-main"):
                self._export_view()
        self.inputs = [self.of, self.target, self.engine, self.version, self.part]
        self.outputs = [*self.inputs, self.summary, self.verdict, *self.files, self.more]
        self.outputs += [self.downloads, self.notes, self.command, self.link]
        self.open_outputs = self.outputs
        self._listen(tab)

    # ---- layout

    def _export_form(self) -> None:
        targets = self._catalog.target_choices()
        with gr.Group():
            self.of = gr.Dropdown([], value=None, label="Run or method", elem_id="pg-deploy-of")
            self.target = gr.Dropdown(
                targets, label="Target", visible=False, elem_id="pg-deploy-target"
            )
            self.part = gr.Radio(
                [], value=None, label="Of this combination", visible=False, elem_id="pg-deploy-part"
            )
            self.summary = gr.HTML(elem_id="pg-deploy-summary", padding=True)

    def _export_view(self) -> None:
        engines = [(engine.title, engine.name) for engine in ENGINES.values()]
        self.engine = gr.Radio(engines, label="Engine", elem_id="pg-deploy-engine")
        self.version = gr.Dropdown(
            [], value=None, allow_custom_value=True, label="Release", elem_id="pg-deploy-version"
        )
        self.verdict = gr.HTML(elem_id="pg-deploy-told")
        self.files = [code_view(number) for number in range(FIRST_FILES)]
        self.more = gr.Accordion("", open=False, visible=False, elem_id="pg-deploy-more")
        with self.more:
            self.files += [code_view(number) for number in range(FIRST_FILES, MAX_FILES)]
        self.downloads = gr.File(
            label="Download",
            file_count="multiple",
            interactive=False,
            visible=False,
            elem_id="pg-deploy-downloads",
        )
        self.notes = gr.HTML(visible=False)
        self.command = gr.Textbox(
            label="The same on the command line",
            interactive=False,
            buttons=["copy"],
            elem_id="pg-deploy-command",
        )
        self.link = gr.Textbox(visible=False)
        self.all = gr.Accordion("Every method in every engine", open=False, elem_id="pg-deploy-all")
        with self.all:
            self.table = gr.HTML(elem_id="pg-deploy-table")

    # ---- listeners

    def _listen(self, tab: gr.Tab) -> None:
        def change_engine(*values: Any) -> Updates:
            *source, engine, _, part = values
            return self._export(*source, engine, "", part)

        sources, rest = [self.of.input, self.target.input], [self.version.input, self.part.input]
        exports = [
            gr.on(sources, self._export, self.inputs[:2], self.outputs, **RAW_LATEST),
            gr.on(rest, self._export, self.inputs, self.outputs, **RAW_LATEST),
            self.engine.input(change_engine, self.inputs, self.outputs, **RAW_LATEST),
            tab.select(self.on_select, [self.link, *self.inputs], self.outputs, **RAW),
        ]
        for event in exports:
            event.then(None, self.link, None, js=WRITE_LINK, **UNQUEUED)
        self.all.expand(lambda: method_table(self._catalog), None, self.table, **UNQUEUED)

    # ---- export

    def on_select(self, request: gr.Request, link: Any, *values: Any) -> Updates:
        """Show the export that the URL names, or the first one, unless one is open already."""
        if link:
            return {self.of: gr.Dropdown(self._choices(values[1], values[0]))}
        params = link_params("deploy", request.query_params)
        form = attempt(lambda: ExportForm.of_link(params), where="opening a link")
        if isinstance(form, Fault):
            return self._no_export(form)
        return self._export(*values[:2]) if form is None else self.open(form)

    def open(self, form: ExportForm) -> Updates:
        """Updates of `open_outputs`: the export of a form."""
        return self._export(*form.model_dump().values())

    def _export(self, *fields: Any) -> Updates:
        texts = ("" if value is None else value for value in fields)
        values = dict(zip(ExportForm.model_fields, texts, strict=False))
        updates = attempt(lambda: self._updates(ExportForm.parse(values)), where="the Deploy page")
        if isinstance(updates, Fault):
            return self._no_export(updates, values["of"], values["target"])
        return updates

    def _updates(self, form: ExportForm) -> Updates:
        exports = exports_of(form, self._log, self._catalog)
        form, source, export = exports.form, exports.source, exports.selected
        title = f"{source.title} · {source.target} · {form.of}"
        engines = [engine_choice(one, exports.gguf) for one in exports.engines]
        engine = find_engine(form.engine)
        releases = [(f"{name} – {words}", name) for name, words in engine.versions]
        return {
            self.of: gr.Dropdown(self._choices(form.target, form.of, title), value=form.of),
            self.target: gr.update(value=form.target, visible=not form.is_run),
            self.engine: gr.Radio(engines, value=form.engine, info=exports.gguf),
            self.version: gr.update(choices=releases, value=form.version or engine.default),
            self.part: gr.Radio(
                list(exports.parts), value=form.part or None, visible=bool(exports.parts)
            ),
            self.summary: source_html(source),
            self.verdict: html_update(verdict_html(exports)),
            self.notes: html_update(str(MACROS.list("note", "Notes", export.notes))),
            self.command: form.command,
            self.link: form.link,
            **self._files(export.files),
        }

    def _choices(self, target: Any, selected: Any = None, title: str = "") -> Choices:
        """What can be exported: runs, then methods for a target; a link may select any other."""
        choices = offered_runs(self._log)
        choices += [(name, f"method:{key}") for name, key in self._menu.drafting(target)]
        if isinstance(selected, str) and selected not in ("", *(key for _, key in choices)):
            choices.insert(0, (title or selected, selected))
        return choices

    def _no_export(self, fault: Fault, of: Any = "", target: Any = "") -> Updates:
        """An empty export with the error."""
        return {
            self.of: gr.Dropdown(self._choices(target, of)),
            self.target: gr.Dropdown(visible=not str(of).startswith("run:")),
            self.summary: "",
            self.notes: html_update(""),
            self.command: "",
            self.verdict: html_update(sentence_html(fault)),
            self.link: "fault",
            **self._files(),
        }

    def _files(self, files: Mapping[str, str] = {}) -> Updates:
        """Updates of the file views and of the download of all files."""
        updates: Updates = {code: gr.Code(value="", visible=False) for code in self.files}
        for code, (name, text) in zip(self.files, files.items(), strict=False):
            updates[code] = gr.Code(text, label=name, visible=True)
        more = list(files)[FIRST_FILES:]
        updates[self.more] = gr.Accordion(label=", ".join(more), visible=bool(more))
        paths = [download_of(name, text) for name, text in files.items()]
        return updates | {self.downloads: gr.File(paths or None, visible=bool(paths))}


def code_view(number: int) -> gr.Code:
    """A file view, hidden until there is a file."""
    place = f"pg-deploy-file-{number}"
    return gr.Code(lines=1, visible=False, show_line_numbers=False, buttons=["copy"], elem_id=place)


def html_update(text: str) -> Any:
    """An update of an HTML component, which is hidden if the text is empty."""
    return gr.HTML(value=text, visible=bool(text))


def engine_choice(export: Export, common: str) -> tuple[str, str]:
    """Choice of an engine: its verdict in one line, without the `common` warning; and its name."""
    verdict = f"{ENGINES[export.engine].title} · {MARKS[export.verdict][0]} {export.verdict}"
    if export.verdict == "exact":
        return verdict, export.engine
    own = (one for one in export.warnings if one != common)
    first = export.refusal or next(own, "Only the weights differ.")
    return f"{verdict} · {first}", export.engine


# ---- HTML, escaped by the templates

MACROS: Any = HTML.from_string(
    """
{%- macro list(kind, title, sentences) %}{% if sentences %}
<div class="told {{ kind }}"><b>{{ title }}</b><ul>
{% for sentence in sentences %}<li>{{ sentence }}</li>{% endfor %}</ul></div>
{% endif %}{% endmacro %}
{% macro about(title, config, figures, target) %}
{% set badge = config.badge %}
<p><b>{{ title }}</b> <span class="badge {{ badge }}">{{ badge }}</span></p>
{% for text, unit, formula in figures %}
<span class="figure"><b>{{ text }}</b> {{ unit | term(formula) }}</span>
{% endfor %}
<p class="dim">on {{ target }}</p>
<p class="settings">{% for name, value in changed(config).items() %}
<span><i>{{ name }}</i> {{ value }}</span>
{% else %}All settings at their defaults.{% endfor %}</p>
{% endmacro %}
{% macro refusal(export) %}
<div class="told refusal"><p>{{ export.refusal }}</p>
{% if export.nearest %}<p><b>Nearest:</b> {{ export.nearest }}</p>{% endif %}</div>
{% endmacro %}
{% macro mark(sign, words) %}{{ sign }}<span class="unseen">{{ words }}</span>{% endmacro %}
""",
    globals={
        "changed": lambda config: {k: short(value) for k, value in config.changed_flat.items()}
    },
).module


def verdict_html(exports: Exports) -> str:
    """Why the engine refuses the method, or what the export loses."""
    export, part = exports.selected, exports.source.config.title
    if export.refusal:
        return str(MACROS.refusal(export))
    alone = f"No engine runs this combination as it is. Below is {part}; choose a part on the left."
    hint = sentence_html(alone) if exports.is_automatic else ""
    own = [one for one in export.warnings if one != exports.gguf]
    return hint + str(MACROS.list("warning", "What changes in this engine", own))


def source_html(source: ExportSource) -> str:
    """The exported method: its run's figures and the settings that differ from the defaults."""
    measured = ((FIGURES["mat"], source.mat), (FIGURES["tok_s"], source.tok_s))
    figures = [(f.text(value), f.title, f.formula) for f, value in measured if value is not None]
    return str(MACROS.about(source.title, source.config, figures, source.target))


def method_table(catalog: Any) -> str:
    """A row per method, a column per engine; tooltips explain every verdict."""
    heads = {"method": "", **{engine.title: "" for engine in ENGINES.values()}}
    rows = [
        [Cell(title), *(_mark(title, one) for one in exports)] for title, exports in matrix(catalog)
    ]
    return sentence_html(LEGEND) + table_html("Every method in every engine", heads, rows)


def _mark(method: str, export: Export) -> Cell:
    mark, mood = MARKS[export.verdict]
    words = f"{method} in {ENGINES[export.engine].title}: {export.verdict}."
    nearest = f"Nearest: {export.nearest}" if export.nearest else ""
    why = export.refusal or next(iter(export.warnings), "")
    words = " ".join(filter(None, (words, why, nearest)))
    return Cell(MACROS.mark(mark, words), mood=mood, hint=words)
