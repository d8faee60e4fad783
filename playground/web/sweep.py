"""The Sweep page: choose settings to vary, follow the trials, use the best settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args

import gradio as gr

from engine.formats import plural
from playground.errors import Fault, attempt
from playground.experiments.cluster import PoolConfig
from playground.experiments.forms import SweepExtent, SweepForm
from playground.experiments.plan import SweepPlan
from playground.experiments.report.columns import COLUMNS
from playground.experiments.service import ExperimentState
from playground.experiments.space import Objective, point_text, suggested_range, tunables_of
from playground.experiments.sweep.plots import NOTES, sweep_figure
from playground.experiments.sweep.report import AS_GOOD, BEST, SweepResults
from playground.experiments.sweep.trials import Trial
from playground.host.controls import Control, FormValues, Group, spec_of
from playground.host.request import DTYPES, texts
from playground.web.experiment import ExperimentPage, read_key
from playground.web.forms import RAW, RAW_LATEST, SettingsForm, Updates, skip_on_fault
from playground.web.results import HTML, sentence_html, table_html

RANGE = "low:high, low:high:step, low:high:log (1, 2, 4, 8), or values separated by commas"
CARD = HTML.from_string("""
<div class="pg-card"><h3>{{ title }}</h3>
<p class="headline">{{ point }}</p>
<p class="figures">
{% for name, title, text, formula in figures %}
  <span><b data-figure="{{ name }}">{{ text }}</b> {{ title | term(formula) }}</span>
{% endfor %}
</p>
<p class="remark">{{ remark }}</p></div>
""")
PICKED = ("target", "dtype", "method", "objective", "suite")
"""Fields with a picker of their own; the form of the plan has the others."""


class SweepPage(ExperimentPage):
    """Components and listeners of the page."""

    name = "sweep"
    empty = "No sweeps yet. Tick the settings to vary and start one."

    # ---- layout

    def _setup(self) -> None:
        targets = self.catalog.target_choices()
        methods = self.method_menu.drafting(targets[0][1])
        fastest, keys = self.catalog.first_method(targets[0][1], alone=True), dict(methods).values()
        first = fastest if fastest in keys else methods[0][1]
        titles = [(COLUMNS[key].title, key) for key in get_args(Objective)]
        suites = [(suite.title, name) for name, suite in self.catalog.suites.items()]
        suite = SweepForm.model_fields["suite"].default
        suite = suite if suite in self.catalog.suites else suites[0][1]
        with gr.Group():
            self.target = gr.Dropdown(targets, label="Target")
            self.method = gr.Dropdown(
                methods, value=first, label="Method", elem_id="pg-sweep-method"
            )
            self.suite = gr.Dropdown(suites, value=suite, label="Prompts")
            with gr.Row():
                self.objective = gr.Dropdown(titles, label="Maximise", min_width=90)
                self.dtype = gr.Dropdown(DTYPES, label="dtype", min_width=90)
            tunables, varied = self._tunables(first)
            self.vary = gr.CheckboxGroup(
                tunables, value=varied, label="Settings to vary", elem_id="pg-sweep-vary"
            )
        types = self.catalog.types.values()
        drawn = self._form_spec(first, varied)
        self.form = SettingsForm(drawn, elem_id="pg-sweep-form", classes=types)
        spec = spec_of(Group.of("plan", "Plan", SweepExtent(), skip=["objective"]))
        self.plan_form = SettingsForm(spec, elem_id="pg-sweep-plan", classes=[SweepExtent])
        self.fields = {name: getattr(self, name) for name in (*PICKED, "vary")}
        self.fields |= {"form": self.form.values, "plan": self.plan_form.values}

    def _report(self) -> None:
        card = gr.HTML(elem_id="pg-sweep-card")
        with gr.Row(elem_classes="pg-bar"):
            self.trial = gr.Dropdown(
                [BEST], label="trial", container=False, elem_id="pg-sweep-trial"
            )
            self.use = gr.Button("Use in Generate", variant="primary", elem_id="pg-sweep-use")
        table = gr.HTML(elem_id="pg-sweep-trials")
        plot_kind = gr.Radio(list(NOTES), value="history", label="Plot")
        self.note = gr.HTML(elem_id="pg-sweep-note")
        plot = gr.Plot(show_label=False, elem_id="pg-sweep-plot")
        self.report_controls = [self.trial, plot_kind]
        self.report_outputs = [card, self.trial, table, self.note, plot]

    # ---- the form

    def _tunables(self, key: Any) -> tuple[list[tuple[str, str]], list[str]]:
        """Labels and names of the settings that can vary; names of those varied at the start."""
        config = self.catalog.method(key).config
        tunables = tunables_of(config)
        numbers = [one for one in tunables if one.is_number]
        varied = [n.name for n in numbers if suggested_range(n, getattr(config, n.name))]
        return [(label_of(one), one.name) for one in tunables], varied[:1]

    def _form_spec(self, key: Any, varied: Sequence[str], values: Any = None) -> dict[str, Any]:
        """The form of a method's settings: ranges of the varied ones, values of the others."""
        method = self.catalog.method(key)
        config = method.config
        ranges = [one for one in tunables_of(config) if one.name in varied]
        vary = Group(
            name="vary",
            title="Ranges",
            texts={one.name: (label_of(one), RANGE) for one in ranges},
            values={one.name: suggested_range(one, getattr(config, one.name)) for one in ranges},
        )
        title, note = "Fixed settings", method.description
        fixed = Group.of("settings", title, config, open=False, note=note, skip=varied)
        return spec_of(*[vary] * bool(ranges), fixed, values=values, method=key)

    def _listen_to_setup(self) -> None:
        self.target.change(self.pick_target, [self.target, self.method], self.method, **RAW)
        self.method.change(self.pick_method, self.method, [self.vary, self.form.spec], **RAW)
        drawn = [self.method, self.vary, self.form.values]
        self.vary.input(self.pick_varied, drawn, self.form.spec, **RAW_LATEST)
        self.nav.link_tree(self.form, self.target)

    def plan(self, values: Mapping[str, Any]) -> SweepPlan:
        return SweepForm.parse(form_of(values)).plan(self.catalog)

    def extent(self, plan: SweepPlan, pool: PoolConfig | None) -> str:
        points = plan.space.num_points
        many = "Any number of combinations" if points is None else plural(points, "combination")
        log_values = plan.space.log_values(search=plan.chooser.mode == "search")
        return (
            f"{many}; {plural(plan.num_trials, 'trial')}, each with "
            f"{plural(plan.num_turns, 'answer')} by the method and the same by plain decoding."
            f"{log_values}"
        )

    @skip_on_fault("picking a method")
    def pick_method(self, key: Any) -> tuple[Any, Any]:
        tunables, varied = self._tunables(key)
        return gr.CheckboxGroup(tunables, value=varied), self._form_spec(key, varied)

    @skip_on_fault("choosing what varies")
    def pick_varied(self, key: Any, varied: Any, form: Any) -> dict[str, Any]:
        return self._form_spec(key, texts(varied), FormValues.of(form).values)

    # ---- the report

    def read(self, key: str) -> ExperimentState:
        return self.experiments.look(key, sweep=True)

    def report(self, state: ExperimentState, *options: Any) -> list[Any]:
        trial, kind = options
        results: SweepResults = state.results
        numbers = [str(one.number) for one in results.trials]
        trial = trial if trial in numbers else BEST
        picked = results.best if trial == BEST else results.trial(trial)
        drawn = attempt(lambda: sweep_figure(results, kind), where="drawing a plot")
        best = None if results.best is None else str(results.best.number)
        return [
            "" if picked is None else card_html(results, picked),
            gr.Dropdown([BEST, *numbers], value=trial),
            table_html("Trials", *results.table(), best=best),
            sentence_html(drawn if isinstance(drawn, Fault) else NOTES[kind]),
            None if isinstance(drawn, Fault) else drawn,
        ]

    def _listen_to_links(self) -> None:
        """Open a trial's settings on the Generate page."""

        def use(picked: Any, trial: Any) -> Updates:
            results = self.read(read_key(picked)).results
            plan, config = results.plan, results.config(trial or BEST)
            settings, method = config.model_dump(exclude={"decoding_type"}), plan.swept.name
            target = plan.target.name
            return self.nav.to("generate", target=target, method=method, settings=settings)

        self.open_on_click(self.use, "generate", use, self.trial)


