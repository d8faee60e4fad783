"""The Deploy page: a run or a method as other engines take it, and their configs read back."""

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
    Handed,
    Question,
    hand_over,
    matrix,
    method_yaml,
    offered_runs,
    read_config,
    shown_settings,
    use,
)
from playground.errors import Fault, attempt
from playground.host.runner import EngineHost
from playground.web.address import link_to
from playground.web.generate import GeneratePage
from playground.web.method_file import uploaded_text
from playground.web.results import HTML

MARKS = {"exact": "✓", "with losses": "~", "not supported": "✕"}
FIRST_FILES, MAX_FILES = 2, 8
"""Files that are shown at once, and with those that are folded away."""
LANGUAGES: dict[str, Any] = {"json": "json", "yaml": "yaml", "bash": "shell", "python": "python"}
Updates = dict[Any, Any]
"""New values by component."""
QUIET: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private", "queue": False}
WRITE_LINK = """(query) => {
  if (!query?.startsWith("deploy=")) return;
  const asked = Object.fromEntries(new URLSearchParams(query));
  const detail = { tab: "deploy", whole: true, query: asked };
  document.dispatchEvent(new CustomEvent("pg-address", { detail }));
}"""
NO_RUNS = "No run of a drafting method yet. Generate with one, or pick a method here."
SAMPLES = {
    "trtllm": "speculative_config:\n  decoding_type: Eagle3\n  max_draft_len: 4\n  …",
    "vllm": '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 5}',
    "sglang": "--speculative-algorithm EAGLE3 --speculative-num-steps 3 …",
    "triton": 'parameters: { key: "decoding_mode" value: { string_value: "medusa" } } …',
    "llamacpp": "llama-server -m target.gguf --spec-type draft-simple -md draft.gguf …",
    "transformers": "model.generate(**inputs, prompt_lookup_num_tokens=10)",
}


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
        self.asked = [self.kind, self.run, self.target, self.method, self.engine, self.version]
        self.shown = [self.summary, self.told, *self.files, self.more, self.downloads, self.notes]
        self.outputs = [*self.asked, *self.shown, self.command, self.link]
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
                label="Hand over",
                elem_id="pg-deploy-kind",
            )
            self.run = menu("run", [], value=None)
            self.target = menu("target", targets, visible=False)
            self.method = menu("method", methods, value=methods[0][1], visible=False)
            self.summary = gr.HTML(elem_id="pg-deploy-summary", padding=True)

    def _reader(self) -> None:
        engines = [(engine.title, engine.name) for engine in ENGINES.values()]
        hidden: dict[str, Any] = {"visible": False}
        with gr.Group(elem_id="pg-deploy-reader"):
            self.source = gr.Dropdown(
                engines, value="vllm", label="Read a config of", elem_id="pg-deploy-source"
            )
            self.paste = gr.Textbox(
                label="Its file or command line",
                lines=5,
                max_lines=16,
                placeholder=SAMPLES["vllm"],
                elem_id="pg-deploy-paste",
            )
            self.found = gr.HTML(elem_id="pg-deploy-found", padding=True, **hidden)
        self.yaml = code("pg-deploy-yaml", label="Method file", language="yaml")
        with gr.Row(elem_id="pg-deploy-buttons"):
            self.upload = gr.UploadButton("Open file", size="sm", min_width=90)
            self.use = gr.Button(
                "Use in Generate", variant="primary", size="sm", elem_id="pg-deploy-use", **hidden
            )

    def _result(self) -> None:
        first = next(iter(ENGINES.values()))
        self.engine = gr.Radio(
            [(engine.title, engine.name) for engine in ENGINES.values()],
            value=first.name,
            label="Engine",
            elem_id="pg-deploy-engine",
        )
        self.version = gr.Dropdown(
            versions(first.name),
            value=first.newest,
            allow_custom_value=True,
            label="Release",
            elem_id="pg-deploy-version",
        )
        self.told = gr.HTML(elem_id="pg-deploy-told")
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
        def look_at_engine(*held: Any) -> Updates:
            return self._answer(*held[:-1], "")

        parts = (self.kind, self.run, self.target, self.method, self.version)
        inputs = [part.input for part in parts]
        looks = [
            gr.on(inputs, self._answer, self.asked, self.outputs, **QUIET),
            self.engine.input(look_at_engine, self.asked, self.outputs, **QUIET),
            tab.select(self.come_into_view, [self.link, *self.asked], self.outputs, **QUIET),
        ]
        for event in looks:
            event.then(None, self.link, None, js=WRITE_LINK, **QUIET)
        self.all.expand(lambda: method_table(self._catalog), None, self.table, **QUIET)
        gr.on(
            [self.paste.change, self.source.input],
            self._read,
            [self.source, self.paste],
            [self.paste, self.found, self.yaml, self.use],
            trigger_mode="always_last",
            **QUIET,
        )
        self.upload.upload(_text_of, self.upload, [self.paste, self.found], **QUIET)

    def listen_to_links(self, page: gr.Blocks) -> None:
        """Open the run or method of the address."""

        def load(request: gr.Request) -> Updates:
            return self._linked(request) or {self.outputs[0]: gr.skip()}

        page.load(load, None, self.outputs, **QUIET)

    def listen_to_use(self, tabs: gr.Tabs, generate: GeneratePage) -> None:
        """Take a config that was read to the Generate page."""

        def take(engine: Any, text: Any, target: Any) -> list[Any]:
            filled = attempt(
                lambda: generate.take(*use(self._catalog, engine, str(text), target)),
                where="using a config",
            )
            if isinstance(filled, Fault):
                alert = shown(ALERT.render(kind="alert", text=filled.sentence))
                return [alert, *[gr.skip()] * 4]
            return [gr.skip(), gr.Tabs(selected="generate"), *filled]

        outputs = [self.found, tabs, generate.target, generate.method, generate.form.spec]
        self.use.click(take, [self.source, self.paste, generate.target], outputs, **QUIET)

    # ---- answers

    def come_into_view(self, request: gr.Request, link: Any, *held: Any) -> Updates:
        """The first answer, unless there is one; its answer may come before that of the address."""
        if link:
            return {self.run: gr.Dropdown(self._runs(held[1]))}
        first = "run" if offered_runs(self._log) else "method"
        return self._linked(request) or self._answer(first, *held[1:])

    def _linked(self, request: gr.Request) -> Updates:
        """What the address of the page opens; nothing for that of another page."""
        link = link_to("deploy", request.query_params)
        asked = attempt(lambda: Question.of_link(link), where="opening a link")
        if isinstance(asked, Fault):
            return self._fault(asked.sentence)
        return {} if asked is None else self.open(asked)

    def open(self, asked: Question) -> Updates:
        """Updates of `outputs` that show a run or a method in an engine."""
        return self._answer(*(getattr(asked, name) for name in Question.model_fields))

    def _answer(self, *held: Any) -> Updates:
        given = ("" if value is None else value for value in held)
        values = dict(zip(Question.model_fields, given, strict=True))
        of_run = values["kind"] != "method"
        picks: Updates = {
            self.kind: "run" if of_run else "method",
            self.run: gr.Dropdown(visible=of_run),
        }
        picks |= {part: gr.Dropdown(visible=not of_run) for part in (self.target, self.method)}
        if of_run and not values["run"] and not offered_runs(self._log):
            return picks | self._fault("")
        found = attempt(lambda: self._found(Question.parse(values)), where="the Deploy page")
        return picks | (self._fault(found.sentence) if isinstance(found, Fault) else found)

    def _found(self, asked: Question) -> Updates:
        asked = asked.filled(self._log, self._catalog)
        handed, of_run = asked.find(self._log, self._catalog), asked.kind == "run"
        exports = [
            hand_over(handed, name, asked.version * (name == asked.engine), self._catalog.resolve)
            for name in ENGINES
        ]
        export = next(one for one in exports if one.engine == asked.engine)
        methods = self._menu.drafting(asked.target)
        if asked.method not in [key for _, key in methods]:  # a link may name any
            methods.append((self._catalog.method(asked.method).title, asked.method))
        engines, newest = [engine_choice(one) for one in exports], find_engine(asked.engine).newest
        return {
            self.run: gr.Dropdown(
                self._runs(asked.run, handed), value=asked.run or None, visible=of_run
            ),
            self.target: gr.update(value=asked.target, visible=not of_run),
            self.method: gr.Dropdown(methods, value=asked.method, visible=not of_run),
            self.engine: gr.Radio(engines, value=asked.engine),
            self.version: gr.update(choices=versions(asked.engine), value=asked.version or newest),
            self.summary: summary(handed),
            self.told: shown(told(export)),
            self.notes: shown(str(SAID.list("note", "Notes", export.notes))),
            self.command: asked.command,
            self.link: asked.link,
            **self._files(export.files),
        }

    def _runs(self, picked: Any, handed: Handed | None = None) -> list[tuple[str, str]]:
        """What is offered, and the one that is picked."""
        runs = offered_runs(self._log)
        if picked and picked not in [key for _, key in runs]:
            title = f"{handed.title} · {handed.target} · " if handed else "run "
            runs.insert(0, (f"{title}{picked}", picked))
        return runs

    def _fault(self, sentence: str) -> Updates:
        """What is wrong, or that there are no runs yet."""
        kind, text = ("alert", sentence) if sentence else ("dim", NO_RUNS)
        said = ALERT.render(kind=kind, text=text)
        nothing = {self.summary: "", self.notes: shown(""), self.command: ""}
        link = "fault" if sentence else ""
        return {self.told: shown(said), self.link: link, **nothing, **self._files()}

    def _files(self, files: Sequence[File] = ()) -> Updates:
        """Each file with a copy button, and all of them to download."""
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
        sample = {self.paste: gr.Textbox(placeholder=SAMPLES.get(engine, ""))}
        nothing = sample | {p: gr.update(visible=False) for p in (self.found, self.yaml, self.use)}
        if not isinstance(text, str) or not text.strip():
            return nothing
        read = attempt(lambda: read_config(engine, text), where="reading a config")
        if isinstance(read, Fault):
            return nothing | {self.found: shown(ALERT.render(kind="alert", text=read.sentence))}
        made = gr.Code(method_yaml(read.config, engine), visible=True)
        said = shown(remarks(read))
        return sample | {self.found: said, self.yaml: made, self.use: gr.Button(visible=True)}


