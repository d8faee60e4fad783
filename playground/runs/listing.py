"""The table of the Runs page: a page of the log, groups of it, and what can be filtered by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from playground.runs.query import PAGE_SIZE, read_group, read_query
from playground.runs.settings import Types, changed
from storage import Circumstance, RunGroup, RunLog, RunSummary, Spread
from storage.filters import Figure, names_of

PLAIN = "Autoregressive"
"""Decoding type that a speedup divides by unless another setup is pinned."""
MAX_GROUPS = 200
SAME = (
    "id",
    "status",
    "target",
    "decoding_type",
    "method_title",
    "lossless",
    "dtype",
    "device",
    "setup_id",
    "prompt_id",
    "benchmark_id",
    "finish_reason",
    "name",
    "note",
    "deleted",
    *names_of(Figure),
)


class RunList:
    """Answers the table's questions.

    Args:
        types: config class of each decoding type; what is left at its default is not shown.
    """

    def __init__(self, log: RunLog, types: Types | None = None) -> None:
        self._log = log
        self._types = types or {}

    def page(self, asked: Any) -> dict[str, Any]:
        """One page of runs as the table draws it; `baseline` is a setup to divide speeds by.

        Raises:
            ConfigError: the question is malformed.
        """
        found = self._log.find(read_query(asked))
        base = self.base_rates(found.rows, asked.get("baseline"))
        rows = [self.row_of(run, base) for run in found.rows]
        return {"rows": rows, "total": found.total, "page_size": PAGE_SIZE}

    def groups(self, asked: Any) -> dict[str, Any]:
        """Runs with something in common, averaged; `group` says what.

        Raises:
            ConfigError: the question is malformed.
        """
        query = read_query(asked)
        found = self._log.groups(query, read_group(asked.get("group")), MAX_GROUPS)
        return {"groups": [self._group(group) for group in found], "most": MAX_GROUPS}

    def facets(self, asked: Any = None) -> dict[str, Any]:
        """The different values of what can be filtered by."""
        return asdict(self._log.facets())

    def base_rates(
        self, rows: Sequence[RunSummary], baseline: object
    ) -> Mapping[Circumstance, Spread]:
        """tok/s that these runs' speedups divide by: of the pinned setup, or of plain decoding."""
        prompts = [run.prompt_id for run in rows]
        if isinstance(baseline, str) and baseline:
            return self._log.rates(prompts, setup_id=baseline)
        return self._log.rates(prompts, decoding_type=PLAIN)

    def row_of(self, run: RunSummary, base: Mapping[Circumstance, Spread]) -> dict[str, Any]:
        """A row of the table, plain JSON."""
        return {
            **{name: getattr(run, name) for name in SAME},
            "created_at": run.created_at.isoformat(),
            "prompt": run.prompt_text,
            "settings": changed(run, self._types),
            "tags": list(run.tags),
            "labels": dict(run.labels),
            "temperature": run.sampling.get("temperature"),
            "seed": run.sampling.get("seed"),
            "speedup": speedup(run, base),
        }

    def _group(self, group: RunGroup) -> dict[str, Any]:
        return {
            "value": group.value,
            "num_runs": group.num_runs,
            "newest_at": group.newest_at.isoformat(),
            "example": self.row_of(group.example, {}),
            "figures": {name: asdict(spread) for name, spread in group.figures.items()},
        }


def speedup(run: RunSummary, base: Mapping[Circumstance, Spread]) -> float | None:
    """tok/s over the baseline's on the same target, prompt, dtype and device; None without one."""
    rate = base.get(Circumstance(run.target, run.prompt_id, run.dtype, run.device))
    if rate is None or run.tok_s is None or rate.mean <= 0:
        return None
    return run.tok_s / rate.mean
