"""The Sweep page: choose what varies, watch the trials, take the best settings along."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import gradio as gr
from pydantic import Field

from engine.config import Settings
from engine.errors import ConfigError
from engine.formats import plural
from engine.safe_text import file_name
from playground.errors import Fault, attempt
from playground.experiments.cluster import Pool
from playground.experiments.job import Job, time_left
from playground.experiments.space import Tunable, setting_text, tunables_of
from playground.experiments.sweep.plan import OBJECTIVES, SweepForm, SweepPlan, plan_of_form
from playground.experiments.sweep.plots import NOTES, sweep_figure
from playground.experiments.sweep.report import (
    FORMULAS,
    changed_settings,
    figure_text,
    preset_yaml,
    standing_of,
    state_of,
    trial_columns,
    trial_table,
)
from playground.experiments.sweep.store import StoredSweep
from playground.host.controls import Control, group_of
from playground.host.request import DTYPES, FormValues, texts
from playground.web.address import switch_to
from playground.web.experiment import ExperimentPage, Standing, read_key
from playground.web.forms import RAW, SettingsForm
from playground.web.generate import GeneratePage
from playground.web.results import HTML, definitions, saves, saying, table_html

DOUBLING, BEST = "log", "best"
MORE_TRIALS = 10
MAX_LISTED = 200
CONFIRM = """(picked, ...values) =>
  [confirm("Forget this sweep? Its runs stay in the log.") ? picked : null, ...values]"""
STATUS_TEXTS = {
    "running": "running",
    "completed": "done",
    "cancelled": "stopped",
    "failed": "failed",
    "interrupted": "interrupted: its process died",
}
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


FORM = SweepForm(target="", dtype="", method="", vary=[""])
PICKED = ("target", "dtype", "method", "objective", "suite")
"""What has a picker of its own; the plan's form draws the rest."""


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
        titles = [(title, key) for key, (title, _) in OBJECTIVES.items()]
        suites = [(suite.title, name) for name, suite in self.catalog.suites.items()]
        suite = SweepForm.model_fields["suite"].default
        suite = suite if suite in self.catalog.suites else suites[0][1]
        with gr.Group():
            self.target = gr.Dropdown(targets, value=targets[0][1], label="Target")
            self.method = gr.Dropdown(
                methods, value=first, label="Method", elem_id="pg-sweep-method"
            )
            self.suite = gr.Dropdown(suites, value=suite, label="Prompts")
            with gr.Row():
                self.objective = gr.Dropdown(titles, value="tok_s", label="Maximise", min_width=90)
                self.dtype = gr.Dropdown(list(DTYPES), value="auto", label="dtype", min_width=90)
            tunables, varied = self._tunables(first)
            self.vary = gr.CheckboxGroup(
                tunables, value=varied, label="Settings to vary", elem_id="pg-sweep-vary"
            )
        types = self.catalog.types.values()
        drawn = self._drawn(first, varied)
        self.form = SettingsForm(drawn, elem_id="pg-sweep-form", classes=types)
        group = group_of("plan", "Plan", FORM, skip=(*PICKED, "settings", "vary"))
        self.plan_form = SettingsForm({"groups": [group]}, elem_id="pg-sweep-plan")
        self.fields = {name: getattr(self, name) for name in (*PICKED, "vary")}
        self.fields |= {"form": self.form.values, "plan": self.plan_form.values}

    def _report(self) -> None:
        card = gr.HTML(elem_id="pg-sweep-card")
        with gr.Row(elem_classes="pg-bar"):
            self.trial = gr.Dropdown(
                [BEST], value=BEST, label="trial", container=False, elem_id="pg-sweep-trial"
            )
            self.use = gr.Button("Use in Generate", variant="primary", elem_id="pg-sweep-use")
            self.export = gr.Button("Export YAML", elem_id="pg-sweep-export")
            self.forget = gr.Button("Forget", elem_id="pg-sweep-forget")
        table = gr.HTML(elem_id="pg-sweep-trials")
        plot_kind = gr.Radio(list(NOTES), value="history", label="Plot")
        self.note = gr.HTML(elem_id="pg-sweep-note")
        plot = gr.Plot(show_label=False, elem_id="pg-sweep-plot")
        with gr.Accordion("How every figure is computed", open=False):
            gr.Markdown(definitions(FORMULAS), elem_classes="pg-note")
        self.choosers = [self.trial, plot_kind]
        self.parts = [card, self.trial, table, self.note, plot]

    # ---- what to sweep

    def _tunables(self, key: Any) -> tuple[list[tuple[str, str]], list[str]]:
        """The settings that can vary, label and name; the first that has a range to start from."""
        tunables = tunables_of(self.catalog.method(key).config)
        return [(k.label, k.field) for k in tunables], [k.field for k in tunables if k.suggested][
            :1
        ]

    def _drawn(self, key: Any, varied: Sequence[str], values: Any = None) -> dict[str, Any]:
        """The form of a method's settings: a range of what varies, a value of the rest."""
        method = self.catalog.method(key)
        tunables = {tunable.field: tunable for tunable in tunables_of(method.config)}
        groups = [
            {
                "name": f"vary {name}",
                "title": tunables[name].label,
                "open": True,
                "fields": range_of(tunables[name]),
            }
            for name in varied
            if name in tunables
        ]
        title, note = "Fixed settings", method.summary
        fixed = group_of("settings", title, method.config, is_open=False, note=note, skip=varied)
        return {"method": key, "values": values or {}, "groups": [*groups, fixed]}

    def _listen_to_setup(self) -> None:
        self.target.change(self.pick_target, [self.target, self.method], self.method, **RAW)
        self.method.change(self.pick_method, self.method, [self.vary, self.form.spec], **RAW)
        drawn = [self.method, self.vary, self.form.values]
        self.vary.input(self.pick_varied, drawn, self.form.spec, **RAW)
        saves(self.export, self.file_of, [self.picker, self.trial], self.message)

    def _listen(self, tab: gr.Tab) -> None:
        super()._listen(tab)
        forgets = self.acting(lambda key: self.experiments.sweeps.delete(key), gone=True)
        self.forget.click(forgets, self.inputs, self.outputs, js=CONFIRM, **RAW)

    def plan(self, values: Mapping[str, Any]) -> SweepPlan:
        return plan_of_form(self.catalog, form_of(values))

    def extent(self, plan: SweepPlan, pool: Pool | None) -> str:
        points = plan.space.num_points
        many = "Any number of combinations" if points is None else plural(points, "combination")
        return (
            f"{many}; {plural(plan.num_trials, 'trial')}, each with "
            f"{plural(plan.num_turns, 'answer')} by the method and the same by plain decoding."
        )

    def pick_method(self, key: Any) -> Any:
        def read() -> tuple[Any, Any]:
            tunables, varied = self._tunables(key)
            return gr.CheckboxGroup(tunables, value=varied), self._drawn(key, varied)

        drawn = attempt(read, where="picking a method")
        return (gr.skip(), gr.skip()) if isinstance(drawn, Fault) else drawn

    def pick_varied(self, key: Any, varied: Any, form: Any) -> Any:
        drawn = attempt(
            lambda: self._drawn(key, texts(varied), FormValues.of(form).values),
            where="choosing what varies",
        )
        return gr.skip() if isinstance(drawn, Fault) else drawn

    # ---- its results

    def choices(self) -> list[tuple[str, str]]:
        return [
            (f"{head.name} · {STATUS_TEXTS[head.status].split(':')[0]}", head.id)
            for head in self.experiments.sweeps.heads()[:MAX_LISTED]
        ]

    def standing(self, key: str) -> Standing:
        sweep = self.experiments.sweeps.load(key)
        state, job = state_of(sweep), self.experiments.job(sweep.row.id)
        done, planned, status = state["num_done"], state["num_trials"], state["status"]
        can_go_on = status != "running" and (status != "completed" or state["more_to_try"])
        more = "More trials" if status == "completed" else "Resume"
        return Standing(
            (sweep, state),
            zlib.crc32(repr(state).encode()),
            status,
            state_text(state, job),
            resume=more if can_go_on else "",
            here=job is not None,
            share=done / planned if status == "running" and planned else None,
            error=state["fault"],
            job=job,
        )

    def report(self, results: tuple[StoredSweep, Mapping[str, Any]], *choices: Any) -> list[Any]:
        (sweep, state), (trial, kind) = results, choices
        numbers = [str(row["number"]) for row in state["trials"]]
        trial = trial if trial in numbers else BEST
        number = state["best"] if trial == BEST else int(trial)
        row = next((row for row in state["trials"] if row["number"] == number), None)
        drawn = attempt(lambda: sweep_figure(sweep, kind), where="drawing a plot")
        return [
            "" if row is None else card_html(state, row),
            gr.Dropdown([BEST, *numbers], value=trial),
            table_html("Trials", *trial_table(state), best=str(state["best"])),
            saying(drawn if isinstance(drawn, Fault) else NOTES[kind]),
            None if isinstance(drawn, Fault) else drawn,
        ]

    def go_on(self, key: str, pool: Pool | None) -> None:
        """Resume a sweep; one that is done gets more trials."""
        state = state_of(self.experiments.sweeps.load(key))
        more = state["num_trials"] + MORE_TRIALS if state["status"] == "completed" else None
        self.experiments.resume(key, pool, more)

    def file_of(self, picked: Any, trial: Any) -> tuple[str, str]:
        sweep = self.experiments.sweeps.load(read_key(picked))
        return f"{file_name(sweep.row.name)}.yaml", preset_yaml(sweep, number_of(trial))

    def listen(self, tabs: gr.HTML, generate: GeneratePage) -> None:
        """Take a trial to the Generate page."""

        def use(picked: Any, trial: Any) -> list[Any]:
            def fill() -> tuple[Any, ...]:
                sweep = self.experiments.sweeps.load(read_key(picked))
                method = sweep.plan.swept.name
                base = self.catalog.method(method).config
                settings = changed_settings(sweep, base, number_of(trial))
                return generate.take(sweep.plan.target.name, method, settings)

            filled = attempt(fill, where="using a trial")
            if isinstance(filled, Fault):
                return [saying(filled), *[gr.skip()] * 4]
            return ["", switch_to("generate"), *filled]

        outputs = [self.note, tabs, generate.target, generate.method, generate.form.spec]
        self.use.click(use, [self.picker, self.trial], outputs, **RAW)


