"""The Runs page: the log as a table to filter, annotate, compare and export."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, get_args

import gradio as gr

from engine.errors import ConfigError
from engine.formats import plural
from playground.errors import Fault, attempt
from playground.host.request import texts
from playground.host.runner import EngineHost
from playground.host.stream import History
from playground.runs.columns import COLUMNS, FIGURES
from playground.runs.details import Selection, split_tags
from playground.runs.query import TableQuery, filter_texts, read_filters, read_link
from playground.runs.table import RunTable
from playground.web.address import link_to
from playground.web.components import drawn_by
from playground.web.forms import QUEUED, QUIET
from playground.web.run_comparison import ComparisonView
from playground.web.run_details import OpenRun, message_html
from playground.web.run_files import RunFiles
from storage import Status

DELETED = "deleted"
PLACE = ("sort", "descending", "page", "compare")
"""Parts of the table's query that survive a change of filters."""
COPY_LINK = "() => { navigator.clipboard?.writeText(location.href); return []; }"


class RunsPage:
    """Components and listeners of the page.

    Attributes:
        inputs: the table and the components that select its rows, in the order of `query`.
    """

    def __init__(self, host: EngineHost, history: History, tab: gr.HTML) -> None:
        """`tab`: tells browser tabs apart."""
        self.host, self.log, self.tab = host, host.log, tab
        self.runs = RunTable(host.log, host.catalog.types)
        with gr.Row(elem_id="pg-runs-filters"):
            self._filters()
        with gr.Row(elem_id="pg-runs-actions"):
            self._actions()
        self.message = gr.HTML(elem_id="pg-runs-message", apply_default_css=False)
        self.table = drawn_by(
            "runs/table.js",
            template='<div class="runs"></div>',
            css=[],
            events=["turn", "narrow", "tick", "open", "refresh"],
            value={},
            elem_id="pg-runs",
        )
        with gr.Accordion("Columns", open=False, elem_id="pg-runs-columns"):
            self.columns = gr.CheckboxGroup(
                [(column.title, column.key) for column in COLUMNS],
                value=[column.key for column in COLUMNS if column.usual],
                show_label=False,
                container=False,
            )
        self.comparison = ComparisonView(self.runs)
        self.open_run = OpenRun(host, history)
        self.filters: list[Any] = [self.search, self.status, self.target, self.method, self.further]
        self.filters.append(self.group)
        self.outputs = [self.table, *self.filters]
        self.inputs = [*self.outputs, self.columns]
        self._listen()

    # ---- layout

    def _filters(self) -> None:
        def menu(name: str, label: str, choices: Any, **more: Any) -> gr.Dropdown:
            start = [] if more else choices[0][1]
            about: dict[str, Any] = {"label": label, "elem_id": f"pg-runs-{name}", **more}
            return gr.Dropdown(choices, value=start, allow_custom_value=True, **about)

        everything = [("any", "")]
        states = [*everything, *((name, name) for name in (*get_args(Status), DELETED))]
        self.search = gr.Textbox(
            label="Search", placeholder="prompt, name, note, method", elem_id="pg-runs-search"
        )
        self.status = menu("status", "Status", states)
        self.target = menu("target", "Target", everything)
        self.method = menu("method", "Method", everything)
        title = "Filters: tags, labels, tok/s >= 90, …"
        self.further = menu("further", title, [], multiselect=True)
        self.group = menu("group", "Group by", [("experiment", "")])

    def _actions(self) -> None:
        def button(name: str, label: str, **more: Any) -> gr.Button:
            return gr.Button(label, size="sm", elem_id=f"pg-runs-{name}", **more)

        self.compare = button("do-compare", "Compare", variant="primary", interactive=False)
        self.tag_names = gr.Textbox(
            label="tags", placeholder="comma-separated tags", show_label=False, container=False
        )
        self.tag = button("tag", "Tag", interactive=False)
        self.untag = button("untag", "Untag", interactive=False)
        self.delete = button("delete", "Delete", interactive=False)
        self.files = RunFiles(self.log, self.query)
        self.undo = button("undo", "Undo", visible=False)
        self.refresh = button("refresh", "Refresh")
        self.copy = button("copy", "Copy link")
        self.deleted = gr.JSON(visible=False)

    # ---- listeners

    def _listen(self) -> None:
        fast = QUIET
        inputs, table, message, run = self.inputs, self.table, self.message, self.open_run
        compared = self.comparison.outputs
        buttons = [self.compare, self.tag, self.untag, self.delete, self.files.export]

        # Gradio's `input` misses what is pasted, and filters that are typed.
        typed = [part.change for part in (*self.filters, self.columns)]
        gr.on(typed, self.draw, inputs, table, trigger_mode="always_last", **fast)
        table.turn(self.draw_page, inputs, table, **fast)
        table.narrow(self.narrow, inputs, [table, *self.filters], **fast)
        table.tick(self.enable, [table, self.status], buttons, **fast)
        table.open(self.open, table, [run.panel, *run.outputs], **fast)
        menus = [self.target, self.method, self.further, self.group]
        for refresh in (table.refresh, self.refresh.click):
            refresh(self.draw, inputs, table, **fast).then(
                self.fill_menus, self.further, menus, **fast
            )
        self.copy.click(None, None, None, js=COPY_LINK, **fast)

        self.compare.click(self.start_comparison, inputs, table, **fast).then(
            self.compare_runs, inputs, compared, **fast
        )
        self.comparison.close.click(partial(self.draw, compare=None), inputs, table, **fast).then(
            self.compare_runs, inputs, compared, **fast
        )
        for button, act in ((self.tag, "add"), (self.untag, "remove")):
            change = partial(self.retag, act)
            button.click(change, [table, self.tag_names], message, **fast).then(
                self.draw, inputs, table, **fast
            )
        undoable = [message, self.deleted, self.undo]
        self.delete.click(self.delete_ticked, [table, self.status], undoable, **fast).then(
            self.draw_unticked, inputs, table, **fast
        ).then(self.enable, [table, self.status], buttons, **fast)
        self.undo.click(
            partial(self.set_deleted, deleted=False), self.deleted, undoable, **fast
        ).then(self.draw, inputs, table, **fast)

        importing = self.files.listen(inputs, message)
        importing.then(self.draw, inputs, table, **fast)

        leaves: list[Any] = [part.submit for part in (run.name, run.tags)]
        leaves += [part.blur for part in (run.name, run.tags, run.note)]
        gr.on(leaves, run.save, run.texts, message, **fast).then(self.draw, inputs, table, **fast)
        repeated = [run.panel, run.again, run.stop, run.id]
        run.again.click(
            run.run_again, [run.id, self.tab], repeated, concurrency_limit=None, **QUEUED
        ).then(run.show, run.id, run.outputs, **fast).then(
            self.draw_repeated, [run.id, *inputs], table, **fast
        )
        run.stop.click(run.stop_runs, self.tab, None, **fast)

    # ---- the table

    def query(self, inputs: Sequence[Any], **changes: Any) -> TableQuery:
        """The query that the components make. Raises ConfigError: a filter is none."""
        table, search, status, target, method, further, group, _ = inputs
        before = _mapping(_mapping(table).get("query"))
        values = {key: before[key] for key in PLACE if key in before}
        values |= {"text": search or "", "target": target or None, "method_title": method or None}
        values |= {"status": None if status == DELETED else status or None}
        values |= {"deleted": status == DELETED, "group": group or None}
        values |= read_filters(texts(further), {n: figure.title for n, figure in FIGURES.items()})
        query = TableQuery.parse(values).after(TableQuery.parse(before))
        return query.replace(**changes) if changes else query

    def draw(self, *inputs: Any, **changes: Any) -> dict[str, Any]:
        """The table's new value; a fault is shown above the old rows."""
        value = attempt(
            lambda: self.value(self.query(inputs, **changes), inputs[-1]), where="the run log"
        )
        return _with_fault(inputs, value) if isinstance(value, Fault) else value

    def value(self, query: TableQuery, columns: Any, **more: Any) -> dict[str, Any]:
        link = query.link_values
        text = json.dumps(link) if link else ""
        return {**self.runs.view(query, texts(columns)), "query": link, "link": text, **more}

    def draw_unticked(self, *inputs: Any) -> dict[str, Any]:
        return {**self.draw(*inputs), "untick": True, "ticked": []}

    def draw_repeated(self, run_id: str, *inputs: Any) -> dict[str, Any]:
        return {**self.draw(*inputs), "opened": run_id}

    def open(self, table: Any) -> list[Any]:
        return self.open_run.opened(_mapping(_mapping(table).get("asked")).get("id"))

    def draw_page(self, *inputs: Any) -> dict[str, Any]:
        """Another page, or another order."""
        request = _mapping(_mapping(inputs[0]).get("asked"))
        if "sort" not in request:
            return self.draw(*inputs, page=request.get("page", 0))
        query = attempt(lambda: self.query(inputs).sorted_by(request["sort"]), where="the run log")
        if isinstance(query, Fault):
            return _with_fault(inputs, query)
        return self.value(query, inputs[-1])

    def narrow(self, *inputs: Any) -> list[Any]:
        """Show the runs of the group that was picked."""
        value = _mapping(_mapping(inputs[0]).get("asked")).get("value")
        query = attempt(lambda: self.query(inputs).in_group(value), where="the run log")
        if isinstance(query, Fault):
            return [_with_fault(inputs, query), *[gr.skip()] * len(self.filters)]
        return self.restored(query, inputs[-1])

    def restored(self, query: TableQuery, columns: Any = (), **more: Any) -> list[Any]:
        """Updates of the table and all filters that show a query."""
        further = filter_texts(query)
        menus = self.runs.menus(further)
        return [
            self.value(query, columns, **more),
            query.text,
            DELETED if query.deleted else query.status or "",
            gr.Dropdown(choices=menus["targets"], value=query.target or ""),
            gr.Dropdown(choices=menus["methods"], value=query.method_title or ""),
            gr.Dropdown(choices=menus["filters"], value=further),
            gr.Dropdown(choices=menus["groups"], value=query.group or ""),
        ]

    def fill_menus(self, further: Any) -> list[Any]:
        return [gr.Dropdown(choices=menu) for menu in self.runs.menus(texts(further)).values()]

    # ---- ticked runs

    def enable(self, table: Any, status: str) -> list[Any]:
        """Enable the buttons for the ticked runs."""
        ticked = len(_ticked(table))
        return [
            gr.Button(f"Compare {ticked or ''}", interactive=ticked > 1),
            *[gr.Button(interactive=ticked > 0)] * 2,
            gr.Button("Restore" if status == DELETED else "Delete", interactive=ticked > 0),
            gr.Button(f"Export {ticked or 'all'}"),
        ]

    def retag(self, act: str, table: Any, names: str) -> str:
        """Add tags to the ticked runs, or take them off."""

        def change() -> str:
            tags = split_tags(names)
            if not tags:
                raise ConfigError("Enter a tag.")
            Selection.parse({"ids": _ticked(table), act: tags}).apply(self.log)
            return (
                f"{'Tagged' if act == 'add' else 'Untagged'} {plural(len(_ticked(table)), 'run')}."
            )

        return message_html(attempt(change, where="tagging runs"))

    def delete_ticked(self, table: Any, status: str) -> list[Any]:
        """Delete the ticked runs; where deleted ones are shown, restore them."""
        return self.set_deleted(_ticked(table), status != DELETED)

    def set_deleted(self, ids: Any, deleted: bool) -> list[Any]:
        """Hide runs, or show them again; what was hidden can be brought back by one click."""

        def change() -> str:
            Selection.parse({"ids": ids, "deleted": deleted}).apply(self.log)
            return f"{'Deleted' if deleted else 'Restored'} {plural(len(ids), 'run')}."

        done = attempt(change, where="deleting runs")
        undo = deleted and not isinstance(done, Fault)
        return [message_html(done), ids if undo else None, gr.Button(visible=undo)]

    # ---- comparison

    def start_comparison(self, *inputs: Any) -> dict[str, Any]:
        return self.draw(*inputs, compare=_ticked(inputs[0]))

    def compare_runs(self, *inputs: Any) -> list[Any]:
        """Updates of the comparison."""
        query = attempt(lambda: self.query(inputs), where="comparing runs")
        if isinstance(query, Fault):
            return [gr.skip()] * len(self.comparison.outputs)
        return self.comparison.show(query)

    # ---- links

    def listen_to_links(self, page: gr.Blocks) -> None:
        """`?run=ID` opens that run, `?runs=…` that table; other links leave the page as it is."""
        run = self.open_run
        # Outside the tab: in one that was never opened it would not be read.
        memory = gr.BrowserState([], storage_key="pg-runs", secret="pg-runs")
        self.columns.input(lambda names: [names], self.columns, memory, **QUIET)
        outputs = [self.message, self.columns, *self.outputs, run.panel, *run.outputs]
        page.load(self.follow_link, memory, outputs, **QUIET).then(
            self.compare_runs, self.inputs, self.comparison.outputs, **QUIET
        )

    def follow_link(self, memory: Any, request: gr.Request) -> list[Any]:
        """What a link, and what this browser remembers, make of the page."""
        params = link_to("runs", request.query_params)
        run_id, link = params.get("run"), params.get("runs")
        columns = memory[0] if isinstance(memory, list) and memory else None
        parsed = attempt(
            lambda: read_link(link) if link else TableQuery(), where="following a link"
        )
        message = message_html(parsed) if isinstance(parsed, Fault) else ""
        query = TableQuery() if isinstance(parsed, Fault) else parsed
        columns = texts(columns) or [column.key for column in COLUMNS if column.usual]
        run = self.open_run
        opened = run.opened(run_id) if run_id else [gr.skip()] * (1 + len(run.outputs))
        return [message, columns, *self.restored(query, columns, opened=run_id), *opened]


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _with_fault(inputs: Sequence[Any], fault: Fault) -> dict[str, Any]:
    """The table as it was, under a sentence."""
    return {**_mapping(inputs[0]), "fault": fault.sentence}


def _ticked(table: Any) -> list[str]:
    return texts(_mapping(table).get("ticked"))
