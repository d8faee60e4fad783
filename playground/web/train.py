"""The Train page: train a drafter for a target, follow its curves, use and export it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import gradio as gr

from engine.config import Settings
from engine.formats import plural
from engine.training.methods import METHODS
from engine.training.recipe import TrainSettings
from engine.training.session import SessionSettings
from playground.experiments.cluster import PoolConfig
from playground.experiments.service import Experiments
from playground.host.controls import FormValues, Group, spec_of
from playground.host.request import DTYPES
from playground.host.runner import EngineHost
from playground.training import ABOUT
from playground.training.figures import FIGURES
from playground.training.plan import KINDS, PAGE_SESSION, Budget, plan_of_form
from playground.training.service import Trainings, TrainingState
from playground.training.work import outlook
from playground.web.components import hidden_value, text_of
from playground.web.experiment import ExperimentPage, read_key
from playground.web.forms import RAW, UNQUEUED, SettingsForm, Updates
from playground.web.navigator import Navigator
from playground.web.results import HTML, show_fault_in
from playground.web.sweep import CARD

MAX_LISTED = 100
PICKED = ("target", "dtype", "method", "learn_from", "file")
"""Fields with a picker of their own; the settings form has the others."""
SOURCES = {
    "shipped": "Shipped prompts",
    "prompts": "A file of prompts",
    "runs": "Runs in the log",
}
TEXT = HTML.from_string("""
{% if text %}<h4>Written by the target</h4><pre class="pg-text" tabindex="0">{{ text }}</pre>
{% endif %}""")
Menus = Sequence[tuple[Any, Any, Any]]
"""Per page: target picker, method picker, and the function that lists a target's methods."""


class TrainPage(ExperimentPage):
    """Components and listeners of the page."""

    name = "train"
    empty = (
        "No drafter has been trained here yet. Choose a target and a kind of head: the target "
        "writes the texts, the head learns to guess them, and its speed is measured as it learns."
    )

    def __init__(
        self,
        host: EngineHost,
        experiments: Experiments,
        trainings: Trainings,
        tab: gr.Tab,
        nav: Navigator,
    ) -> None:
        self.trainings = trainings
        super().__init__(host, experiments, tab, nav)
        self.place.visible, self.start.value = False, "Start training"  # no cluster trains

    # ---- layout

    def _setup(self) -> None:
        targets = self.catalog.target_choices()
        kinds = [(title, name) for name, title in KINDS.items()]
        with gr.Group():
            self.target = gr.Dropdown(targets, label="Target")
            self.dtype = gr.Dropdown(DTYPES, label="dtype")
            self.method = gr.Dropdown(kinds, label="Kind of head", elem_id="pg-train-method")
            self.learn_from = gr.Radio(
                [(title, name) for name, title in SOURCES.items()],
                value="shipped",
                label="Learn from answers to",
                info=ABOUT["learn_from"],
            )
            self.file = gr.File(label="File of prompts", visible=False, height=120)
        classes: list[type[Settings]] = [Budget, SessionSettings, *METHODS.values()]
        spec = training_form(kinds[0][1])
        self.form = SettingsForm(spec, elem_id="pg-train-form", classes=classes)
        self.fields = {name: getattr(self, name) for name in PICKED}
        self.fields["form"] = self.form.values

    def _report(self) -> None:
        card = gr.HTML(elem_id="pg-train-card")
        with gr.Row(elem_classes="pg-bar", visible=False) as buttons:
            self.use = gr.Button("Use in Generate", variant="primary", elem_id="pg-train-use")
            self.compare = gr.Button("Compare with plain decoding")
            self.export = gr.Button("Export", elem_id="pg-train-export")
        self.download = gr.File(
            label="Drafter", interactive=False, visible=False, elem_id="pg-train-download"
        )
        with gr.Row():
            plots = [
                gr.Plot(visible=False, show_label=False, min_width=300, elem_id=f"pg-train-{name}")
                for name in FIGURES
            ]
        text = gr.HTML()
        self.drafter_list = hidden_value()
        self.report_controls = []
        self.report_outputs = [card, buttons, *plots, text, self.drafter_list]

    # ---- the form

    def _listen_to_setup(self) -> None:
        self.method.change(training_form, self.method, self.form.spec, **RAW)
        self.learn_from.change(
            lambda source: gr.File(visible=source == "prompts"), self.learn_from, self.file, **RAW
        )

    def plan(self, values: Mapping[str, Any]) -> Any:  # a TrainPlan, which no cluster runs
        form = {name: values[name] for name in PICKED}
        form["file"] = text_of(values["file"], "path") or None
        drawn_for = values["form"].get("method") if isinstance(values["form"], dict) else None
        groups = FormValues.of(values["form"]).values if drawn_for == values["method"] else {}
        return plan_of_form(self.catalog, self.log, self.trainings.corpora, form | groups)

    def extent(self, plan: Any, pool: PoolConfig | None) -> str:
        return outlook(plan, self.catalog, self.log, self.trainings.speeds)

    def estimate(self, values: Mapping[str, Any]) -> str:
        return self.extent(self.plan(values), None)

    def start_job(self, values: Mapping[str, Any]) -> str:
        return self.trainings.start(self.plan(values))

    def resume_job(self, key: str, pool: PoolConfig | None) -> None:
        self.trainings.resume(key)

    def stop_job(self, key: str) -> None:
        self.trainings.stop(key)

    # ---- a training

    def choices(self) -> list[tuple[str, str]]:
        return [(name, name) for name in self.trainings.newest()[:MAX_LISTED]]

    def read(self, key: str) -> TrainingState:
        return self.trainings.look(key)

    def report(self, state: TrainingState, *options: Any) -> list[Any]:
        figures = [draw(state.curve) for draw in FIGURES.values()]
        plots = [gr.Plot(one, visible=bool(one.data)) for one in figures]
        buttons = gr.Row(visible=state.card is not None)
        text = TEXT.render(text=state.progress.text)
        return [card_html(state), buttons, *plots, text, self._trained_drafters()]

    def _trained_drafters(self) -> dict[str, Any]:
        """Names of the trained drafters, which are entries of the method menus."""
        return {"known": [name for name in self.trainings.newest() if name in self.catalog.presets]}

    # ---- links to other pages

    def _listen_to_links(self) -> None:
        """Open a drafter on Generate or Compare, or export it."""

        def open_on(page: str, picked: Any) -> Updates:
            target, method = self.trainings.method(read_key(picked))
            return self.nav.to(page, target=target, method=method, settings={})

        @show_fault_in(self.state, where="exporting a drafter")
        def save(picked: Any) -> Updates:
            into = Path(self.download.GRADIO_CACHE) / "drafters"
            file = self.trainings.export(read_key(picked), into)
            return {self.download: gr.File(str(file), visible=True)}

        for button, page in ((self.use, "generate"), (self.compare, "compare")):
            self.open_on_click(button, page, partial(open_on, page))
        self.export.click(save, self.picker, [self.state, self.download], **RAW)
        self.picker.change(lambda: gr.File(visible=False), None, self.download, **RAW)

    def list_in(self, page: gr.Blocks, menus: Menus) -> None:
        """List the trained drafters in the pages' menus."""

        def update_menus(*targets: Any) -> list[Any]:
            listed = zip(menus, targets, strict=True)
            return [gr.update(choices=menu(target)) for (_, _, menu), target in listed]

        targets, pickers = [one[0] for one in menus], [one[1] for one in menus]
        self.drafter_list.change(update_menus, targets, pickers, **RAW)
        page.load(self._trained_drafters, None, self.drafter_list, **UNQUEUED)