def range_of(tunable: Tunable) -> list[dict[str, Any]]:
    """Controls of what a setting varies over: a range, some of its values, or a list."""
    low, high = tunable.suggested or (tunable.low, tunable.high)
    if tunable.choices:
        choices = tuple(setting_text(choice) for choice in tunable.choices)
        made = [Control("values", "values", tunable.help, "ticks", list(choices), choices=choices)]
    elif tunable.kind == "text" or low is None or high is None:
        made = [Control("list", "list", f"{tunable.help}; comma-separated", "text", "")]
    else:
        help = f"empty = steps of 1, or any value; {DOUBLING} = 1, 2, 4, 8"
        made = [
            Control("from", "from", "", "number", low),
            Control("to", "to", "", "number", high),
            Control("step", "step", help, "text", ""),
        ]
    return [asdict(control) for control in made]


class Varied(Settings):
    """Which settings are ticked."""

    vary: list[str] = Field(max_length=100)


def form_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """What `plan_of_form` takes, from what the page's components hold."""
    plan, form = (FormValues.of(values[name]).values for name in ("plan", "form"))
    varied = Varied.parse({"vary": values["vary"] or []}).vary
    return {
        **plan.get("plan", {}),
        **{name: values[name] for name in PICKED},
        "settings": {k: v for k, v in form.get("settings", {}).items() if k not in varied},
        "vary": [written(name, form.get(f"vary {name}", {})) for name in varied],
    }


