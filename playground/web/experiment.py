"""Base of the Benchmark, Sweep and Train pages: start, select, follow, stop and resume a job."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import gradio as gr

from engine.errors import ConfigError
from playground.errors import Fault, attempt
from playground.experiments.cluster import PoolConfig
from playground.experiments.experiment import Experiment
from playground.experiments.fastest import newest_tok_s
from playground.experiments.plan import ExperimentPlan
from playground.experiments.service import Experiments
from playground.host.runner import EngineHost
from playground.host.task import TaskState, approximate_duration
from playground.web.address import address_js
from playground.web.components import hidden_value
from playground.web.forms import RAW, RAW_LATEST, Listener, Updates, dropdown_of, skip_on_fault
from playground.web.navigator import Navigator
from playground.web.results import sentence_html, show_fault_in, state_html, table_html

MAX_KEY, MAX_WORKERS = 100, 1000
STATUS = {"completed": "done", "cancelled": "stopped"}
PLACES = {"local": "Ray on this machine"}
WORKERS = {"worker": "machine and process id", "device": "", "measures": ""}


def state_of(now: TaskState) -> str:
    """The status of a job as HTML, with the workers that measure it."""
    head = state_html(now.status, now.text, share=now.share, error=now.error)
    if not isinstance(now.task, Experiment):
        return head
    rows, refused = now.task.workers(), "".join(map(sentence_html, now.task.worker_rejections))
    return head + (table_html("Workers", WORKERS, rows) if rows else "") + refused


class ExperimentPage(ABC):
    """A form that starts jobs; a picker of jobs; status and report of the selected one.

    Attributes:
        name: of its tab, and of its parameter in the page's address.
        fields: components of the form by name.
        report_outputs: components of the report.
        report_controls: those of them that select what the report shows.
    """

    name: ClassVar[str]
    empty: ClassVar[str]
    fields: dict[str, Any]
    report_outputs: list[Any]
    report_controls: list[Any]

    def __init__(
        self, host: EngineHost, experiments: Experiments, tab: gr.Tab, nav: Navigator
    ) -> None:
        self.host, self.catalog, self.method_menu, self.nav = host, host.catalog, host.menu, nav
        self.experiments, self.log = experiments, host.log
        with gr.Row(equal_height=False, elem_id=f"pg-{self.name}"):
            with gr.Column(scale=1, elem_classes="pg-side"):
                self._setup()
                self._start_controls()
            with gr.Column(scale=4, elem_classes="pg-main"):
                self._report_bar()
                report_id = f"pg-{self.name}-report"
                with gr.Column(visible=False, elem_id=report_id) as self.report_column:
                    self._report()
        self._listen_to_setup()
        self._listen(tab)
        self._listen_to_links()

    # ---- what each page defines

    @abstractmethod
    def _setup(self) -> None:
        """Lay out the form."""

    @abstractmethod
    def _listen_to_setup(self) -> None:
        """Connect the components of the form to each other."""

    @abstractmethod
    def _listen_to_links(self) -> None:
        """Let buttons of the report open other pages."""

    @abstractmethod
    def _report(self) -> None:
        """Lay out the report."""

    @abstractmethod
    def read(self, key: str) -> TaskState:
        """The state of a job. Raises ConfigError: there is none with this key."""

    @abstractmethod
    def report(self, state: Any, *options: Any) -> list[Any]:
        """Values of `report_outputs` for what `read` returned; `options` are the values of
        `report_controls`."""

    @abstractmethod
    def plan(self, values: Mapping[str, Any]) -> ExperimentPlan:
        """The plan that the form describes. Raises ConfigError: it cannot be run."""

    @abstractmethod
    def extent(self, plan: Any, pool: PoolConfig | None) -> str:
        """A sentence on how much a plan would run."""

    def choices(self) -> list[tuple[str, str]]:
        """Titles and keys of the jobs, newest first."""
        titles = []
        for one in self.experiments.newest(sweeps=self.name == "sweep"):
            status = STATUS.get(one.status, one.status)
            when = f"{one.created_at.astimezone():%d %b %H:%M}"
            titles.append((f"{one.name} · {status} · {when}", one.id))
        return titles

    def stop_job(self, key: str) -> None:
        """Stop a job."""
        self.experiments.stop(key)

    def resume_job(self, key: str, pool: PoolConfig | None) -> None:
        """Resume a job; `pool`: the workers, None = this process."""
        self.experiments.resume(key, pool)

    def estimate(self, values: Mapping[str, Any]) -> str:
        """How much the form would run, and the longest time it takes. Raises ConfigError."""
        plan = self.plan(values)
        extent = self.extent(plan, self.pool(values["place"], values["workers"]))
        tok_s = newest_tok_s(self.log, plan.target.name)
        if not tok_s:
            return extent
        duration = approximate_duration(plan.num_requests * plan.limits.max_new_tokens / tok_s)
        return f"{extent} {duration.capitalize()} if every answer reaches its maximum length."

    def start_job(self, values: Mapping[str, Any]) -> str:
        """Start the plan that the form describes, and return the job's key."""
        pool = self.pool(values["place"], values["workers"])
        return self.experiments.start(self.plan(values), pool=pool).id

    @skip_on_fault("listing the methods")
    def pick_target(self, target: Any, method: Any) -> Any:
        """An update of the method picker for another target."""
        return dropdown_of(self.method_menu.drafting(target), method)

    # ---- layout

    def _start_controls(self) -> None:
        """Below the form: where to run it, and the button that starts it."""
        self.clusters = self.catalog.clusters
        places = [("This process", ""), *((PLACES.get(a, f"Ray at {a}"), a) for a in self.clusters)]
        self.place = gr.Dropdown(places, label="Run on", elem_id=f"pg-{self.name}-place")
        self.num_workers = gr.Number(
            None,
            label="Workers",
            info="empty = as many as fit",
            precision=0,
            visible=False,
            elem_id=f"pg-{self.name}-workers",
        )
        self.fields |= {"place": self.place, "workers": self.num_workers}
        self.message = gr.HTML(elem_id=f"pg-{self.name}-outlook")
        self.start = gr.Button(
            f"Start {self.name}", variant="primary", elem_id=f"pg-{self.name}-start"
        )

    def _report_bar(self) -> None:
        """Above the report: the picker of jobs, Stop, Resume and the status."""
        with gr.Row(elem_classes="pg-bar"):
            self.picker = gr.Dropdown(
                [],
                label=self.name,
                container=False,
                scale=3,
                visible="hidden",  # until there is a choice
                elem_id=f"pg-{self.name}-picker",
            )
            self.stop = gr.Button("Stop", visible=False, elem_id=f"pg-{self.name}-stop")
            self.resume = gr.Button("Resume", visible=False, elem_id=f"pg-{self.name}-resume")
        self.state = gr.HTML(state_html("", self.empty), elem_id=f"pg-{self.name}-state")
        self.timer = gr.Timer(1, active=False)
        self.shown_version = hidden_value()

    # ---- listeners

    def _listen(self, tab: gr.Tab) -> None:
        fields = list(self.fields.values())
        # One listener, so that the answer to an earlier value never comes last.
        changes = [field.change for field in fields]
        gr.on(changes, self._check_form, fields, [self.message, self.start], **RAW_LATEST)

        @show_fault_in(self.message, where=f"starting a {self.name}")
        def start(*values: Any) -> Updates:
            return {self.picker: self.menu(self.start_job(self._values(values)))}

        self.start.click(start, fields, [self.message, self.picker], **RAW)
        self.outputs = [self.state, self.stop, self.resume, self.timer, self.report_column]
        self.outputs += [self.picker, self.shown_version, *self.report_outputs]
        self.inputs = [self.picker, *self.report_controls, self.shown_version]
        tab.select(self._select, self.inputs, self.outputs, **RAW)
        events = [self.timer.tick, self.picker.change]
        events += [component.input for component in self.report_controls]
        for event in events:
            event(self.refresh, self.inputs, self.outputs, **RAW_LATEST)
        self.picker.change(None, self.picker, None, js=address_js(self.name, self.name), **RAW)
        self.stop.click(self.on_picked(self.stop_job), self.inputs, self.outputs, **RAW)

        def resume(place: Any, num_workers: Any, *values: Any) -> Updates:
            act = self.on_picked(lambda key: self.resume_job(key, self.pool(place, num_workers)))
            return act(*values)

        placed = [self.place, self.num_workers]
        self.resume.click(resume, [*placed, *self.inputs], self.outputs, **RAW)
        shows = lambda place: gr.Number(visible=bool(place))  # noqa: E731
        self.place.change(shows, self.place, self.num_workers, **RAW)

    def pool(self, place: Any, num_workers: Any) -> PoolConfig | None:
        """The chosen workers; None = this process.

        Raises ConfigError: the page does not offer this cluster, or not so many workers.
        """
        if not place:
            return None
        if not isinstance(place, str) or place not in self.clusters:
            raise ConfigError(
                f"Run on must be this machine or Ray at one of {', '.join(self.clusters)}, got "
                f"{place!r:.60}. Start the server with --ray ADDRESS to offer another cluster."
            )
        is_count = isinstance(num_workers, int) and 1 <= num_workers <= MAX_WORKERS
        if num_workers is not None and not is_count:
            raise ConfigError(f"Workers must be in [1, {MAX_WORKERS}], got {num_workers!r:.40}.")
        return PoolConfig(place, num_workers)

    def _check_form(self, *values: Any) -> tuple[Any, Any]:
        """What the form would run, or why it cannot; and whether it can be started."""
        form_values = self._values(values)
        form, method = form_values.get("form"), form_values.get("method")
        if method and isinstance(form, dict) and form.get("method") not in (None, method):
            return gr.skip(), gr.skip()  # the method has changed, its form has not yet
        message = attempt(lambda: self.estimate(form_values), where=f"checking a {self.name}")
        return sentence_html(message), gr.Button(interactive=not isinstance(message, Fault))

    def _values(self, values: Sequence[Any]) -> dict[str, Any]:
        """The values of the form's components by name."""
        return dict(zip(self.fields, values, strict=True))

    def open_on_click(self, button: gr.Button, page: str, go: Listener, *inputs: Any) -> None:
        """Let a button open a page, by `go` of the selected job; the status says why it cannot."""
        go = show_fault_in(self.state, where="opening another page")(go)
        self.nav.link(button.click, [page], go, [self.picker, *inputs], self.state)

    def menu(self, picked: str | None) -> Any:
        """The picker's choices; also the key of a link to an experiment that is not in the log."""
        choices = self.choices()
        if picked and picked not in [key for _, key in choices]:
            choices.append((picked, picked))
        if not choices:
            return gr.Dropdown([], value=None, visible="hidden")
        return gr.Dropdown(choices, value=picked or choices[0][1], visible=True)

    def _select(self, request: gr.Request, picked: Any, *values: Any) -> Updates:
        """As `refresh`; the key in the address, unless of a run, until the picker has a value."""
        query = dict(request.query_params)
        key = "" if query.get("run") else query.get(self.name, "")[:MAX_KEY]
        return self.refresh(picked or key, *values)

    def refresh(self, picked: Any, *values: Any) -> Updates:
        """Status of the selected job; its report if that is new or another."""
        *options, shown_version = values

        def read() -> Updates:
            newest = picked or next((key for _, key in self.choices()), None)
            if newest is None:
                return self._no_report(state_html("", self.empty)) | {self.picker: self.menu(None)}
            key = read_key(newest)
            now = self.read(key)
            updates: Updates = {
                self.state: state_of(now),
                self.stop: gr.Button(visible=now.task is not None),
                self.resume: gr.Button(visible=now.can_resume),
                self.timer: gr.Timer(active=now.is_running),
                self.report_column: gr.Column(visible=True),
            }
            version = [key, now.version, *options]
            if version != shown_version:
                updates |= {self.picker: self.menu(key), self.shown_version: version}
                updates |= zip(self.report_outputs, self.report(now, *options), strict=True)
            return updates

        results = attempt(read, where=f"reading a {self.name}")
        if isinstance(results, Fault):
            return self._no_report(state_html("failed", "", error=results.sentence))
        return results

    def _no_report(self, state: str) -> Updates:
        """A status without a report."""
        return {
            self.state: state,
            **dict.fromkeys([self.stop, self.resume], gr.Button(visible=False)),
            self.timer: gr.Timer(active=False),
            self.report_column: gr.Column(visible=False),
            self.shown_version: None,
        }

    def on_picked(self, act: Callable[[str], Any]) -> Callable[..., Updates]:
        """A listener that applies `act` to the selected job, or shows why that failed."""

        def listener(picked: Any, *values: Any) -> Updates:
            if not picked:
                return {self.state: gr.skip()}
            done = attempt(lambda: act(read_key(picked)), where=f"a {self.name}")
            if isinstance(done, Fault):
                error = state_html("", "", error=done.sentence)
                return self.refresh(picked, *values) | {self.state: error}
            return self.refresh(picked, *values)

        return listener


def read_key(raw: object) -> str:
    """The key of a job that the browser sent. Raises ConfigError: no job can have it."""
    if not isinstance(raw, str) or not 0 < len(raw) <= MAX_KEY or not raw.isprintable():
        raise ConfigError(f"Choose an experiment from the list; there is no {raw!r:.80}.")
    return raw
