"""The Deploy page: export to other engines, and import of their configs."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gradio as gr

from engine.interop import ENGINES, find_engine
from engine.interop.export_files import Export, File, ImportedMethod
from engine.metrics import FORMULAS
from playground.deploy import (
    ExportForm,
    Exports,
    ExportSource,
    changed_settings,
    exports_of,
    matrix,
    method_yaml,
    offered_runs,
    read_config,
    use,
)
from playground.errors import Fault, attempt
from playground.host.runner import EngineHost
from playground.web.address import link_to, switch_to
from playground.web.forms import QUIET
from playground.web.generate import GeneratePage
from playground.web.method_file import uploaded_text
from playground.web.results import HTML

TITLES = [(engine.title, engine.name) for engine in ENGINES.values()]
MARKS = {"exact": "✓", "with losses": "~", "not supported": "✕"}
FIRST_FILES, MAX_FILES = 2, 8
"""Files in view, and in all."""
LANGUAGES: dict[str, Any] = {"json": "json", "yaml": "yaml", "bash": "shell", "python": "python"}
Updates = dict[Any, Any]
"""New values by component."""
WRITE_LINK = """(query) => {
  if (!query?.startsWith("deploy=")) return;
  const params = Object.fromEntries(new URLSearchParams(query));
  const detail = { tab: "deploy", whole: true, query: params };
  document.dispatchEvent(new CustomEvent("pg-address", { detail }));
}"""
NO_RUNS = "No run of a drafting method yet. Generate with one, or pick a method here."


class DeployPage:
    """Components and listeners of the page."""

    def __init__(self, host: EngineHost, tab: gr.Tab) -> None:
        self._log, self._catalog, self._menu = host.log, host.catalog, host.menu
        with gr.Row(equal_height=False, elem_id="pg-deploy"):
            with gr.Column(scale=1, elem_id="pg-deploy-side", min_width=290):
                self._choice()
                self._reader()
            with gr.Column(scale=3, elem_id="pg-deploy-main"):
                self._result()
        self.inputs = [self.kind, self.run, self.target, self.method, self.engine, self.version]
        self.inputs.append(self.part)
        self.outputs = [*self.inputs, self.summary, self.verdict, *self.files, self.more]
        self.outputs += [self.downloads, self.notes, self.command, self.link]
        self._listen(tab)

    # ---- layout

    def _choice(self) -> None:
        targets = self._catalog.target_choices()
        methods = self._menu.drafting(targets[0][1])

        def menu(name: str, choices: Any, **more: Any) -> gr.Dropdown:
            return gr.Dropdown(
                choices, label=name.capitalize(), elem_id=f"pg-deploy-{name}", **more
            )

        with gr.Group():
            self.kind = gr.Radio(
                [("A run", "run"), ("A method", "method")],
                value="run",
                label="Export",
                elem_id="pg-deploy-kind",
            )
            self.run = menu("run", [], value=None)
            self.target = menu("target", targets, visible=False)
            self.method = menu("method", methods, value=methods[0][1], visible=False)
            self.part = gr.Radio(
                [], value=None, label="Of this combination", visible=False, elem_id="pg-deploy-part"
            )
            self.summary = gr.HTML(elem_id="pg-deploy-summary", padding=True)

    def _reader(self) -> None:
        hidden: dict[str, Any] = {"visible": False}
        with gr.Group(elem_id="pg-deploy-reader"):
            self.source = gr.Dropdown(
                TITLES, value="vllm", label="Import a config of", elem_id="pg-deploy-source"
            )
            self.paste = gr.Textbox(
                label="Its file or command line",
                lines=5,
                max_lines=16,
                placeholder=ENGINES["vllm"].sample,
                elem_id="pg-deploy-paste",
            )
            self.imported = gr.HTML(elem_id="pg-deploy-found", padding=True, **hidden)
        self.yaml = code("pg-deploy-yaml", label="Method file", language="yaml")
        with gr.Row(elem_id="pg-deploy-buttons"):
            self.upload = gr.UploadButton("Open file", size="sm", min_width=90)
            self.use = gr.Button(
                "Use in Generate", variant="primary", size="sm", elem_id="pg-deploy-use", **hidden
            )

    def _result(self) -> None:
        first = next(iter(ENGINES.values()))
        self.engine = gr.Radio(TITLES, value=first.name, label="Engine", elem_id="pg-deploy-engine")
        self.version = gr.Dropdown(
            versions(first.name),
            value=first.default,
            allow_custom_value=True,
            label="Release",
            elem_id="pg-deploy-version",
        )
        self.verdict = gr.HTML(elem_id="pg-deploy-told")
        places = [f"pg-deploy-file-{i}" for i in range(MAX_FILES)]
        self.files = [code(place, buttons=["copy"]) for place in places[:FIRST_FILES]]
        self.more = gr.Accordion("", open=False, visible=False, elem_id="pg-deploy-more")
        with self.more:
            self.files += [code(place, buttons=["copy"]) for place in places[FIRST_FILES:]]
        self.downloads = gr.File(
            label="Download",
            file_count="multiple",
            interactive=False,
            visible=False,
            elem_id="pg-deploy-downloads",
        )
        self.notes = gr.HTML(visible=False, elem_id="pg-deploy-notes")
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

        sources = [part.input for part in (self.kind, self.run, self.target, self.method)]
        rest = [self.version.input, self.part.input]
        exports = [
            gr.on(sources, self._export, self.inputs[:4], self.outputs, **QUIET),
            gr.on(rest, self._export, self.inputs, self.outputs, **QUIET),
            self.engine.input(change_engine, self.inputs, self.outputs, **QUIET),
            tab.select(self.come_into_view, [self.link, *self.inputs], self.outputs, **QUIET),
        ]
        for event in exports:
            event.then(None, self.link, None, js=WRITE_LINK, **QUIET)
        self.all.expand(lambda: method_table(self._catalog), None, self.table, **QUIET)
        gr.on(
            [self.paste.change, self.source.input],
            self._read,
            [self.source, self.paste],
            [self.paste, self.imported, self.yaml, self.use],
            trigger_mode="always_last",
            **QUIET,
        )
        self.upload.upload(_text_of, self.upload, [self.paste, self.imported], **QUIET)

    def listen_to_links(self, page: gr.Blocks) -> None:
        """Open the run or method of the address."""

        def load(request: gr.Request) -> Updates:
            return self._open_link(request) or {self.outputs[0]: gr.skip()}

        page.load(load, None, self.outputs, **QUIET)

    def listen_to_use(self, tabs: gr.HTML, generate: GeneratePage) -> None:
        """Use an imported config on the Generate page."""

        def use_config(engine: Any, text: Any, target: Any) -> list[Any]:
            fields = attempt(
                lambda: generate.form_values.of_method(
                    *use(self._catalog, engine, str(text), target)
                ),
                where="using a config",
            )
            if isinstance(fields, Fault):
                return [_alert(fields.sentence), *[gr.skip()] * 4]
            return [gr.skip(), switch_to("generate"), *fields]

        outputs = [self.imported, tabs, generate.target, generate.method, generate.form.spec]
        self.use.click(use_config, [self.source, self.paste, generate.target], outputs, **QUIET)

    # ---- export

    def come_into_view(self, request: gr.Request, link: Any, *values: Any) -> Updates:
        """The first export, unless the address has opened one already."""
        if link:
            return {self.run: gr.Dropdown(self._runs(values[1]))}
        kind = "run" if offered_runs(self._log) else "method"
        return self._open_link(request) or self._export(kind, *values[1:4])

    def _open_link(self, request: gr.Request) -> Updates:
        """The export of the page's address; empty if it opens another page."""
        link = link_to("deploy", request.query_params)
        form = attempt(lambda: ExportForm.of_link(link), where="opening a link")
        if isinstance(form, Fault):
            return self._no_export(form.sentence)
        return {} if form is None else self.open(form)

    def open(self, form: ExportForm) -> Updates:
        """Updates of `outputs` that show the export of a form."""
        return self._export(*(getattr(form, name) for name in ExportForm.model_fields))

    def _export(self, *fields: Any) -> Updates:
        texts = ("" if value is None else value for value in fields)
        values = dict(zip(ExportForm.model_fields, texts, strict=False))
        is_run = values["kind"] != "method"
        inputs: Updates = {
            self.kind: "run" if is_run else "method",
            self.run: gr.Dropdown(visible=is_run),
        }
        inputs |= {part: gr.Dropdown(visible=not is_run) for part in (self.target, self.method)}
        if is_run and not values["run"] and not offered_runs(self._log):
            return inputs | self._no_export("")
        updates = attempt(lambda: self._updates(ExportForm.parse(values)), where="the Deploy page")
        if isinstance(updates, Fault):
            return inputs | self._no_export(updates.sentence)
        return inputs | updates

    def _updates(self, form: ExportForm) -> Updates:
        exports = exports_of(form, self._log, self._catalog)
        form, source, export = exports.form, exports.source, exports.shown
        is_run = form.kind == "run"
        methods = self._menu.drafting(form.target)
        if not is_run and form.method not in [key for _, key in methods]:  # a link may name any
            methods.append((self._catalog.method(form.method).title, form.method))
        engines = [engine_choice(one, exports.gguf) for one in exports.engines]
        version = form.version or find_engine(form.engine).default
        return {
            self.run: gr.Dropdown(
                self._runs(form.run, source), value=form.run or None, visible=is_run
            ),
            self.target: gr.update(value=form.target, visible=not is_run),
            # Of a run it stays as it is: the menu may have no entry for what the form fills in.
            self.method: gr.Dropdown(visible=False)
            if is_run
            else gr.Dropdown(methods, value=form.method, visible=True),
            self.engine: gr.Radio(engines, value=form.engine, info=exports.gguf),
            self.version: gr.update(choices=versions(form.engine), value=version),
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

    def _runs(self, run_id: Any, source: ExportSource | None = None) -> list[tuple[str, str]]:
        """The runs of the menu, with the selected one."""
        runs = offered_runs(self._log)
        if run_id and run_id not in [key for _, key in runs]:
            title = f"{source.title} · {source.target} · " if source else "run "
            runs.insert(0, (f"{title}{run_id}", run_id))
        return runs

    def _no_export(self, error: str) -> Updates:
        """Shows the error, or that there are no runs yet."""
        return {
            self.summary: "",
            self.notes: html_update(""),
            self.command: "",
            self.verdict: _alert(error) if error else _alert(NO_RUNS, "dim"),
            self.link: "fault" if error else "",
            **self._files(),
        }

    def _files(self, files: Sequence[File] = ()) -> Updates:
        """Each file with a copy button, and a download of all."""
        updates: Updates = {code: gr.Code(value="", visible=False) for code in self.files}
        for code, file in zip(self.files, files, strict=False):
            language = LANGUAGES.get(file.language)
            updates[code] = gr.Code(file.text, language, label=file.name, visible=True)
        more = [file.name for file in files[FIRST_FILES:]]
        updates[self.more] = gr.Accordion(label=", ".join(more), visible=bool(more))
        paths = [self._saved(file.name, file.text) for file in files]
        return updates | {self.downloads: gr.File(paths or None, visible=bool(paths))}

    def _saved(self, name: str, text: str) -> str:
        # Among Gradio's own files, which it hands out and which go when the server ends.
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        folder = Path(self.downloads.GRADIO_CACHE) / f"deploy-{digest}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
        return str(folder / name)

    def _read(self, engine: Any, text: Any) -> Updates:
        example = ENGINES[engine].sample if engine in ENGINES else ""
        sample = {self.paste: gr.Textbox(placeholder=example)}
        hidden = {p: gr.update(visible=False) for p in (self.imported, self.yaml, self.use)}
        if not isinstance(text, str) or not text.strip():
            return sample | hidden
        config = attempt(lambda: read_config(engine, text), where="reading a config")
        if isinstance(config, Fault):
            return sample | hidden | {self.imported: _alert(config.sentence)}
        return sample | {
            self.imported: html_update(imported_html(config)),
            self.yaml: gr.Code(method_yaml(config.config, engine), visible=True),
            self.use: gr.Button(visible=True),
        }


def code(elem_id: str, **about: Any) -> gr.Code:
    """A file view, hidden until there is a file."""
    return gr.Code(lines=1, visible=False, show_line_numbers=False, elem_id=elem_id, **about)


def html_update(text: str) -> Any:
    """Shows a text; hides the component if it is empty."""
    return gr.HTML(value=text, visible=bool(text))


def _alert(text: str, kind: str = "alert") -> Any:
    return html_update(ALERT.render(kind=kind, text=text))


def _text_of(path: str) -> tuple[Any, Any]:
    """The uploaded text, or an error message."""
    text = attempt(lambda: uploaded_text(path), where="reading a config")
    return (gr.skip(), _alert(text.sentence)) if isinstance(text, Fault) else (text, gr.skip())


def versions(engine: str) -> list[tuple[str, str]]:
    return [(f"{name} – {words}", name) for name, words in ENGINES[engine].versions]


def engine_choice(export: Export, common: str) -> tuple[str, str]:
    """An engine's verdict as one line without the `common` warning, and its name."""
    engine = ENGINES[export.engine]
    own = (one for one in export.warnings if one != common)
    rest = "Only the weights differ." if export.warnings else f"Trees: {engine.trees}."
    first = export.refusal or next(own, rest)
    return f"{engine.title} · {MARKS[export.verdict]} {export.verdict} · {first}", export.engine


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
{% if target %}<p class="dim">{{ target }}</p>{% endif %}
<p class="settings">{% for name, value in changed(config).items() %}
<span><i>{{ name }}</i> {{ value }}</span>
{% else %}All settings at their defaults.{% endfor %}</p>
{% endmacro %}
{% macro refusal(export) %}
<div class="told refusal"><p>{{ export.refusal }}</p>
{% if export.nearest %}<p><b>Nearest:</b> {{ export.nearest }}</p>{% endif %}</div>
{% endmacro %}
{% macro methods(engines, rows, marks) %}
<p class="dim">✓ complete · ~ with losses · ✕ not supported; default releases, default settings.</p>
<div class="frame"><table><thead><tr><th scope="col">method</th>
{% for engine in engines.values() %}<th scope="col">{{ engine.title }}</th>{% endfor %}
</tr></thead><tbody>
{% for title, exports in rows %}<tr><th scope="row">{{ title }}</th>
{% for export in exports %}
{% set verdict %}{{ title }} in {{ engines[export.engine].title }}: {{ export.verdict }}.
{{- " " ~ (export.refusal or export.warnings | first) if export.refusal or export.warnings }}
{{- " Nearest: " ~ export.nearest if export.nearest }}{% endset %}
<td data-verdict="{{ export.verdict }}" title="{{ verdict }}"><span aria-hidden="true">
{{- marks[export.verdict] }}</span><span class="unseen">{{ verdict }}</span></td>
{% endfor %}</tr>{% endfor %}
</tbody></table></div>
{% endmacro %}
""",
    globals={"changed": changed_settings},
).module
ALERT = HTML.from_string('<p class="{{ kind }}">{{ text }}</p>')


def verdict_html(exports: Exports) -> str:
    """Why the engine refuses the method, or what is lost."""
    export, part = exports.shown, exports.source.config.title
    if export.refusal:
        return str(MACROS.refusal(export))
    alone = f"No engine runs this combination as it is: below is {part} alone. Choose on the left."
    told = ALERT.render(kind="dim", text=alone) if exports.chosen else ""
    own = [one for one in export.warnings if one != exports.gguf]
    return told + str(MACROS.list("warning", "What changes in this engine", own))


def source_html(source: ExportSource) -> str:
    """The exported method: its run's figures and the settings that differ from the defaults."""
    measured = (("mat", source.mat, 2, "MAT"), ("tok_s", source.tok_s, 1, "tok/s"))
    figures = [(f"{v:.{d}f}", unit, FORMULAS[n]) for n, v, d, unit in measured if v is not None]
    return str(MACROS.about(source.title, source.config, figures, f"on {source.target}"))


def imported_html(imported: ImportedMethod) -> str:
    """The method of a pasted config, and the keys that were ignored."""
    target = f"Its target was {imported.target}." if imported.target else ""
    parts = [
        MACROS.about(type(imported.config).title, imported.config, (), target),
        MACROS.list("ignored", "Ignored: no effect on drafting", imported.ignored),
        MACROS.list("note", "Notes", imported.notes),
    ]
    return "".join(map(str, parts))


def method_table(catalog: Any) -> str:
    """Methods down, engines across; tooltips explain every verdict."""
    return str(MACROS.methods(ENGINES, matrix(catalog), MARKS))