def code(elem_id: str, **about: Any) -> gr.Code:
    """A file on show, once there is one."""
    return gr.Code(lines=1, visible=False, show_line_numbers=False, elem_id=elem_id, **about)


def shown(text: str) -> Any:
    """A text, or no room for it."""
    return gr.HTML(value=text, visible=bool(text))


def _text_of(path: str) -> tuple[Any, Any]:
    """The text that was uploaded, or why it is none."""
    read = attempt(lambda: uploaded_text(path), where="reading a config")
    if isinstance(read, Fault):
        return gr.skip(), shown(ALERT.render(kind="alert", text=read.sentence))
    return read, gr.skip()


def versions(engine: str) -> list[tuple[str, str]]:
    return [(f"{name} – {words}", name) for name, words in ENGINES[engine].versions]


def engine_choice(export: Export) -> tuple[str, str]:
    """An engine's verdict in a line, and its name."""
    engine = ENGINES[export.engine]
    first = export.refusal or next(iter(export.warnings), f"Trees: {engine.trees}.")
    return f"{engine.title} · {MARKS[export.verdict]} {export.verdict} · {first}", export.engine


# ---- what is said, as HTML; everything is escaped

SAID: Any = HTML.from_string(
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
<p class="dim">✓ complete · ~ with losses · ✕ not supported; newest releases, default settings.</p>
<div class="frame"><table><thead><tr><th scope="col">method</th>
{% for engine in engines.values() %}<th scope="col">{{ engine.title }}</th>{% endfor %}
</tr></thead><tbody>
{% for title, exports in rows %}<tr><th scope="row">{{ title }}</th>
{% for export in exports %}
{% set said %}{{ title }} in {{ engines[export.engine].title }}: {{ export.verdict }}.
{{- " " ~ (export.refusal or export.warnings | first) if export.refusal or export.warnings }}
{{- " Nearest: " ~ export.nearest if export.nearest }}{% endset %}
<td data-verdict="{{ export.verdict }}" title="{{ said }}"><span aria-hidden="true">
{{- marks[export.verdict] }}</span><span class="unseen">{{ said }}</span></td>
{% endfor %}</tr>{% endfor %}
</tbody></table></div>
{% endmacro %}
""",
    globals={"changed": shown_settings},
).module
ALERT = HTML.from_string('<p class="{{ kind }}">{{ text }}</p>')


def told(export: Export) -> str:
    """Why the engine cannot take the method, or what is lost."""
    if export.refusal:
        return str(SAID.refusal(export))
    return str(SAID.list("warning", "What changes in this engine", export.warnings))


def summary(handed: Handed) -> str:
    """What is handed over: a run's figures, and the settings that are not at their defaults."""
    measured = (("mat", handed.mat, 2, "MAT"), ("tok_s", handed.tok_s, 1, "tok/s"))
    figures = [(f"{v:.{d}f}", unit, FORMULAS[n]) for n, v, d, unit in measured if v is not None]
    return str(SAID.about(handed.title, handed.config, figures, f"on {handed.target}"))


def remarks(read: ImportedMethod) -> str:
    """What a pasted config is here, and what of it is ignored."""
    served = f"It served {read.target}." if read.target else ""
    said = [
        SAID.about(type(read.config).title, read.config, (), served),
        SAID.list("ignored", "Ignored: no effect on drafting", read.ignored),
        SAID.list("note", "Notes", read.notes),
    ]
    return "".join(map(str, said))


def method_table(catalog: Any) -> str:
    """Methods down, engines across; every cell has its sentence as tooltip."""
    return str(SAID.methods(ENGINES, matrix(catalog), MARKS))
