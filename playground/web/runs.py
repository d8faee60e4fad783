"""The Runs page: the log as a table to filter, annotate, compare and export."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, get_args

import gradio as gr

from engine.errors import ConfigError
from engine.figures import FIGURES
from engine.formats import plural
from playground.errors import Fault, attempt
from playground.host.request import texts
from playground.host.runner import EngineHost
from playground.runs.columns import COLUMNS, SPREAD, formula, spread_text
from playground.runs.compare import FIGURES as COMPARED
from playground.runs.compare import ComparedRuns, Configuration, compare_runs
from playground.runs.details import Selection, split_tags
from playground.runs.query import TableQuery, filter_texts, read_filters, read_link
from playground.runs.reading import History
from playground.runs.table import RunTable
from playground.web.address import link_params
from playground.web.components import module_component
from playground.web.forms import LATEST, QUEUED, UNLABELLED, UNQUEUED, Updates, on_fault
from playground.web.navigator import Navigator
from playground.web.results import HTML, Cell, sentence_html, table_html
from playground.web.run_details import OpenRun
from playground.web.run_files import RunFiles
from storage import Status

DELETED = "deleted"
HIDDEN = ' They are only hidden: choose the status "deleted" to restore or erase them.'
KEPT_KEYS = ("sort", "descending", "page", "compare")
"""Keys of the table's query that survive a change of filters."""
HEADING = HTML.from_string("<h3>{{ title }}</h3>")
TABLE = HTML.from_string("""
{% macro content(kind, value) %}
{% if kind == "tags" %}{% for tag in value %}<span class="tag">{{ tag }}</span>{% endfor %}
{% elif kind == "prompt" %}{% if value[0] %}<b>{{ value[0] }}</b> {% endif %}{{ value[1] }}
{% elif kind == "method" %}{{ value[0] }}{% if value[1] is false %}<i>lossy</i>{% endif %}
{% else %}{{ value }}{% endif %}
{% endmacro %}
<table><thead><tr>
{% if not grouped %}
<td class="tick"><input type="checkbox" aria-label="select the runs of this page"></td>
{% endif %}
{% for one in heads %}
<th class="{{ one.kind }}" data-column="{{ one.key }}" aria-sort="{{ one.sorted or 'none' }}">
  {% if one.sort is none %}{{ one.title | term(one.help) }}{% else %}
  <button type="button" data-sort="{{ one.sort }}" {% if one.help %} class="pg-term"
    data-about="{{ one.help }}"{% endif %}>{{ one.title }}</button>{% endif %}</th>
{% endfor %}
</tr></thead><tbody>
{% for row in rows %}
{% set is_group = grouped or row.experiment is defined %}
<tr class="{{ 'group' if is_group else 'deleted' if row.deleted }}"
  {%- if row.id is not none %} data-{{ "group" if is_group else "id" }}="{{ row.id }}"{% endif %}>
{% if not grouped %}
<td class="tick">{% if not is_group %}<input type="checkbox" aria-label="select this run">
  {%- endif %}</td>
{% endif %}
{% for one in heads %}
{% set text = content(one.kind, row.cells[loop.index0]) | trim %}
<td class="{{ one.kind }} {{ text if one.kind == 'status' }}" data-column="{{ one.key }}"
  title="{{ text | striptags }}">
  {%- if loop.first %}<button type="button">{{ text }}</button>{% else %}{{ text }}{% endif %}
  {%- if one.kind == "prompt" and row.experiment %} <a href="{{ row.experiment }}">report</a>
  {%- endif %}</td>
{% endfor %}
</tr>
{% else %}
<tr class="empty"><td colspan="{{ heads | length + 1 }}">{{ nothing }}</td></tr>
{% endfor %}
</tbody></table>
""")
"""The first cell of a row is a button, for the keyboard."""


