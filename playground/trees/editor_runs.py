"""Finished runs made with the tree on show: what was measured, beside what is predicted."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

from engine.drafters import parse_method
from engine.drafters.method import MethodConfig
from engine.errors import ConfigError
from playground.trees.editor_methods import DYNAMIC_FIELDS
from playground.trees.editor_sources import is_greedy
from storage import RunDetail, RunLog, RunQuery

LOOKED_THROUGH = 80
SHOWN = 5
REMEMBERED = 400


class TreeRuns:
    """Finds the newest runs of a tree; a finished run is read once."""

    def __init__(self, log: RunLog) -> None:
        self._log = log
        self._known: OrderedDict[str, RunDetail] = OrderedDict()
        self._lock = threading.Lock()

    def rows(self, config: MethodConfig, target: str) -> list[dict[str, Any]]:
        """Greedy completed runs of this target with these very settings, newest first."""
        wanted = _compared(config)
        query = RunQuery(
            target=target,
            decoding_type=config.decoding_type,
            status="completed",
            limit=LOOKED_THROUGH,
        )
        found = []
        for row in self._log.find(query).rows:
            run = self._detail(row.id)
            if run is not None and is_greedy(run) and _made_with(run) == wanted:
                found.append(_row(run))
            if len(found) == SHOWN:
                break
        return found

    def _detail(self, run_id: str) -> RunDetail | None:
        with self._lock:
            if run_id not in self._known:
                detail = self._log.get(run_id)
                if detail is None:
                    return None
                self._known[run_id] = detail
                while len(self._known) > REMEMBERED:
                    self._known.popitem(last=False)
            return self._known[run_id]


def _made_with(run: RunDetail) -> dict[str, Any] | None:
    try:
        return _compared(parse_method(run.method, where=f"run {run.id}"))
    except ConfigError:
        return None  # of another version, or of a method that is not offered here


def _compared(config: MethodConfig) -> dict[str, Any]:
    """The settings that have an effect: a static tree's size does not, if the tree is grown."""
    kept = config.model_dump()
    kept.pop("num_medusa_heads", None)
    if "use_dynamic_tree" in kept and "eagle_choices" in kept:
        unused = ("eagle_choices",) if kept["use_dynamic_tree"] else DYNAMIC_FIELDS
        for name in unused:
            del kept[name]
    return kept


def _row(run: RunDetail) -> dict[str, Any]:
    return {
        "id": run.id,
        "prompt": " ".join((run.name or run.prompt_text).split())[:120],
        "mat": run.mat,
        "tok_s": run.tok_s,
        "dtype": run.dtype,
        "when": run.created_at.isoformat(),
    }
