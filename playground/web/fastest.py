"""Find the fastest: one click tries the available methods on the prompt and recommends one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gradio as gr

from engine import formats
from engine.errors import ConfigError
from playground.deploy import ExportForm, ExportSource, engines_of
from playground.errors import Fault, attempt
from playground.experiments.experiment import Experiment
from playground.experiments.fastest import BUDGET_S, Ranking, methods_to_try, plan_of
from playground.experiments.job import time_left
from playground.experiments.report.columns import COLUMNS, Cell, speedup_cell
from playground.experiments.report.report import Section
from playground.experiments.service import Experiments
from playground.host.runner import EngineHost
from playground.trees.methods import tree_method
from playground.web.forms import RAW, Page, Updates
from playground.web.results import open_on_click, state_html, table_html

OWNER = "fastest"
"""A search needs the whole machine, so the server has one at a time; a new one ends the old."""
HEADS = {
    "method": "every trained method that fits the target and needs no download",
    "speedup": COLUMNS["speedup"].formula,
    "MAT": COLUMNS["mat"].formula,
    "answers": "how many times it answered every prompt; each round, the slower half drops out",
    "engines": "engines that run it on this target unchanged; with losses: see Deploy",
    "state": "running, or kept to the end; waiting; dropped because it was slower; failed",
}
INTERRUPTED = (
    "The server stopped during the search. Its answers are in the log as the benchmark “{}”: read "
    "or resume it on the Benchmark page, or search again."
)


class FastestPanel:
    """A button, and the panel that it opens.

    Attributes:
        page_buttons: buttons that open the fastest method on another page, by name.
    """

    def __init__(self, host: EngineHost, experiments: Experiments) -> None:
        self.host, self.experiments = host, experiments
        self._search: Experiment | None = None
        self._closed = False

    # ---- layout

    def button(self) -> None:
        """Lay out the button, beside Generate."""
        self.start = gr.Button("Find the fastest", elem_id="pg-fastest-start")

    def panel(self) -> None:
        """Lay out the panel, below the buttons."""
        with gr.Column(visible=False, elem_id="pg-fastest") as self.column:
            self.state = gr.HTML(elem_id="pg-fastest-state")
            self.table = gr.HTML(elem_id="pg-fastest-table")
            with gr.Row(elem_id="pg-fastest-leads"):
                names = {"use": "Use it", "tune": "Tune its tree", "deploy": "Deploy it"}
                self.page_buttons = {
                    name: gr.Button(title, visible=False, elem_id=f"pg-fastest-{name}")
                    for name, title in names.items()
                }
                self.stop = gr.Button("Stop", elem_id="pg-fastest-stop")
                self.close = gr.Button("Close", visible=False, elem_id="pg-fastest-close")
        self.timer = gr.Timer(0.5, active=False)

    # ---- listeners

    def listen(self, fields: Sequence[Any], raw_request: Callable[..., dict[str, Any]]) -> None:
        """`raw_request` makes the input of `host.request.read_request` from the fields' values."""
        self.outputs = [self.column, self.state, self.table, *self.page_buttons.values()]
        self.outputs += [self.stop, self.close, self.timer]

        def start(*values: Any) -> Updates:
            result = attempt(lambda: self._start(raw_request(*values)), where="finding the fastest")
            if isinstance(result, Fault):
                return self._updates(state_html("failed", "", error=result.sentence))
            return self.refresh()

        self.start.click(start, list(fields), self.outputs, **RAW)
        self.timer.tick(self.refresh, None, self.outputs, **RAW)
        self.stop.click(self._stop, None, self.outputs, **RAW)
        self.close.click(self._close, None, self.column, **RAW)

    def on_page_load(self) -> Updates:
        """The server's search on a page that was just loaded, unless it has been closed.

        This may arrive after the response to a click on the button, so it may start the timer,
        but never stops it.
        """
        if self._closed or (self._search is None and not self._interrupted()):
            return {self.column: gr.skip()}
        updates = self.refresh()
        if self._search is None or self._search.over.is_set():
            del updates[self.timer]
        return updates

    def _interrupted(self) -> str:
        """Name of the newest experiment if it is an interrupted search, else empty."""
        head = next(iter(self.experiments.newest()), None)
        is_search = head is not None and head.name.startswith("Fastest method")
        return head.name if head and is_search and head.status == "interrupted" else ""

    def _start(self, values: dict[str, Any]) -> Experiment:
        plan = plan_of(self.host.catalog, values)
        self._search = self.experiments.start(plan, owner=OWNER)
        self._closed = False
        return self._search

    def _close(self) -> Any:
        self._closed = True
        return gr.Column(visible=False)

    def hide_finished(self) -> Any:
        """Hide a finished search, whose target is no longer picked."""
        over = self._search is None or self._search.over.is_set()
        return self._close() if over else gr.skip()

    def _stop(self) -> Updates:
        if self._search is not None:
            self._search.cancel()
        return self.refresh()

    def refresh(self) -> Updates:
        """Updates of `outputs` for the newest search."""
        search = self._search
        if search is None:
            name = self._interrupted()
            updates = self._updates(state_html("interrupted", INTERRUPTED.format(name)))
            return updates | {self.column: gr.Column(visible=bool(name))}
        over, ranking = search.over.is_set(), Ranking(search)
        offered: list[str] = []
        if over and (leader := ranking.leader):
            offered = ["use", "deploy", *["tune"] * self._has_tree(search, leader)]
        state, table = self._state(search, ranking), self._table(search, ranking)
        return self._updates(state, table, over=over, offered=offered)

    def _updates(
        self, state: str, table: str = "", *, over: bool = True, offered: Sequence[str] = ()
    ) -> Updates:
        """The panel; `offered`: names of the `page_buttons` that it shows."""
        return {
            self.column: gr.Column(visible=True),
            self.state: state,
            self.table: table,
            self.stop: gr.Button(visible=not over),
            self.close: gr.Button(visible=over),
            self.timer: gr.Timer(active=not over),
            **{b: gr.Button(visible=name in offered) for name, b in self.page_buttons.items()},
        }

    def _state(self, search: Experiment, ranking: Ranking) -> str:
        if search.over.is_set():
            return state_html(search.state, ranking.advice, error=search.error or "")
        left_s = search.chooser.remaining_s or 0.0
        left = "" if search.cancelled() else time_left(left_s)
        text = " · ".join(filter(None, (search.message, left)))
        return state_html("running", text, share=1 - left_s / BUDGET_S)

    def _table(self, search: Experiment, ranking: Ranking) -> str:
        best = ranking.report.fastest
        rows: list[list[Cell | str]] = []
        for one in ranking.sections:
            speedup = one.overall.speedup
            answers = str(speedup.num_repeats if speedup else 0)
            state = Cell(ranking.state(one), hint=one.fault, mood="bad" if one.fault else "")
            mat, engines = formats.mat(one.overall.mat), self._engines(search, one.name)
            rows.append([one.name, speedup_cell(speedup), mat, answers, engines, state])
        return table_html("Methods tried", HEADS, rows, best=best)

    def _engines(self, search: Experiment, name: str) -> Cell:
        """The engines that run a method, once the search is over."""
        if not search.over.is_set():
            return Cell("")
        config = search.plan.configuration(name).config
        source = ExportSource(config, search.plan.target.name, name)
        resolve = self.host.catalog.resolve
        engines = attempt(lambda: engines_of(source, resolve), where="naming engines")
        if isinstance(engines, Fault):
            return Cell("")
        exact, losses = engines
        neither = "its parts alone" if config.nested() else "none"
        return Cell(exact or neither * (not losses), losses and f"with losses: {losses}")

    # ---- links to other pages

    def winner(self) -> tuple[Experiment, Section, str]:
        """Search, fastest configuration, and its key in the method picker. Raises ConfigError."""
        search = self._search
        leader = Ranking(search).leader if search else None
        if search is None or leader is None:
            raise ConfigError("The search has no result yet. Wait, or start it again.")
        return search, leader, self._method_key(search, leader)

    def _method_key(self, search: Experiment, section: Section) -> str:
        return methods_to_try(self.host.catalog, search.plan.target.name)[section.name]

    def _has_tree(self, search: Experiment, section: Section) -> bool:
        catalog, key = self.host.catalog, self._method_key(search, section)
        read = lambda: tree_method(catalog, key, search.plan.target.name)  # noqa: E731
        return not isinstance(attempt(read, where="looking for a tree"), Fault)

    def listen_to_pages(self, page: gr.Blocks, generate: Page, tree: Page, deploy: Page) -> None:
        """Show the search on loading; open the fastest method in form, tree editor or Deploy."""
        page.load(self.on_page_load, None, self.outputs, **RAW)

        def use() -> Updates:
            search, _, method = self.winner()
            opened = generate.open(search.plan.target.name, method, {})
            return {self.column: gr.Column(visible=False), **opened}

        def tune() -> Updates:
            search, _, method = self.winner()
            return tree.open(method=method, target=search.plan.target.name)

        def export() -> Updates:
            return deploy.open(ExportForm(run=self.winner()[1].example_run or ""))

        for name, listener, outputs in (
            ("use", use, [self.column, *generate.open_outputs]),
            ("tune", tune, tree.open_outputs),
            ("deploy", export, deploy.open_outputs),
        ):
            open_on_click(self.page_buttons[name], listener, [], outputs, self.state)