class RunsPage:
    """Components and listeners of the page.

    Attributes:
        inputs: the table and the components that select its rows, in the order of `query`.
    """

    def __init__(self, host: EngineHost, history: History, tab: gr.HTML, nav: Navigator) -> None:
        """`tab` identifies the browser tab."""
        self.log, self.tab = host.log, tab
        self.runs = RunTable(host.log, host.catalog.types)
        with gr.Row(elem_id="pg-runs-filters"):
            self._filters()
        with gr.Row(elem_id="pg-runs-actions"):
            self._actions()
        self.message = gr.HTML(elem_id="pg-runs-message", apply_default_css=False)
        self.table = module_component(
            "runs/table.js",
            template='<div class="runs"></div>',
            events=["turn", "narrow", "tick", "open", "refresh"],
            elem_id="pg-runs",
        )
        with gr.Accordion("Columns", open=False, elem_id="pg-runs-columns"):
            self.columns = gr.CheckboxGroup(
                [(column.title, column.key) for column in COLUMNS],
                value=[column.key for column in COLUMNS if column.default],
                **UNLABELLED,
            )
        with gr.Column(visible=False) as comparison:
            table = gr.HTML(elem_id="pg-runs-table", apply_default_css=False)
            self.close = gr.Button("Close", size="sm", elem_id="pg-runs-close")
        self.compared = [comparison, table]
        self.open_run = OpenRun(host, history)
        self.open_run.link(nav, self.message)
        self.filters: list[Any] = [self.search, self.status, self.target, self.method, self.further]
        self.filters.append(self.group)
        self.outputs = [self.table, *self.filters]
        self.inputs = [*self.outputs, self.columns]
        self._listen()
        nav.at_load(self._listen_to_load)

    # ---- layout

    def _filters(self) -> None:
        def menu(name: str, label: str, choices: Any, **more: Any) -> gr.Dropdown:
            about: dict[str, Any] = {"label": label, "elem_id": f"pg-runs-{name}", **more}
            return gr.Dropdown(choices, allow_custom_value=True, **about)

        everything = [("any", "")]
        states = [*everything, *((name, name) for name in (*get_args(Status), DELETED))]
        self.search = gr.Textbox(
            label="Search", placeholder="prompt, name, note, method", elem_id="pg-runs-search"
        )
        self.status = menu("status", "Status", states)
        self.target = menu("target", "Target", everything)
        self.method = menu("method", "Method", everything)
        title = "Filters: tags, labels, …"
        self.further = menu("further", title, [], multiselect=True)
        self.group = menu("group", "Group by", [("experiment", "")])

    def _actions(self) -> None:
        def button(name: str, label: str, **more: Any) -> gr.Button:
            return gr.Button(label, size="sm", elem_id=f"pg-runs-{name}", **more)

        self.compare = button("do-compare", "Compare", variant="primary", interactive=False)
        self.tag_names = gr.Textbox(label="tags", placeholder="comma-separated tags", **UNLABELLED)
        self.tag = button("tag", "Tag", interactive=False)
        self.untag = button("untag", "Untag", interactive=False)
        self.delete = button("delete", "Delete", interactive=False)
        self.erase = button("erase", "Erase", visible=False)
        self.files = RunFiles(self.log, self.query)
        self.undo = button("undo", "Undo", visible=False)
        self.refresh = button("refresh", "Refresh")
        self.deleted = gr.JSON(visible=False)

    # ---- listeners

    def _listen(self) -> None:
        inputs, table, message, run = self.inputs, self.table, self.message, self.open_run
        buttons = [self.compare, self.tag, self.untag, self.delete, self.erase, self.files.export]

        # Gradio's `input` misses what is pasted, and filters that are typed.
        typed = [part.change for part in (*self.filters, self.columns)]
        gr.on(typed, self.draw, inputs, table, **LATEST)
        table.turn(self.draw_page, inputs, table, **LATEST)
        table.narrow(self.narrow, inputs, [table, *self.filters], **LATEST)
        table.tick(self.enable, [table, self.status], buttons, **LATEST)
        table.open(self.show_run, table, run.outputs, **LATEST)
        menus = [self.target, self.method, self.further, self.group]
        for refresh in (table.refresh, self.refresh.click):
            drawn = refresh(self.draw, inputs, table, **UNQUEUED)
            drawn.then(self.fill_menus, self.further, menus, **UNQUEUED)

        hide = partial(self.draw, compare=None)
        for event, change in (
            (self.compare.click, self.start_comparison),
            (self.close.click, hide),
        ):
            drawn = event(change, inputs, table, **UNQUEUED)
            drawn.then(self.show_comparison, inputs, self.compared, **UNQUEUED)

        def redraw_after(event: Any) -> None:
            event.then(self.draw, inputs, table, **UNQUEUED)

        for button, act in ((self.tag, "add"), (self.untag, "remove")):
            retag, tagged = partial(self.retag, act), [table, self.tag_names]
            redraw_after(button.click(retag, tagged, message, **UNQUEUED))
        undoable = [message, self.deleted, self.undo]
        ticked = [table, self.status]
        for event in (
            self.delete.click(self.delete_ticked, ticked, undoable, **UNQUEUED),
            self.erase.click(self.erase_ticked, table, message, **UNQUEUED),
        ):
            event.then(self.draw_unticked, inputs, table, **UNQUEUED).then(
                self.enable, ticked, buttons, **UNQUEUED
            )
        restore = partial(self.set_deleted, deleted=False)
        redraw_after(self.undo.click(restore, self.deleted, undoable, **UNQUEUED))
        redraw_after(self.files.listen(inputs, message))
        for field, part in {"name": run.name, "tags": run.tags, "note": run.note}.items():
            leaves = [part.blur] if field == "note" else [part.submit, part.blur]
            save, texts = partial(run.save, field), [run.id, part]
            redraw_after(gr.on(leaves, save, texts, message, **LATEST))
        repeated = [*run.outputs, run.again, run.stop]
        run.again.click(run.run_again, [run.id, self.tab], repeated, **QUEUED).then(
            run.show, run.id, run.outputs, **UNQUEUED
        ).then(self.draw_repeated, [run.id, *inputs], table, **UNQUEUED)
        run.stop.click(run.stop_runs, self.tab, None, **UNQUEUED)

    # ---- the table

    def query(self, inputs: Sequence[Any], **changes: Any) -> TableQuery:
        """The query that the components describe. Raises ConfigError: a filter is invalid."""
        table, search, status, target, method, further, group, _ = inputs
        before = _mapping(_mapping(table).get("query"))
        values = {key: before[key] for key in KEPT_KEYS if key in before}
        values |= {"text": search or "", "target": target or None, "method_title": method or None}
        values |= {"status": None if status == DELETED else status or None}
        values |= {"deleted": status == DELETED, "group": group or None}
        values |= read_filters(texts(further))
        query = TableQuery.parse(values).after(TableQuery.parse(before))
        return query.replace(**changes) if changes else query

    def draw(self, *inputs: Any, **changes: Any) -> dict[str, Any]:
        """The table's new value; a fault appears above the old rows."""
        return self._table_value(inputs, lambda: self.query(inputs, **changes))

    def _table_value(
        self, inputs: Sequence[Any], query: Callable[[], TableQuery]
    ) -> dict[str, Any]:
        value = attempt(lambda: self.value(query(), inputs[-1]), where="the run log")
        if isinstance(value, Fault):
            return _with_fault(inputs, value)
        return {**value, "turns": _mapping(inputs[0]).get("turns", 0)}

    def value(self, query: TableQuery, columns: Any, **more: Any) -> dict[str, Any]:
        """What `runs/table.js` shows: the rows as HTML, and what is around them."""
        view = self.runs.view(query, texts(columns))
        around = {
            "count": view["count"],
            "pages": view["pages"],
            "query": query.link_values or None,
        }
        return {"html": TABLE.render(view), **around, **more}

    def draw_unticked(self, *inputs: Any) -> dict[str, Any]:
        return {**self.draw(*inputs), "untick": True, "ticked": []}

    def draw_repeated(self, run_id: str, *inputs: Any) -> dict[str, Any]:
        return {**self.draw(*inputs), "opened": run_id}

    def show_run(self, table: Any) -> Updates:
        return self.open_run.opened(_mapping(_mapping(table).get("event_data")).get("id"))

    def draw_page(self, *inputs: Any) -> dict[str, Any]:
        """Another page, or another order."""
        request = _mapping(_mapping(inputs[0]).get("event_data"))
        if "sort" not in request:
            return self.draw(*inputs, page=request.get("page", 0))
        return self._table_value(inputs, lambda: self.query(inputs).sorted_by(request["sort"]))

    def narrow(self, *inputs: Any) -> Updates:
        """Show the runs of the group that was clicked."""
        value = _mapping(_mapping(inputs[0]).get("event_data")).get("value")
        query = attempt(lambda: self.query(inputs).in_group(value), where="the run log")
        if isinstance(query, Fault):
            return {self.table: _with_fault(inputs, query)}
        return self.restored(query, inputs[-1])

    def restored(self, query: TableQuery, columns: Any = (), **more: Any) -> Updates:
        """Updates of the table and all filters for a query."""
        further = filter_texts(query)
        menus = self.runs.menus(further)
        return {
            self.table: self.value(query, columns, **more),
            self.search: query.text,
            self.status: DELETED if query.deleted else query.status or "",
            self.target: gr.Dropdown(choices=menus["targets"], value=query.target or ""),
            self.method: gr.Dropdown(choices=menus["methods"], value=query.method_title or ""),
            self.further: gr.Dropdown(choices=menus["filters"], value=further),
            self.group: gr.Dropdown(choices=menus["groups"], value=query.group or ""),
        }

    def fill_menus(self, further: Any) -> list[Any]:
        return [gr.Dropdown(choices=menu) for menu in self.runs.menus(texts(further)).values()]

    # ---- ticked runs

    def enable(self, table: Any, status: str) -> list[Any]:
        """Updates of the buttons for the ticked runs."""
        ticked, are_deleted = len(_ticked(table)), status == DELETED
        return [
            gr.Button(f"Compare {ticked or ''}", interactive=ticked > 1),
            *[gr.Button(interactive=ticked > 0)] * 2,
            gr.Button("Restore" if are_deleted else "Delete", interactive=ticked > 0),
            gr.Button(visible=are_deleted and ticked > 0),
            gr.Button(f"Export {ticked or 'all'}"),
        ]

    @on_fault(sentence_html, where="tagging runs")
    def retag(self, act: str, table: Any, names: str) -> str:
        """Add tags to the ticked runs, or remove them."""
        tags, ids = split_tags(names), _ticked(table)
        if not tags:
            raise ConfigError("Enter a tag.")
        Selection.parse({"ids": ids, act: tags}).apply(self.log)
        return sentence_html(
            f"{'Tagged' if act == 'add' else 'Untagged'} {plural(len(ids), 'run')}."
        )

    def delete_ticked(self, table: Any, status: str) -> list[Any]:
        """Delete the ticked runs; where deleted ones are shown, restore them."""
        return self.set_deleted(_ticked(table), status != DELETED)

    @on_fault(sentence_html, where="erasing runs")
    def erase_ticked(self, table: Any) -> str:
        """Erase the ticked runs, if they are deleted."""
        num_erased = self.log.erase(Selection.parse({"ids": _ticked(table)}).ids)
        return sentence_html(f"Erased {plural(num_erased, 'run')} for good.")

    def set_deleted(self, ids: Any, deleted: bool) -> list[Any]:
        """Delete or restore runs; a deletion can be undone by one click."""

        def change() -> str:
            Selection.parse({"ids": ids, "deleted": deleted}).apply(self.log)
            done = f"{'Deleted' if deleted else 'Restored'} {plural(len(ids), 'run')}."
            return done + HIDDEN if deleted else done

        done = attempt(change, where="deleting runs")
        undo = deleted and not isinstance(done, Fault)
        return [sentence_html(done), ids if undo else None, gr.Button(visible=undo)]

    # ---- comparison

    def start_comparison(self, *inputs: Any) -> dict[str, Any]:
        return self.draw(*inputs, compare=_ticked(inputs[0]))

    @on_fault(lambda fault: [gr.Column(visible=True), sentence_html(fault)], where="comparing runs")
    def show_comparison(self, *inputs: Any) -> list[Any]:
        """The comparison of the query's runs, or why there is none."""
        ids = self.query(inputs).compare
        html = comparison_html(compare_runs(self.log, ids, self.runs.types)) if ids else ""
        return [gr.Column(visible=bool(ids)), html]

    # ---- links

    def _listen_to_load(self, page: gr.Blocks) -> None:
        """`?run=ID` opens that run, `?runs=…` that table; other links leave the page as it is."""
        # Outside the tab, because in a tab that was never opened it would not be read.
        memory = gr.BrowserState([], storage_key="pg-runs", secret="pg-runs")
        self.columns.input(lambda names: names, self.columns, memory, **LATEST)
        outputs = [self.message, self.columns, *self.outputs, *self.open_run.outputs]
        page.load(self.follow_link, memory, outputs, **UNQUEUED).then(
            self.show_comparison, self.inputs, self.compared, **UNQUEUED
        )

    def follow_link(self, memory: Any, request: gr.Request) -> Updates:
        """Updates for the URL's parameters and the columns that this browser stored."""
        params = link_params("runs", request.query_params)
        run_id, link = params.get("run"), params.get("runs")
        parsed = attempt(
            lambda: read_link(link) if link else TableQuery(), where="following a link"
        )
        message = sentence_html(parsed) if isinstance(parsed, Fault) else ""
        query = TableQuery() if isinstance(parsed, Fault) else parsed
        columns = texts(memory) or [column.key for column in COLUMNS if column.default]
        return {
            self.message: message,
            self.columns: columns,
            **self.restored(query, columns, opened=run_id),
            **(self.open_run.opened(run_id) if run_id else {}),
        }


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _with_fault(inputs: Sequence[Any], fault: Fault) -> dict[str, Any]:
    """The table's old value with a fault."""
    return {**_mapping(inputs[0]), "fault": fault.sentence}


