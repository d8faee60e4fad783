"""Finished runs made with the tree on show: what was measured, beside what is predicted."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

from engine.tree import Path
from playground.tuning.editor_methods import TreeMethod
from playground.tuning.editor_sources import is_greedy
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

    def rows(
        self, method: TreeMethod, target: str, paths: tuple[Path, ...]
    ) -> list[dict[str, Any]]:
        """Greedy completed runs of this target with this tree or draft length, newest first."""
        wanted = method.with_tree(paths).model_dump(mode="json")
        query = RunQuery(
            target=target,
            decoding_type=method.config.decoding_type,
            status="completed",
            limit=LOOKED_THROUGH,
        )
        found = []
        for row in self._log.find(query).rows:
            run = self._detail(row.id)
            if run is not None and is_greedy(run) and self._made_so(run, method, wanted):
                found.append(_row(run))
            if len(found) == SHOWN:
                break
        return found

    def _made_so(self, run: RunDetail, method: TreeMethod, wanted: dict[str, Any]) -> bool:
        if run.method.get("adaptive"):
            return False
        if method.kind != "dynamic":
            return bool(run.method.get(method.field) == wanted[method.field])
        return all(run.method.get(name) == wanted[name] for name in method.settings())

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


def _row(run: RunDetail) -> dict[str, Any]:
    return {
        "id": run.id,
        "prompt": " ".join((run.name or run.prompt_text).split())[:120],
        "mat": run.mat,
        "tok_s": run.tok_s,
        "dtype": run.dtype,
        "when": run.created_at.isoformat(),
    }