def training_form(method: Any) -> dict[str, Any]:
    """The form of a training's settings."""
    name = method if isinstance(method, str) and method in METHODS else next(iter(KINDS))
    recipe: TrainSettings = METHODS[name]()
    return spec_of(
        Group.of("budget", "Budget", Budget()),
        Group.of("training", "Training", recipe, open=False, skip=["begin_with"]),
        Group.of("session", "Measuring", PAGE_SESSION, open=False),
        method=method,
    )


def card_html(state: TrainingState) -> str:
    """The newest figures of a training, and what it was trained on."""
    plan, now, curve, card = state.plan, state.progress, state.curve, state.card
    measured, losses = curve.get("measured", ()), curve.get("loss", ())
    figures: list[tuple[str, str, str, str]] = []
    if measured:
        last = measured[-1]
        figures.append(("mat", "MAT", f"{last['mat']:.2f}", MAT))
        if last["speedup"] is not None:
            figures.append(("speedup", "speedup", f"{last['speedup']:.2f}×", SPEEDUP))
    if losses:
        loss, minutes = f"{losses[-1]['loss']:.3f}", f"{losses[-1]['seconds'] / 60:.1f} min"
        figures.append(("loss", "loss", loss, "mean of the last steps"))
        figures.append(("minutes", "training", minutes, "without measuring"))
    if now.corpus_tokens:
        size = f"{now.corpus_tokens:,}"
        figures.append(("tokens", "tokens of text", size, "prompts and answers"))
    remark = ""
    if card is not None:
        remark = (
            f"{card.num_parameters:,} parameters; {plural(card.num_dialogues, 'dialogue')}, "
            f"{card.num_tokens_read:,.0f} tokens read. {state.where}"
        )
    point = f"for {plan.target.title or plan.target.name}"
    return CARD.render(title=KINDS[plan.method], point=point, figures=figures, remark=remark)


MAT = "1 + accepted draft tokens / steps, on held-out texts, with the tree of its card"
SPEEDUP = "tok/s over plain decoding's on the same held-out prompts, drafting as much as pays"
