"""The Benchmark page: measure configurations on prompt suites; tables, plots and downloads."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import gradio as gr

from engine.config import Sampling
from engine.drafters.method import MethodConfig
from engine.errors import ConfigError
from engine.formats import plural
from engine.safe_text import read_text
from playground.errors import Fault, attempt
from playground.experiments.cluster import PoolConfig
from playground.experiments.forms import LIMITS, BenchmarkForm, Extent, closest_method
from playground.experiments.plan import ExperimentPlan
from playground.experiments.prompts import GROUPS, items_of
from playground.experiments.report.columns import Cell, by_group
from playground.experiments.report.export import FILES
from playground.experiments.report.plots import PLOTS, report_figure
from playground.experiments.report.report import Report, Results, Section
from playground.experiments.service import ExperimentState
from playground.export import ExportForm
from playground.host.controls import FormValues, Group, spec_of
from playground.host.request import DTYPES, texts
from playground.trees.methods import tree_method
from playground.web.configurations import ConfigurationPicker, read_configurations
from playground.web.experiment import ExperimentPage, read_key
from playground.web.forms import UNQUEUED, SettingsForm, Updates
from playground.web.report import cards_html, head_html, latency_html, summary_html
from playground.web.results import save_on_click, sentence_html, table_html

FIRST_SUITE = "quick"
MAX_PROMPT_FILE = 8_000_000


class BenchmarkPage(ExperimentPage):
    """Components and listeners of the page."""

    name = "benchmark"
    empty = (
        "No benchmark yet. Choose suites and methods, then start: plain decoding and every "
        "configuration take turns answering each prompt."
    )

    # ---- layout

    def _setup(self) -> None:
        suites = self._suites()
        first = FIRST_SUITE if FIRST_SUITE in self.catalog.suites else suites[0][1]
        with gr.Group():
            self.target = gr.Dropdown(self.catalog.target_choices(), label="Target")
            self.dtype = gr.Dropdown(DTYPES, label="dtype", elem_id="pg-benchmark-dtype")
            self.suites = gr.CheckboxGroup(
                suites, value=[first], label="Suites", elem_id="pg-benchmark-suites"
            )
            self.file = gr.UploadButton("Add a file of prompts …", file_count="multiple", size="sm")
            self.file_message = gr.HTML(padding=True, elem_id="pg-benchmark-file-message")
        self.configurations = ConfigurationPicker(
            self.host, self.target, "pg-benchmark", named=True
        )
        sampling = "Sampling: greedy unless changed"
        spec = spec_of(
            Group.of("extent", "Extent", Extent()),
            Group.of("limits", "Limits", LIMITS, skip=["stop", "stop_token_ids"]),
            Group.of("sampling", sampling, Sampling(), open=False),
        )
        self.extent_form = SettingsForm(spec, elem_id="pg-benchmark-extent", classes=[Extent])
        self.fields = {name: getattr(self, name) for name in ("target", "dtype", "suites")}
        self.fields |= {"form": self.configurations.form.values, "extent": self.extent_form.values}

    def _report(self) -> None:
        head = gr.HTML(elem_id="pg-benchmark-head")
        with gr.Row(elem_classes="pg-bar"):
            self.configuration = gr.Dropdown(
                [], label="Configuration", elem_id="pg-benchmark-configuration"
            )
            titles = {"use": "Use in Generate", "tune": "Tune its tree", "deploy": "Deploy"}
            self.page_buttons = {
                name: gr.Button(title, size="sm", elem_id=f"pg-benchmark-{name}")
                for name, title in titles.items()
            }
        with gr.Row(elem_classes="pg-bar"):
            self.files = {
                name: gr.Button(name, size="sm", elem_classes="pg-file") for name in FILES
            }
        summary = gr.HTML(elem_id="pg-benchmark-summary")
        kind = gr.Radio(
            [("Speedup", "speedup"), ("MAT", "mat")], value="speedup", label="By kind of task"
        )
        by_group = gr.HTML()
        choices = [(title, kind) for kind, (title, _) in PLOTS.items()]
        plot_kind = gr.Radio(choices, value="speedup", label="Plot")
        plot = gr.Plot(visible=False, show_label=False, elem_id="pg-benchmark-plot")
        latency = gr.HTML()
        differing = gr.HTML(elem_id="pg-benchmark-differing")
        self.report_controls = [kind, plot_kind, self.configuration]
        self.report_outputs = [head, summary, by_group, plot, self.configuration]
        self.report_outputs += [latency, differing]
        self.open_outputs = [self.picker, self.configuration]

    # ---- the form

    def _suites(self) -> list[tuple[str, str]]:
        return [
            (f"{suite.title} ({plural(len(items_of(suite)), 'prompt')})", key)
            for key, suite in self.experiments.suites.items()
        ]

    def _listen_to_setup(self) -> None:
        added = [self.suites, self.file_message]
        self.file.upload(self.add_files, [self.file, self.suites], added, **UNQUEUED)
        for name, button in self.files.items():
            save_on_click(button, partial(self._file, name), [self.picker], self.message)
        self.nav.link_tree(self.configurations.form, self.target)

    def plan(self, values: Mapping[str, Any]) -> ExperimentPlan:
        return BenchmarkForm.parse(form_of(values)).plan(self.catalog, self.experiments.suites)

    def extent(self, plan: ExperimentPlan, pool: PoolConfig | None) -> str:
        how = "one at a time (concurrency 1)" if pool is None else "one at a time on each worker"
        return f"{plan.extent}, {how}."

    def add_files(self, files: Any, suites: Any) -> tuple[Any, str]:
        """The suites including those of the files, which are selected; and the files' errors."""
        keys, faults = texts(suites), []
        for file in map(Path, files or []):
            key = attempt(partial(self._add_file, file), where="reading a file")
            if isinstance(key, Fault):
                faults.append(key.sentence)
            elif key not in keys:
                keys.append(key)
        message = sentence_html(Fault(" ".join(faults), expected=True)) if faults else ""
        return gr.CheckboxGroup(self._suites(), value=keys), message

    def _add_file(self, file: Path) -> str:
        return self.experiments.add_file(file.name, read_text(file, most=MAX_PROMPT_FILE))

    # ---- the report

    def read(self, key: str) -> ExperimentState:
        return self.experiments.look(key)

    def report(self, state: ExperimentState, *options: Any) -> list[Any]:
        kind, plot, configuration = options
        results: Results = state.results
        report = results.report
        names = [section.name for section in report.configurations]
        best = f"Highest speedup: {report.leader}"
        groups = by_group(report, kind, GROUPS)
        rows = [[Cell(one.name, hint=one.title), *cells] for one, cells in groups.rows]
        return [
            head_html(results),
            summary_html(results, self.catalog.resolve),
            table_html(f"By kind of task: {kind}", {"configuration": "", **groups.heads}, rows),
            gr.Plot(report_figure(report, results.requests, plot), visible=True),
            gr.Dropdown(
                [(best, ""), *zip(names, names, strict=True)],
                value=configuration if configuration in names else "",
            ),
            latency_html(section_of(report, configuration)),
            cards_html(results, self.log),
        ]

    def _file(self, name: str, picked: Any) -> tuple[str, str]:
        return f"benchmark-{picked}-{name}", self.experiments.file(read_key(picked), name)

    # ---- links to other pages

    def open(self, benchmark: str) -> Updates:
        return {self.picker: self.menu(benchmark), self.configuration: None}

    def _listen_to_links(self) -> None:
        """Open a configuration on the Generate, Tree and Deploy pages."""

        def picked_method(picked: Any, name: Any) -> tuple[str, str, MethodConfig]:
            """Target of a benchmark, and key and settings of a configuration."""
            results = self.experiments.look(read_key(picked)).results
            plan, section = results.plan, section_of(results.report, name)
            target, config = plan.target.name, plan.configuration(section.name).config
            return target, closest_method(self.catalog, config, target), config

        def use(picked: Any, name: Any) -> Updates:
            target, method, config = picked_method(picked, name)
            settings = config.model_dump(exclude={"decoding_type"})
            return self.nav.to("generate", target=target, method=method, settings=settings)

        def tune(picked: Any, name: Any) -> Updates:
            target, method, _ = picked_method(picked, name)
            tuned = tree_method(self.catalog, method, target)
            return self.nav.to("tree", method=tuned.key, target=target, benchmark=picked)

        def export(picked: Any, configuration: Any) -> Updates:
            report = self.experiments.look(read_key(picked)).results.report
            run = section_of(report, configuration).example_run
            if run is None:
                raise ConfigError("No request of this configuration is completed yet.")
            return self.nav.to("deploy", form=ExportForm(of=f"run:{run}"))

        for name, page, go in (
            ("use", "generate", use),
            ("tune", "tree", tune),
            ("deploy", "deploy", export),
        ):
            self.open_on_click(self.page_buttons[name], page, go, self.configuration)


def section_of(report: Report, name: object) -> Section:
    """The section of a configuration; by default of the one with the highest speedup."""
    own = next((one for one in report.configurations if one.name == name), None)
    return own or report.section(report.leader)


def form_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Input of `BenchmarkForm` from the values of the page's components."""
    return {
        **{name: values[name] for name in ("target", "dtype")},
        "suites": values["suites"] or [],
        "configurations": read_configurations(values["form"]),
        **FormValues.of(values["extent"]).values,
    }
