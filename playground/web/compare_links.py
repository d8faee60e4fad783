"""Addresses that open the Compare page: a comparison of the log, or the configurations of runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import gradio as gr

from engine.errors import ConfigError
from playground.errors import Fault, attempt
from playground.experiments.compare.form import MAX_CONFIGURATIONS
from playground.experiments.compare.links import (
    Filled,
    first_methods,
    from_comparison,
    from_runs,
    method_form,
)
from playground.experiments.compare.stream import fault_message, reopened
from playground.host.catalog import Catalog
from playground.host.request import read_run_id
from playground.host.runner import EngineHost
from playground.host.stream import History


class FillablePage(Protocol):
    """What a link fills: the Compare page's parts."""

    host: EngineHost
    catalog: Catalog
    history: History
    outputs: list[Any]


def updates_of(compare: FillablePage, params: Mapping[str, str]) -> list[Any] | None:
    """Updates of the page's `outputs`; None for any address that is not of this page.

    `compare=ID` shows a comparison; `compare=a,b` and `runs=a,b` take the configurations of runs
    (`runs={…}` is the table of the Runs page). A link that leads nowhere leaves the form alone and
    says so above the panels.
    """
    asked = params.get("compare") or ""
    runs = params.get("runs") or ""
    if not asked and (not runs or runs.startswith("{")):
        return None
    found = attempt(lambda: _opened(compare, asked, runs), where="opening a link")
    if isinstance(found, Fault):
        return [*_untouched(compare), fault_message(found.sentence)]
    return found


def _opened(compare: FillablePage, asked: str, runs: str) -> list[Any]:
    is_run = "," in asked or (asked and compare.host.log.get(asked) is not None)
    return _comparison(compare, asked) if asked and not is_run else _runs(compare, asked or runs)


def _comparison(compare: FillablePage, link: str) -> list[Any]:
    compare_id, log, catalog = read_run_id(link), compare.host.log, compare.catalog
    message = reopened(compare_id, compare.history, log, catalog.types)
    try:
        filled = from_comparison(catalog, log, compare_id)
    except ConfigError:  # its methods are not on offer any more: show it all the same
        return [*_untouched(compare), message]
    return [*_fill(compare, filled), message]


def _runs(compare: FillablePage, link: str) -> list[Any]:
    return [*_fill(compare, from_runs(compare.catalog, compare.host.log, link)), gr.skip()]


def _untouched(compare: FillablePage) -> list[Any]:
    return [gr.skip() for _ in compare.outputs[:-1]]


def _fill(compare: FillablePage, filled: Filled) -> list[Any]:
    """Updates of every output but the panels."""
    catalog = compare.catalog
    choices = catalog.method_choices(filled.target)
    count = max(1, len(filled.slots))
    own, chat = not filled.suite, filled.mode == "chat"
    slots: list[Any] = []
    for i, start in enumerate(first_methods(catalog, choices)):
        slot = filled.slots[i] if i < len(filled.slots) else None
        key = start if slot is None else slot.method
        form = method_form(catalog.method(start)) if slot is None else slot.form
        slots += [gr.update(choices=choices, value=key), form]
    return [
        filled.target,
        filled.dtype,
        gr.update(value=filled.mode, visible=own),
        gr.update(value=filled.system, visible=own and chat),
        gr.update(value=filled.prompt, visible=own),
        filled.suite,
        count,
        *slots,
        *(gr.update(visible=i < count) for i in range(MAX_CONFIGURATIONS)),
        filled.run_form,
    ]
