"""Find the fastest: one click tries what fits on the prompt at hand, and says which to use."""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import gradio as gr

from engine.errors import ConfigError
from playground.deploy import Question
from playground.errors import Fault, attempt
from playground.experiments.fastest import BUDGET_S, Contender, Search, methods_to_try, plan_of
from playground.experiments.job import Jobs, time_left
from playground.host.runner import EngineHost
from playground.trees.methods import tree_method
from playground.web.forms import RAW
from playground.web.results import Cell, figure, saying, speedup_cell, state_html, table_html

MAX_KEPT = 32
OWNER = "fastest"
"""A search takes the whole machine: the server has one, and another one ends it."""
HEADS = {
    "method": "every shipped method that fits the target and needs no download",
    "× plain": "tok/s over plain decoding's on the same prompts, with its 95 % interval",
    "MAT": "1 + accepted draft tokens / steps, of its last answer",
    "answers": "how often it answered everything; the slower half drops out each time",
    "": "",
}
Raw = Callable[..., dict[str, Any]]


class FastestPanel:
    """A button, and the panel that it opens.

    Attributes:
        leads: buttons that take the fastest method elsewhere.
    """

    def __init__(self, host: EngineHost) -> None:
        self.host = host
        self._jobs = Jobs(host)
        self._searches: OrderedDict[str, Search] = OrderedDict()
        self._newest = ""

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
        self.key = gr.Textbox(visible=False)
        self.timer = gr.Timer(0.5, active=False)

    # ---- listeners

    def listen(self, fields: Sequence[Any], raw: Raw) -> None:
        """`raw` makes of what the fields hold what `read_request` takes."""
        self.shown = [self.column, self.state, self.table, *self.leads.values()]
        self.shown += [self.stop, self.close, self.timer]

        def begin(*held: Any) -> list[Any]:
            found = attempt(lambda: self._begin(raw(*held)), where="finding the fastest")
            if isinstance(found, Fault):
                hidden = [gr.Button(visible=False)] * (len(self.leads) + 1)
                said = state_html("failed", "", error=found.sentence)
                closed = [gr.Button(visible=True), gr.Timer(active=False)]
                return ["", gr.Column(visible=True), said, "", *hidden, *closed]
            return [found.id, *self.look(found.id)]

        self.start.click(begin, list(fields), [self.key, *self.shown], **RAW)
        self.timer.tick(self.look, self.key, self.shown, **RAW)
        self.stop.click(self._stop, self.key, self.shown, **RAW)
        self.close.click(self._forget, self.key, [self.key, self.column], **RAW)

    def listen_to_page(self, page: gr.Blocks) -> None:
        """Show the server's search where the page is opened, until somebody closes it."""

        page.load(self.reopened, None, [self.key, *self.shown], **RAW)

    def reopened(self) -> list[Any]:
        return [self._newest, *self.look(self._newest)]

    def _begin(self, asked: dict[str, Any]) -> Search:
        plan = plan_of(self.host.catalog, asked)
        search = Search.start(self.host, self._jobs, plan, owner=OWNER)
        self._newest = search.id
        self._searches[search.id] = search
        while len(self._searches) > MAX_KEPT:
            self._searches.popitem(last=False)
        return search

    def _forget(self, key: Any) -> list[Any]:
        if key == self._newest:
            self._newest = ""
        return ["", gr.Column(visible=False)]

    def _search(self, key: Any) -> Search | None:
        """The search of a key; anybody may have sent it."""
        return self._searches.get(key) if isinstance(key, str) else None

    def _stop(self, key: Any) -> list[Any]:
        if (search := self._search(key)) is not None:
            search.cancel()
        return self.look(key)

    def look(self, key: Any) -> list[Any]:
        """Values of `shown`."""
        search = self._search(key)
        if search is None:
            return [gr.skip()] * (len(self.shown) - 1) + [gr.Timer(active=False)]
        over, leader = search.over.is_set(), search.leader
        offered = {"use": True, "tune": leader and self._has_tree(search, leader), "deploy": True}
        leads = [gr.Button(visible=bool(over and leader and offered[name])) for name in self.leads]
        return [
            gr.Column(visible=True),
            self._state(search, over),
            self._table(search),
            *leads,
            gr.Button(visible=not over),
            gr.Button(visible=over),
            gr.Timer(active=not over),
        ]

    def _state(self, search: Search, over: bool) -> str:
        if over:
            return state_html(search.state, search.advice, error=search.error or "")
        left = "" if search.cancelled() else time_left(search.left_s)
        text = " · ".join(filter(None, (search.message, left)))
        return state_html("running", text, share=1 - search.left_s / BUDGET_S)

    def _table(self, search: Search) -> str:
        best = search.best
        rows = [_row(one) for one in search.contenders()]
        return table_html("Methods tried", HEADS, rows, best=best.name if best else None)

    # ---- the way to other pages

    def picked(self, key: Any) -> tuple[Search, Contender, str]:
        """What a search found to be fastest, and its key in the method picker."""
        search = self._search(key)
        leader = search.leader if search else None
        if search is None or leader is None:
            raise ConfigError("That search is over and forgotten. Start it again.")
        target = search.plan.target.name
        return search, leader, methods_to_try(self.host.catalog, target)[leader.name]

    def _has_tree(self, search: Search, one: Contender) -> bool:
        target = search.plan.target.name
        method = methods_to_try(self.host.catalog, target)[one.name]
        found = attempt(
            lambda: tree_method(self.host.catalog, method, target), where="looking for a tree"
        )
        return not isinstance(found, Fault)

    def listen_to_leads(
        self,
        tabs: gr.Tabs,
        form: Sequence[Any],
        take: Callable[..., tuple[Any, ...]],
        tree: gr.HTML,
        deploy: Callable[[Question], dict[Any, Any]],
        deploy_outputs: Sequence[Any],
    ) -> None:
        """Put what was found into the form (`take` fills it), the tree editor or Deploy."""

        def leading(lead: Callable[[Any], dict[Any, Any]]) -> Callable[[Any], dict[Any, Any]]:
            def go(key: Any) -> dict[Any, Any]:
                found = attempt(lambda: lead(key), where="opening another page")
                if isinstance(found, Fault):
                    return {self.state: saying(found)}
                return found

            return go

        def use(key: Any) -> dict[Any, Any]:
            search, _, method = self.picked(key)
            filled = zip(form, take(search.plan.target.name, method, {}), strict=True)
            return {self.column: gr.Column(visible=False), **dict(filled)}

        def tune(key: Any) -> dict[Any, Any]:
            search, _, method = self.picked(key)
            link = {"tree": "", "method": method, "target": search.plan.target.name}
            value = {"rev": secrets.token_urlsafe(6), "link": link}
            return {tabs: gr.Tabs(selected="tree"), tree: value}

        def hand_over(key: Any) -> dict[Any, Any]:
            _, leader, _ = self.picked(key)
            opened = deploy(Question(run=leader.run_id or ""))
            return {tabs: gr.Tabs(selected="deploy"), **opened}

        outputs = {
            "use": (use, [self.column, *form]),
            "tune": (tune, [tabs, tree]),
            "deploy": (hand_over, [tabs, *deploy_outputs]),
        }
        for name, (lead, changed) in outputs.items():
            self.leads[name].click(leading(lead), self.key, [self.state, *changed], **RAW)


def _row(one: Contender) -> list[Cell | str]:
    answers = str(one.speedup.num_repeats if one.speedup else 0)
    state = Cell(one.state, hint=one.fault, mood="bad" if one.fault else "")
    return [one.name, speedup_cell(one.speedup), figure(one.mat, 2), answers, state]
