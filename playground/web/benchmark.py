"""The Benchmark page: suites on configurations, progress, tables, plots, downloads."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import gradio as gr
from pydantic import ConfigDict, Field

from engine.config import Limits, Sampling
from engine.formats import plural
from engine.safe_text import read_text
from playground.deploy import ExportForm
from playground.errors import Fault, attempt
from playground.experiments.benchmark_form import Extent, plan_of_form
from playground.experiments.cluster import Pool
from playground.experiments.compare.form import first_methods
from playground.experiments.plan import ExperimentPlan
from playground.experiments.prompts import GROUPS, in_order, items_of
from playground.experiments.report.columns import by_group
from playground.experiments.report.export import FILES
from playground.experiments.report.plots import PLOTS, report_figure
from playground.experiments.report.report import FORMULAS, Results
from playground.experiments.service import ExperimentState
from playground.host.controls import Control, FormSpec, group_of
from playground.host.request import DTYPES, FormValues, texts
from playground.runs.query import TableQuery
from playground.web.address import switch_to
from playground.web.deploy import DeployPage, Updates
from playground.web.experiment import ExperimentPage, read_key
from playground.web.forms import QUIET, RAW, SettingsForm, or_skip
from playground.web.report import cards_html, head_html, latency_html, summary_html
from playground.web.results import definitions, leads, report_table, saves, saying

if TYPE_CHECKING:
    from playground.web.runs import RunsPage

FIRST_SUITE = "quick"
FIRST_METHODS = 2
"""So many are chosen at the beginning: that which was the fastest, and one of another kind."""
MAX_PROMPT_FILE = 8_000_000


class BenchmarkPage(ExperimentPage):
    """Components and listeners of the page."""

    name = "benchmark"
    empty = (
        "No benchmark yet. Choose suites and methods, then start: plain decoding and every "
        "configuration answer each prompt in turn."
    )

    # ---- layout

    def _setup(self) -> None:
        targets = self.catalog.target_choices()
        methods = self.method_menu.drafting(targets[0][1])
        suites = self._suites()
        first = FIRST_SUITE if FIRST_SUITE in self.catalog.suites else suites[0][1]
        with gr.Group():
            self.target = gr.Dropdown(targets, value=targets[0][1], label="Target")
            self.dtype = gr.Dropdown(
                list(DTYPES), value="auto", label="dtype", elem_id="pg-benchmark-dtype"
            )
            self.suites = gr.CheckboxGroup(
                suites, value=[first], label="Suites", elem_id="pg-benchmark-suites"
            )
            self.kinds = gr.Dropdown(
                self._kinds([first]),
                value=[],
                multiselect=True,
                label="Task categories (none selected = all)",
                elem_id="pg-benchmark-kinds",
            )
            self.file = gr.UploadButton("Add a file of prompts …", file_count="multiple", size="sm")
            self.file_message = gr.HTML(padding=True, elem_id="pg-benchmark-file-message")
        with gr.Group():
            self.adder = gr.Dropdown(
                methods,
                label="Configurations besides plain decoding",
                elem_id="pg-benchmark-method",
            )
            self.add = gr.Button("Add", size="sm", elem_id="pg-benchmark-add")
        groups: list[dict[str, Any]] = []
        for key in list(dict.fromkeys(first_methods(self.catalog, methods)))[:FIRST_METHODS]:
            groups.append(self._group(key, groups))
        types = self.catalog.types.values()
        self.form = SettingsForm({"groups": groups}, elem_id="pg-benchmark-form", classes=types)
        extent = {"groups": extent_groups()}
        self.extent_form = SettingsForm(extent, elem_id="pg-benchmark-extent", classes=[Extent])
        self.fields = {name: getattr(self, name) for name in ("target", "dtype", "suites")}
        self.fields |= {"categories": self.kinds, "form": self.form.values}
        self.fields["extent"] = self.extent_form.values

    def _report(self) -> None:
        head = gr.HTML(elem_id="pg-benchmark-head")
        with gr.Row(elem_classes="pg-bar"):
            self.leads = {
                name: gr.Button(title, size="sm", elem_id=f"pg-benchmark-{name}")
                for title, name in (("Runs", "runs"), ("Tune the tree", "tune"))
            }
            self.files = {
                name: gr.Button(name, size="sm", elem_classes="pg-file") for name in FILES
            }
        summary = gr.HTML(elem_id="pg-benchmark-summary")
        kind = gr.Radio(
            [("Speedup", "speedup"), ("MAT", "mat")], value="speedup", label="By kind of task"
        )
        by_group = gr.HTML(elem_id="pg-benchmark-groups")
        choices = [(plot.title, kind) for kind, plot in PLOTS.items()]
        plot_kind = gr.Radio(choices, value="speedup", label="Plot")
        plot = gr.Plot(visible=False, show_label=False, elem_id="pg-benchmark-plot")
        with gr.Row(elem_classes="pg-bar"):
            self.configuration = gr.Dropdown(
                [], label="Configuration", elem_id="pg-benchmark-configuration"
            )
            self.leads["deploy"] = gr.Button("Deploy", size="sm", elem_id="pg-benchmark-deploy")
        latency = gr.HTML(elem_id="pg-benchmark-latency")
        differing = gr.HTML(elem_id="pg-benchmark-differing")
        with gr.Accordion("How every figure is computed", open=False):
            gr.Markdown(definitions(FORMULAS), elem_classes="pg-note")
        self.choosers = [kind, plot_kind, self.configuration]
        self.parts = [head, summary, by_group, plot, self.configuration, latency, differing]

    # ---- what to measure

    def _suites(self) -> list[tuple[str, str]]:
        return [
            (f"{suite.title} ({plural(len(items_of(suite)), 'prompt')})", key)
            for key, suite in self.experiments.suites.items()
        ]

    def _kinds(self, suites: Sequence[str]) -> list[tuple[str, str]]:
        available = self.experiments.suites
        items = [item for key in suites if key in available for item in items_of(available[key])]
        return [(GROUPS.get(kind, kind), kind) for kind in in_order(item.group for item in items)]

    def _group(self, key: Any, groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """A method as a group of the form, under a name that no other group has."""
        method = self.catalog.method(key)
        taken = {group["name"] for group in groups}
        weights = key.removeprefix("type:").removeprefix("local ").partition(" for ")[0]
        start = PurePath(weights).name
        names = (start if n == 1 else f"{start}-{n}" for n in range(1, len(taken) + 2))
        name = next(name for name in names if name not in taken)
        named = Control("name", "name", "in tables and plots", "text", name)
        title = f"{name} · {method.title}" if name != method.title else name
        group = group_of(name, title, method.config, is_open=False, note=method.summary)
        return {**group, "method": key, "fields": [asdict(named), *group["fields"]]}

    def _listen_to_setup(self) -> None:
        self.suites.change(self.list_kinds, [self.suites, self.kinds], self.kinds, **RAW)
        form = [self.form.spec, self.form.values]
        self.target.change(self.pick_target, [self.target, self.adder], self.adder, **RAW)
        self.target.change(self.keep_fitting, [self.target, *form], self.form.spec, **RAW)
        self.add.click(self.add_method, [self.adder, *form], self.form.spec, **RAW)
        added = [self.suites, self.file_message]
        self.file.upload(self.add_files, [self.file, self.suites], added, **QUIET)
        for name, button in self.files.items():
            saves(button, partial(self._file, name), [self.picker], self.message)

    def plan(self, values: Mapping[str, Any]) -> ExperimentPlan:
        return plan_of_form(self.catalog, form_of(values), self.experiments.suites)

    def extent(self, plan: ExperimentPlan, pool: Pool | None) -> str:
        how = "one at a time (concurrency 1)" if pool is None else "one at a time on each worker"
        return f"{plan.extent}, {how}."

    def list_kinds(self, suites: Any, picked: Any) -> Any:
        """The kinds of task of the ticked suites; those that are picked stay so."""
        choices = self._kinds(texts(suites))
        kinds = [kind for _, kind in choices]
        return gr.Dropdown(choices, value=[kind for kind in texts(picked) if kind in kinds])

    def add_method(self, key: Any, spec: Any, form: Any) -> Any:
        """The form with one configuration more."""

        def more() -> dict[str, Any]:
            groups = [group.model_dump() for group in FormSpec.parse(spec).groups]
            group = self._group(key, groups)
            return {"groups": [*groups, group], "values": FormValues.of(form).values}

        return or_skip(more, where="adding a method")

    def keep_fitting(self, target: Any, spec: Any, form: Any) -> Any:
        """The form without configurations that cannot run on the target; its usual ones if none."""

        def fitting() -> Any:
            menu = self.method_menu.drafting(target)
            keys = {key for _, key in menu}
            groups = [group.model_dump() for group in FormSpec.parse(spec).groups]
            kept = [group for group in groups if group["method"] in keys]
            if kept == groups:
                return gr.skip()
            for key in [] if kept else first_methods(self.catalog, menu)[:FIRST_METHODS]:
                kept.append(self._group(key, kept))
            return {"groups": kept, "values": FormValues.of(form).values}

        return or_skip(fitting, where="picking a target")

    def add_files(self, files: Any, suites: Any) -> tuple[Any, str]:
        """The suites with those of files, which are ticked; with what is wrong in a file."""
        keys, faults = texts(suites), []
        for file in map(Path, files or []):
            key = attempt(partial(self._read_file, file), where="reading a file")
            if isinstance(key, Fault):
                faults.append(key.sentence)
            elif key not in keys:
                keys.append(key)
        message = saying(Fault(" ".join(faults), expected=True)) if faults else ""
        return gr.CheckboxGroup(self._suites(), value=keys), message

    def _read_file(self, file: Path) -> str:
        return self.experiments.add_file(file.name, read_text(file, most=MAX_PROMPT_FILE))

    # ---- what was measured

    def read(self, key: str) -> ExperimentState:
        return self.experiments.look(key)

    def report(self, results: Results, *choices: Any) -> list[Any]:
        kind, plot, configuration = choices
        report = results.report
        names = [section.name for section in report.configurations]
        configuration = configuration if configuration in names else names[-1]
        return [
            head_html(results),
            summary_html(results),
            report_table(f"By kind of task: {kind}", by_group(report, kind, GROUPS)),
            gr.Plot(report_figure(report, results.requests, plot), visible=True),
            gr.Dropdown(names, value=configuration),
            latency_html(report.section(configuration)),
            cards_html(results, self.log),
        ]

    def _file(self, name: str, picked: Any) -> tuple[str, str]:
        return f"benchmark-{picked}-{name}", self.experiments.file(read_key(picked), name)

    def listen(self, tabs: gr.HTML, runs: RunsPage, tree: gr.HTML, deploy: DeployPage) -> None:
        """Take a benchmark to the Runs and Tree pages, and a configuration to the Deploy page."""

        def show_runs(picked: Any) -> Updates:
            query = TableQuery(benchmark_id=read_key(picked))
            outputs = dict(zip(runs.outputs, runs.restored(query), strict=True))
            return {tabs: switch_to("runs"), **outputs}

        def tune(picked: Any) -> Updates:
            target = self.experiments.look(read_key(picked)).results.plan.target.name
            link = {"tree": "", "method": "", "target": target, "benchmark": picked}
            rev = secrets.token_urlsafe(6)
            return {tabs: switch_to("tree"), tree: {"rev": rev, "link": link}}

        def hand_over(picked: Any, configuration: Any) -> Updates:
            report = self.experiments.look(read_key(picked)).results.report
            sections = [one for one in report.configurations if one.name == configuration]
            run = sections[0].example_run if sections else None
            if run is None:
                return {}
            return {tabs: switch_to("deploy"), **deploy.open(ExportForm(run=run))}

        picked, one = [self.picker], [self.picker, self.configuration]
        leads(self.leads["tune"], tune, picked, [tabs, tree], self.state)
        leads(self.leads["deploy"], hand_over, one, [tabs, *deploy.outputs], self.state)
        leads(self.leads["runs"], show_runs, picked, [tabs, *runs.outputs], self.state)


def extent_groups() -> list[dict[str, Any]]:
    """How much is run, and how tokens are drawn."""
    sampling = "Sampling: greedy unless changed"
    return [
        group_of("extent", "Extent", Extent()),
        group_of("limits", "Limits", Limits(max_new_tokens=128), skip=["stop", "stop_token_ids"]),
        group_of("sampling", sampling, Sampling(), is_open=False),
    ]


class ConfigurationValues(FormValues):
    """The form with the configurations: of each its name and its method's key."""

    model_config = ConfigDict(strict=False)

    groups: list[tuple[str, Any]] = Field([], max_length=64)


def form_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """What `plan_of_form` takes, from what the page's components hold."""
    form, extent = ConfigurationValues.of(values["form"]), FormValues.of(values["extent"])
    configurations = []
    for name, method in form.groups:
        settings = dict(form.values.get(name, {}))
        own = settings.pop("name", name)
        configurations.append({"method": method, "name": own, "settings": settings})
    return {
        **{name: values[name] for name in ("target", "dtype")},
        **{name: values[name] or [] for name in ("suites", "categories")},
        "configurations": configurations,
        **extent.values,
    }