def written(name: str, over: Mapping[str, Any]) -> str:
    """A range or list as the command line writes it."""
    if "from" in over:
        step = str(over.get("step") or "").strip()
        return f"{name}={over['from']}:{over.get('to')}" + (f":{step}" if step else "")
    values = over.get("values") or str(over.get("list", "")).split(",")
    return f"{name}={','.join(map(str, values if isinstance(values, list) else [values]))}"


def number_of(trial: object) -> int | None:
    """Number of a trial; None for the best. Raises ConfigError: it is none."""
    if trial in (None, BEST):
        return None
    if not isinstance(trial, str) or not trial.isdecimal() or len(trial) > 9:
        raise ConfigError(f"trial must be its number, or {BEST}, got {trial!r:.60}.")
    return int(trial)


def state_text(state: Mapping[str, Any], job: Job | None) -> str:
    """Where a sweep is."""
    parts = [f"{state['num_done']} of {state['num_trials']} trials"]
    if job is None:
        parts.append(STATUS_TEXTS[state["status"]])
    else:
        parts += [time_left(job.progress.eta_s) if job.progress else "", job.message]
    return " · ".join(filter(None, parts))


def card_html(state: Mapping[str, Any], trial: Mapping[str, Any]) -> str:
    """The picked trial: its settings, figures, and a remark."""
    is_best = trial["number"] == state["best"]
    remark = state["verdict"] if is_best else ""
    if trial["reason"]:
        remark = f"{standing_of(state, trial)}: {trial['reason']}"
    elif trial["number"] in state["as_good"]:
        remark = f"As good as the best: {FORMULAS['as_good']}."
    return CARD.render(
        title=f"Best: trial {trial['number']}" if is_best else f"Trial {trial['number']}",
        point=", ".join(
            f"{name} {setting_text(trial['point'].get(name))}" for name in state["fields"]
        ),
        figures=[
            (name, title, figure_text(state, trial, name), formula)
            for name, title, formula in trial_columns(state)
        ],
        remark=f"{state['about']}. {remark}",
    )
