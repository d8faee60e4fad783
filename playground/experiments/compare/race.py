"""The runs of a comparison, to be raced on their recorded clocks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.errors import ConfigError
from playground.experiments.report.report import Results
from playground.host.live import LiveRuns
from playground.host.stream import stored_run
from storage import RunLog, RunQuery, StepRow

MAX_RUNS = 8
"""That race at once."""
RunKey = tuple[str, int, str]
"""Prompt, repeat, configuration."""


@dataclass(frozen=True, slots=True)
class Race:
    """A comparison's results, and the id of every run that is over, unfinished ones too."""

    results: Results
    runs: Mapping[RunKey, str]

    @classmethod
    def of(cls, log: RunLog, results: Results) -> Race:
        runs = {(r.prompt, r.repeat, r.configuration): r.run_id for r in results.requests}
        of_comparison = RunQuery(benchmark_id=results.benchmark.id, descending=False)
        finished, ids = set(runs.values()), log.ids(of_comparison)
        for run in log.details([run_id for run_id in ids if run_id not in finished]):
            labels = run.labels
            if run.status not in ("running", "completed") and "configuration" in labels:
                key = labels["prompt"], int(labels["repeat"]), labels["configuration"]
                runs.setdefault(key, run.id)
        return cls(results, runs)

    @property
    def prompts(self) -> dict[str, str]:
        """Every prompt that was run, and its beginning, for a menu."""
        run = {prompt for prompt, _, _ in self.runs}
        lines = {}
        for item in self.results.plan.items:
            flat = " ".join(item.turns[0].split())
            begin = flat if len(flat) <= 60 else flat[:59] + "…"
            is_own = item.category == item.suite
            lines[item.id] = begin if is_own else f"{item.category}: {begin}"
        return {name: line for name, line in lines.items() if name in run}

    def median_runs(self, prompt: str) -> list[str]:
        """Of every configuration the run on this prompt that decoded for the median time.

        Of an even number it is the faster of the two in the middle; one that finished nothing
        shows the last that it began.
        """
        run_ids: list[str] = []
        for name in self.results.plan.names:
            own = (prompt, name)
            finished = [r for r in self.results.requests if (r.prompt, r.configuration) == own]
            timed = sorted(finished, key=lambda request: request.decode_s)
            begun = [run for (p, _, n), run in self.runs.items() if (p, n) == own]
            run_ids += [timed[(len(timed) - 1) // 2].run_id] if timed else begun[-1:]
        return run_ids

    @property
    def shown(self) -> list[str]:
        """The median runs of the last prompt that as many configurations finished as any other."""
        finished = {(r.prompt, r.configuration) for r in self.results.requests}
        counts = {prompt: sum(p == prompt for p, _ in finished) for prompt in self.prompts}
        most = max(counts.values(), default=0)
        prompt = next((p for p in reversed(counts) if counts[p] == most), None)
        return [] if prompt is None else self.median_runs(prompt)

    def to_json(self) -> str:
        """Which run is whose, and the speedups of the table."""
        prompts = self.prompts
        speedups = {
            section.name: None if section.reference else section.overall.speedup
            for section in self.results.report.configurations
        }
        return json.dumps(
            {
                "setup": self.results.about,
                "num_repeats": 1 + max((repeat for _, repeat, _ in self.runs), default=-1),
                "configurations": [
                    {"name": name, "speedup": speedup and speedup.text}
                    for name, speedup in speedups.items()
                ],
                "prompts": list(prompts.items()),
                "runs": [[*key, run] for key, run in self.runs.items()],
                "medians": {prompt: self.median_runs(prompt) for prompt in prompts},
            }
        )


def race_clocks(runs: LiveRuns, log: RunLog, run_ids: Sequence[str]) -> list[dict[str, Any]]:
    """Of every run: `at_s`, seconds from its request to each commit, and `num` committed there.

    Entry 0 is the prefill's first token; entry n is step n - 1, as the step records have it.
    """
    if len(run_ids) > MAX_RUNS:
        raise ConfigError(f"At most {MAX_RUNS} runs race at once, got {len(run_ids)}.")
    return [_clock(runs, log, run_id) for run_id in run_ids]


def _clock(runs: LiveRuns, log: RunLog, run_id: str) -> dict[str, Any]:
    live = runs.get(run_id)
    ttft_s: float | None
    rows: Sequence[StepRow] | None = None
    if live is not None and live.first is not None:
        ttft_s, rows = live.first.ttft_s, live.rows.read(0)
    if rows is None:
        detail = stored_run(log, run_id if live is None else live.log_id or run_id)
        begun = detail.first_token_id is not None
        ttft_s, rows = (detail.ttft_s or 0.0, log.steps(detail.id)) if begun else (None, ())
    commits = [] if ttft_s is None else [(ttft_s, 1)]
    commits += [(row.at_s, row.num_committed) for row in rows]
    return {"run": run_id, "at_s": [at for at, _ in commits], "num": [num for _, num in commits]}