def label_of(tunable: Control) -> str:
    """Its title and its name."""
    return f"{tunable.label} ({tunable.name})"


def form_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Input of `SweepForm` from the values of the page's components."""
    plan, form = (FormValues.of(values[name]).values for name in ("plan", "form"))
    varied, ranges = texts(values["vary"] or []), form.get("vary", {})
    return {
        **plan.get("plan", {}),
        **{name: values[name] for name in PICKED},
        "settings": {k: v for k, v in form.get("settings", {}).items() if k not in varied},
        "vary": [f"{name}={ranges.get(name, '')}" for name in varied],
    }


def card_html(results: SweepResults, trial: Trial) -> str:
    """A trial: its settings, all its figures, and a remark."""
    is_best = trial is results.best
    remark = results.report.headline if is_best else ""
    if reason := results.reason(trial):
        remark = f"{results.result_text(trial)}: {reason}"
    elif trial.number in results.ties:
        remark = f"As good as the best: {AS_GOOD}."
    return CARD.render(
        title=f"Best: trial {trial.number}" if is_best else f"Trial {trial.number}",
        point=point_text(trial.point),
        figures=[
            (name, column.title, trial.cell(column).line, column.formula)
            for name, column in COLUMNS.items()
        ],
        remark=f"{results.plan.about}. {remark}",
    )
