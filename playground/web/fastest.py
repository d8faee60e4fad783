"""Find the fastest: one click tries what fits on the prompt at hand, and says which to use."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any

import gradio as gr

from engine import formats
from engine.errors import ConfigError
from playground.deploy import ExportForm, ExportSource, engines_of
from playground.errors import Fault, attempt
from playground.experiments.experiment import Experiment
from playground.experiments.fastest import BUDGET_S, Standings, methods_to_try, plan_of
from playground.experiments.job import time_left
from playground.experiments.report.columns import COLUMNS, Cell, speedup_cell
from playground.experiments.report.report import Section
from playground.experiments.service import Experiments
from playground.host.runner import EngineHost
from playground.trees.methods import tree_method
from playground.web.address import switch_to
from playground.web.forms import RAW
from playground.web.results import leads, state_html, table_html

OWNER = "fastest"
"""A search takes the whole machine: the server has one, and another one ends it."""
HEADS = {
    "method": "every trained method that fits the target and needs no download",
    "speedup": COLUMNS["speedup"].formula,
    "MAT": COLUMNS["mat"].formula,
    "answers": "how many times it answered every prompt; each round, the slower half drops out",
    "engines": "which can run it on this target, as it is; more with losses, which Deploy names",
    "state": "running, or kept to the end; waiting; dropped because it was slower; failed",
}
INTERRUPTED = (
    "The server stopped during the search. Its answers are in the log as the benchmark “{}”: read "
    "or resume it on the Benchmark page, or search again."
)
Raw = Callable[..., dict[str, Any]]


class FastestPanel:
    """A button, and the panel that it opens.

    Attributes:
        leads: buttons that take the fastest method elsewhere.
    """

    def __init__(self, host: EngineHost, experiments: Experiments) -> None:
        self.host, self.experiments = host, experiments
        self._search: Experiment | None = None
        self._closed = False

    # ---- layout

    def button(self) -> None:
        """Beside Generate."""
        self.start = gr.Button("Find the fastest", elem_id="pg-fastest-start")

    def panel(self) -> None:
        """Below the buttons."""
        with gr.Column(visible=False, elem_id="pg-fastest") as self.column:
            self.state = gr.HTML(elem_id="pg-fastest-state")
            self.table = gr.HTML(elem_id="pg-fastest-table")
            with gr.Row(elem_id="pg-fastest-leads"):
                names = {"use": "Use it", "tune": "Tune its tree", "deploy": "Deploy it"}
                self.leads = {
                    name: gr.Button(title, visible=False, elem_id=f"pg-fastest-{name}")
                    for name, title in names.items()
                }
                self.stop = gr.Button("Stop", elem_id="pg-fastest-stop")
                self.close = gr.Button("Close", visible=False, elem_id="pg-fastest-close")
        self.timer = gr.Timer(0.5, active=False)

    # ---- listeners

    def listen(self, fields: Sequence[Any], raw: Raw) -> None:
        """`raw` makes of what the fields hold what `read_request` takes."""
        self.outputs = [self.column, self.state, self.table, *self.leads.values()]
        self.outputs += [self.stop, self.close, self.timer]

        def begin(*values: Any) -> list[Any]:
            result = attempt(lambda: self._begin(raw(*values)), where="finding the fastest")
            if isinstance(result, Fault):
                return self._ended(state_html("failed", "", error=result.sentence))
            return self.look()

        self.start.click(begin, list(fields), self.outputs, **RAW)
        self.timer.tick(self.look, None, self.outputs, **RAW)
        self.stop.click(self._stop, None, self.outputs, **RAW)
        self.close.click(self._close, None, self.column, **RAW)

    def listen_to_page(self, page: gr.Blocks) -> None:
        """Show the server's search where the page is opened, until somebody closes it."""
        page.load(self.reopened, None, self.outputs, **RAW)

    def reopened(self) -> list[Any]:
        """What a page shows that was opened now.

        Its answer may come after that of a click on the button: only a search that goes on starts
        the timer, and nothing stops it.
        """
        if self._closed or (self._search is None and not self._interrupted()):
            return [gr.skip()] * len(self.outputs)
        *updates, _ = self.look()
        over = self._search is None or self._search.over.is_set()
        return [*updates, gr.skip() if over else gr.Timer(active=True)]

    def _interrupted(self) -> str:
        """Name of the newest experiment, if it is a search whose process ended."""
        head = next(iter(self.experiments.newest()), None)
        is_search = head is not None and head.name.startswith("Fastest method")
        return head.name if head and is_search and head.status == "interrupted" else ""

    def _begin(self, values: dict[str, Any]) -> Experiment:
        plan = plan_of(self.host.catalog, values)
        self._search = self.experiments.start(plan, owner=OWNER)
        self._closed = False
        return self._search

    def _close(self) -> Any:
        self._closed = True
        return gr.Column(visible=False)

    def forget(self) -> Any:
        """Hide what was found for another target; a search that goes on stays."""
        over = self._search is None or self._search.over.is_set()
        return self._close() if over else gr.skip()

    def _stop(self) -> list[Any]:
        if self._search is not None:
            self._search.cancel()
        return self.look()

    def look(self) -> list[Any]:
        """Values of `shown`: always the newest search, whichever the page was told of last."""
        search = self._search
        if search is None:
            name = self._interrupted()
            shown = self._ended(state_html("interrupted", INTERRUPTED.format(name)))
            return shown if name else [gr.Column(visible=False), *shown[1:]]
        over, standings = search.over.is_set(), Standings(search)
        leader = standings.leader
        offered = {"use": True, "tune": leader and self._has_tree(search, leader), "deploy": True}
        leads = [gr.Button(visible=bool(over and leader and offered[name])) for name in self.leads]
        return [
            gr.Column(visible=True),
            self._state(search, standings),
            self._table(search, standings),
            *leads,
            gr.Button(visible=not over),
            gr.Button(visible=over),
            gr.Timer(active=not over),
        ]

    def _ended(self, state: str) -> list[Any]:
        """Values of `shown`: a sentence, and a button that closes it."""
        hidden = [gr.Button(visible=False)] * (len(self.leads) + 1)
        closes = [gr.Button(visible=True), gr.Timer(active=False)]
        return [gr.Column(visible=True), state, "", *hidden, *closes]

    def _state(self, search: Experiment, standings: Standings) -> str:
        if search.over.is_set():
            return state_html(search.state, standings.advice, error=search.error or "")
        left_s = search.chooser.left_s or 0.0
        left = "" if search.cancelled() else time_left(left_s)
        text = " · ".join(filter(None, (search.message, left)))
        return state_html("running", text, share=1 - left_s / BUDGET_S)

    def _table(self, search: Experiment, standings: Standings) -> str:
        best = standings.report.fastest
        rows = []
        for one in standings.sections:
            speedup = one.overall.speedup
            answers = str(speedup.num_repeats if speedup else 0)
            state = Cell(standings.state(one), hint=one.fault, mood="bad" if one.fault else "")
            mat, engines = formats.mat(one.overall.mat), self._engines(search, one.name)
            speed = speedup_cell(speedup)
            rows.append([Cell(one.name), speed, Cell(mat), Cell(answers), engines, state])
        return table_html("Methods tried", HEADS, rows, best=best)

    def _engines(self, search: Experiment, name: str) -> Cell:
        """The engines that run a method, once the search is over."""
        if not search.over.is_set():
            return Cell("")
        config = next(c.config for c in search.plan.configurations if c.name == name)
        source = ExportSource(config, search.plan.target.name, name)
        resolve = self.host.catalog.resolve
        engines = attempt(lambda: engines_of(source, resolve), where="naming engines")
        if isinstance(engines, Fault):
            return Cell("")
        exact, losses = engines
        neither = "its parts alone" if config.within() else "none"
        return Cell(exact or neither * (not losses), losses and f"with losses: {losses}")

    # ---- the way to other pages

    def picked(self) -> tuple[Experiment, Section, str]:
        """What the search found to be fastest, and its key in the method picker."""
        search = self._search
        leader = Standings(search).leader if search else None
        if search is None or leader is None:
            raise ConfigError("The search has no result yet. Wait, or start it again.")
        target = search.plan.target.name
        return search, leader, methods_to_try(self.host.catalog, target)[leader.name]

    def _has_tree(self, search: Experiment, one: Section) -> bool:
        target = search.plan.target.name
        method = methods_to_try(self.host.catalog, target)[one.name]
        result = attempt(
            lambda: tree_method(self.host.catalog, method, target), where="looking for a tree"
        )
        return not isinstance(result, Fault)

    def listen_to_leads(
        self,
        tabs: gr.HTML,
        form: Sequence[Any],
        take: Callable[..., tuple[Any, ...]],
        tree: gr.HTML,
        deploy: Callable[[ExportForm], dict[Any, Any]],
        deploy_outputs: Sequence[Any],
    ) -> None:
        """Put what was found into the form (`take` fills it), the tree editor or Deploy."""

        def use() -> dict[Any, Any]:
            search, _, method = self.picked()
            filled = zip(form, take(search.plan.target.name, method, {}), strict=True)
            return {self.column: gr.Column(visible=False), **dict(filled)}

        def tune() -> dict[Any, Any]:
            search, _, method = self.picked()
            link = {"tree": "", "method": method, "target": search.plan.target.name}
            value = {"rev": secrets.token_urlsafe(6), "link": link}
            return {tabs: switch_to("tree"), tree: value}

        def hand_over() -> dict[Any, Any]:
            _, leader, _ = self.picked()
            opened = deploy(ExportForm(run=leader.example_run or ""))
            return {tabs: switch_to("deploy"), **opened}

        outputs = {
            "use": (use, [self.column, *form]),
            "tune": (tune, [tabs, tree]),
            "deploy": (hand_over, [tabs, *deploy_outputs]),
        }
        for name, (lead, changed) in outputs.items():
            leads(self.leads[name], lead, [], changed, self.state)