def _ticked(table: Any) -> list[str]:
    return texts(_mapping(table).get("ticked"))


def comparison_html(compared: ComparedRuns) -> str:
    """A row per configuration: the settings and versions that differ, then every figure."""
    configurations, differing = compared.configurations, compared.differences
    num_runs = plural(sum(len(each.run_ids) for each in configurations), "run")
    same = "" if differing else "; all settings are the same"
    title = f"{num_runs} in {plural(len(configurations), 'configuration')}{same}"
    names = [n for n in COMPARED if any(each.spreads[n] for each in configurations)]
    heads = dict.fromkeys(("configuration", *differing, *compared.machine), "")
    heads |= {FIGURES[name].heading: formula(name) + SPREAD for name in names}
    texts = (*differing.values(), *compared.machine.values())
    columns = [
        [_title_cell(each) for each in configurations],
        *([Cell(text, hint=text) for text in column] for column in texts),
        *(_figure_cells(compared, name) for name in names),
    ]
    rows = zip(*columns, strict=True)
    return HEADING.render(title=title) + table_html(title, heads, rows)


def _title_cell(each: Configuration) -> Cell:
    """Its title; below it its settings and number of runs."""
    on = f" on {each.num_prompts} prompts" if each.num_prompts > 1 else ""
    runs = f"{plural(len(each.run_ids), 'run')}{on}"
    lossy = "lossy" if each.lossless is False else ""
    return Cell(each.title, " · ".join(filter(None, (each.settings, runs, lossy))))


def _figure_cells(compared: ComparedRuns, name: str) -> list[Cell]:
    """A figure of every configuration; the best is good."""
    spreads = [each.spreads[name] for each in compared.configurations]
    means = [spread.mean for spread in spreads if spread is not None]
    figure = FIGURES[name]
    best = figure.best(means) if figure.best and len(means) > 1 else None
    return [
        Cell(spread_text(figure, spread), mood="good" if spread and spread.mean == best else "")
        for spread in spreads
    ]
