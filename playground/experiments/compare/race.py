"""The recorded clocks of a comparison's runs, for their replay side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.errors import ConfigError
from playground.host.live import LiveRuns
from storage import RunLog

MAX_RUNS = 8


class Clocks:
    """Reads when every commit of a run happened, from memory or from the log."""

    def __init__(self, runs: LiveRuns, log: RunLog) -> None:
        self._runs = runs
        self._log = log

    def of(self, run_ids: Sequence[str]) -> list[dict[str, Any]]:
        """Of every run: `at_s`, seconds from its request to each commit, and `num` committed there.

        Entry 0 is the prefill's first token; entry n is step n - 1, as the step records have it.

        Raises:
            ConfigError: too many runs, or one that is not in the log.
        """
        if len(run_ids) > MAX_RUNS:
            raise ConfigError(f"At most {MAX_RUNS} runs race at once, got {len(run_ids)}.")
        return [self._clock(run_id) for run_id in run_ids]

    def _clock(self, run_id: str) -> dict[str, Any]:
        live = self._runs.get(run_id)
        if live is not None and live.first is not None:
            return _clock(run_id, live.first.ttft_s, live.rows)
        detail = self._log.get(run_id)
        if detail is None:
            raise ConfigError(f"No run {run_id:.80} is in the log. It may have been deleted.")
        if detail.first_token_id is None:
            return _clock(run_id, None, ())
        return _clock(run_id, detail.ttft_s or 0.0, self._log.steps(run_id))


def _clock(run_id: str, ttft_s: float | None, rows: Sequence[Any]) -> dict[str, Any]:
    first_s, first_num = ([], []) if ttft_s is None else ([ttft_s], [1])
    return {
        "run": run_id,
        "at_s": [*first_s, *(row.at_s for row in rows)],
        "num": [*first_num, *(row.num_committed for row in rows)],
    }
