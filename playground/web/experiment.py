"""What the Benchmark and Sweep pages share: start, pick, watch, stop and resume an experiment."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import gradio as gr

from engine.errors import ConfigError
from playground.errors import Fault, attempt
from playground.experiments.cluster import Pool
from playground.experiments.job import about
from playground.experiments.plan import ExperimentPlan
from playground.experiments.service import Experiments, ExperimentState
from playground.host.runner import EngineHost
from playground.training.service import TrainingState
from playground.web.address import address_js
from playground.web.forms import QUIET, RAW, or_skip
from playground.web.results import saying, state_html, table_html
from storage import RunQuery

Shown = ExperimentState | TrainingState
MAX_KEY, MAX_WORKERS = 100, 1000
STATUS = {"completed": "done", "cancelled": "stopped"}
PLACES = {"local": "Ray on this machine"}
WORKERS = {"worker": "machine and process id", "device": "", "measures": ""}


def state_of(now: Shown) -> str:
    """Where an experiment stands, with the workers that measure it."""
    head = state_html(now.status, now.text, share=now.share, error=now.error)
    rows = now.job.workers() if now.job else ()
    refused = "".join(map(saying, now.job.refused)) if now.job else ""
    return head + (table_html("Workers", WORKERS, rows) if rows else "") + refused


class ExperimentPage(ABC):
    """A form that starts experiments, the one that is picked, where it stands, and its report.

    Attributes:
        name: of its tab, and of its parameter in the page's address.
        fields: components of the form by name.
        parts: components of the report.
        choosers: of these, those by which a person chooses what it shows.
    """

    name: ClassVar[str]
    empty: ClassVar[str]
    fields: dict[str, Any]
    parts: list[Any]
    choosers: list[Any]

    def __init__(self, host: EngineHost, experiments: Experiments, tab: gr.Tab) -> None:
        self.catalog, self.method_menu, self.experiments = host.catalog, host.menu, experiments
        self.log = host.log
        with gr.Row(equal_height=False, elem_id=f"pg-{self.name}"):
            with gr.Column(scale=1, elem_classes="pg-side"):
                self._setup()
                self._foot(self.catalog.clusters)
            with gr.Column(scale=4, elem_classes="pg-main"):
                self._bar()
                report_id = f"pg-{self.name}-report"
                with gr.Column(visible=False, elem_id=report_id) as self.report_column:
                    self._report()
        self._listen_to_setup()
        self._listen(tab)

    # ---- what a page says of its experiments

    @abstractmethod
    def _setup(self) -> None:
        """Draw the form."""

    @abstractmethod
    def _listen_to_setup(self) -> None:
        """What the form's components change in each other."""

    @abstractmethod
    def _report(self) -> None:
        """Draw the report."""

    @abstractmethod
    def read(self, key: str) -> Shown:
        """Where one stands; raises a sentence if there is none of this key."""

    @abstractmethod
    def report(self, results: Any, *choices: Any) -> list[Any]:
        """Values of `parts`."""

    @abstractmethod
    def plan(self, values: Mapping[str, Any]) -> ExperimentPlan:
        """The plan that the form describes; raises a sentence if it cannot be run."""

    @abstractmethod
    def extent(self, plan: Any, pool: Pool | None) -> str:
        """How much a plan would run."""

    def choices(self) -> list[tuple[str, str]]:
        """The experiments to pick from, newest first: title and key."""
        titles = []
        for one in self.experiments.newest(sweeps=self.name == "sweep"):
            status = STATUS.get(one.status, one.status)
            titles.append((f"{one.name} · {status} · {one.created_at:%d %b %H:%M}", one.id))
        return titles

    def end(self, key: str) -> None:
        """Stop one."""
        self.experiments.stop(key)

    def go_on(self, key: str, pool: Pool | None) -> None:
        """Resume one."""
        self.experiments.resume(key, pool)

    def outlook(self, values: Mapping[str, Any]) -> str:
        """What the form would run, and for how long; raises a sentence if it cannot."""
        plan = self.plan(values)
        extent = self.extent(plan, self.pool(values["place"], values["workers"]))
        query = RunQuery(target=plan.target.name, status="completed", limit=1)
        tok_s = next((run.tok_s for run in self.log.rows(query)), None)
        if not tok_s:
            return extent
        seconds = plan.num_answers * plan.limits.max_new_tokens / tok_s
        return f"{extent} {about(seconds).capitalize()} if all answers are as long as they may be."

    def begin(self, values: Mapping[str, Any]) -> str:
        """Start what the form describes; returns its key."""
        pool = self.pool(values["place"], values["workers"])
        return self.experiments.start(self.plan(values), pool=pool).id

    def pick_target(self, target: Any, method: Any) -> Any:
        """The methods of a target; that which is picked stays if it is among them."""

        def pick() -> Any:
            menu = self.method_menu.drafting(target)
            keys = [key for _, key in menu]
            return gr.Dropdown(menu, value=method if method in keys else keys[0])

        return or_skip(pick, where="listing the methods")

    # ---- layout

    def _foot(self, clusters: Sequence[str]) -> None:
        """Under the form: where to run it, and the button that starts it."""
        places = [("This process", ""), *((PLACES.get(a, f"Ray at {a}"), a) for a in clusters)]
        self.place = gr.Dropdown(places, value="", label="Run on", elem_id=f"pg-{self.name}-place")
        self.num_workers = gr.Number(
            None,
            label="Workers",
            info="empty = as many as fit",
            precision=0,
            visible=False,
            elem_id=f"pg-{self.name}-workers",
        )
        self.clusters = clusters
        self.fields |= {"place": self.place, "workers": self.num_workers}
        self.message = gr.HTML(elem_id=f"pg-{self.name}-outlook")
        self.start = gr.Button(
            f"Start {self.name}", variant="primary", elem_id=f"pg-{self.name}-start"
        )

    def _bar(self) -> None:
        """Over the report."""
        with gr.Row(elem_classes="pg-bar"):
            self.picker = gr.Dropdown(
                [], label=self.name, container=False, scale=3, elem_id=f"pg-{self.name}-picker"
            )
            self.stop = gr.Button("Stop", visible=False, elem_id=f"pg-{self.name}-stop")
            self.resume = gr.Button("Resume", visible=False, elem_id=f"pg-{self.name}-resume")
        self.state = gr.HTML(state_html("", self.empty), elem_id=f"pg-{self.name}-state")
        self.timer = gr.Timer(1, active=False)
        self.seen = gr.State()

    # ---- listeners

    def _listen(self, tab: gr.Tab) -> None:
        fields = list(self.fields.values())
        for field in fields:
            field.change(self._look_ahead, fields, [self.message, self.start], **RAW)
        begun = [self.message, self.picker]
        self.start.click(self._begin, fields, begun, **RAW)
        self.outputs = [self.state, self.stop, self.resume, self.timer, self.report_column]
        self.outputs += [self.picker, self.seen, *self.parts]
        self.inputs = [self.picker, *self.choosers, self.seen]
        tab.select(self._select, self.inputs, self.outputs, **RAW)
        looks = [self.timer.tick, self.picker.change]
        looks += [component.input for component in self.choosers]
        for look in looks:
            look(self.look, self.inputs, self.outputs, **RAW)
        self.picker.change(None, self.picker, None, js=address_js(self.name, self.name), **RAW)
        self.stop.click(self.acting(self.end), self.inputs, self.outputs, **RAW)
        placed = [self.place, self.num_workers]
        self.resume.click(self._resume, [*placed, *self.inputs], self.outputs, **RAW)
        self.place.change(_show_workers, self.place, self.num_workers, **RAW)

    def pool(self, place: Any, num_workers: Any) -> Pool | None:
        """The chosen workers; None = it is measured in this process.

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
        return Pool(place, num_workers)

    def _resume(self, place: Any, num_workers: Any, *values: Any) -> list[Any]:
        act = self.acting(lambda key: self.go_on(key, self.pool(place, num_workers)))
        return act(*values)

    def _look_ahead(self, *values: Any) -> tuple[Any, Any]:
        """What would be run, or why it cannot."""
        named = self._values(values)
        form, method = named.get("form"), named.get("method")
        if method and isinstance(form, dict) and form.get("method") not in (None, method):
            return gr.skip(), gr.skip()  # the method has changed, its form has not yet
        results = attempt(lambda: self.outlook(named), where=f"checking a {self.name}")
        return saying(results), gr.Button(interactive=not isinstance(results, Fault))

    def _begin(self, *values: Any) -> tuple[Any, Any]:
        begun = attempt(lambda: self.begin(self._values(values)), where=f"starting a {self.name}")
        return (
            (saying(begun), gr.skip())
            if isinstance(begun, Fault)
            else (gr.skip(), self.menu(begun))
        )

    def _values(self, values: Sequence[Any]) -> dict[str, Any]:
        """What the form's components hold, by name."""
        return dict(zip(self.fields, values, strict=True))

    def menu(self, picked: str | None) -> Any:
        """The picker; a link may name an experiment that is gone, and the page says so."""
        choices = self.choices()
        if picked and picked not in [key for _, key in choices]:
            choices.append((picked, picked))
        return gr.Dropdown(choices, value=picked or (choices[0][1] if choices else None))

    def _select(self, request: gr.Request, picked: Any, *values: Any) -> list[Any]:
        """As `look`; what the address names while the picker does not have it yet."""
        return self.look(picked or self._linked(request), *values)

    def look(self, picked: Any, *values: Any) -> list[Any]:
        """Where the picked experiment stands; its report where another is on show."""
        *choices, seen = values

        def read() -> list[Any]:
            newest = picked or next((key for _, key in self.choices()), None)
            if newest is None:
                return self._nothing(state_html("", self.empty), self.menu(None))
            key = read_key(newest)
            now = self.read(key)
            version = (key, now.version, *choices)
            if version == seen:
                menu, parts = gr.skip(), [gr.skip()] * len(self.parts)
            else:
                menu, parts = self.menu(key), self.report(now.results, *choices)
            return [
                state_of(now),
                gr.Button(visible=now.job is not None),
                gr.Button(now.resume or "Resume", visible=bool(now.resume)),
                gr.Timer(active=now.status == "running" or now.job is not None),
                gr.Column(visible=True),
                menu,
                version,
                *parts,
            ]

        results = attempt(read, where=f"reading a {self.name}")
        if isinstance(results, Fault):
            return self._nothing(state_html("failed", "", error=results.sentence), gr.skip())
        return results

    def _nothing(self, state: str, menu: Any) -> list[Any]:
        """Values of `outputs` where there is nothing but a sentence."""
        hidden, parts = gr.Button(visible=False), [gr.skip()] * len(self.parts)
        timer = gr.Timer(active=False)
        return [state, hidden, hidden, timer, gr.Column(visible=False), menu, None, *parts]

    def acting(self, act: Callable[[str], Any], *, gone: bool = False) -> Callable[..., list[Any]]:
        """A listener that does something to the picked experiment, or says why it cannot.

        Args:
            gone: the newest one comes next, as this one is no more.
        """

        def acting(picked: Any, *values: Any) -> list[Any]:
            if not picked:
                return [gr.skip()] * len(self.outputs)
            done = attempt(lambda: act(read_key(picked)), where=f"a {self.name}")
            outputs = self.look(None if gone and not isinstance(done, Fault) else picked, *values)
            if isinstance(done, Fault):
                outputs[0] = state_html("", "", error=done.sentence)
            return outputs

        return acting

    def listen_to_links(self, page: gr.Blocks) -> None:
        """Fill the page for addresses with its name as a parameter."""

        def load(request: gr.Request) -> Any:
            linked = self._linked(request)
            return self.menu(linked) if linked else gr.skip()

        page.load(load, None, self.picker, **QUIET)

    def _linked(self, request: gr.Request) -> str:
        """The key in the page's address; empty where it names none, or a run of an experiment."""
        query = dict(request.query_params)
        return "" if query.get("run") else query.get(self.name, "")[:MAX_KEY]


def _show_workers(place: Any) -> Any:
    return gr.Number(visible=bool(place))


def read_key(raw: object) -> str:
    """Raises ConfigError: nothing is kept under such a key."""
    if not isinstance(raw, str) or not 0 < len(raw) <= MAX_KEY or not raw.isprintable():
        raise ConfigError(f"Choose an experiment from the list; there is no {raw!r:.80}.")
    return raw
