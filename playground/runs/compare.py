"""Compares runs by configuration: the settings that differ, and every figure with its spread."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from engine.errors import ConfigError
from engine.metrics import ratio
from playground.host.catalog import MethodTypes
from playground.runs.settings import (
    changed_settings,
    differences,
    flatten,
    machine,
    non_default,
    run_settings,
    setting_texts,
)
from playground.runs.table import Baselines
from storage import RunDetail, RunLog, Spread

FIGURES = (
    "tok_s speedup mat draft_acceptance ttft_s itl_ms step_p50_ms step_p95_ms num_new_tokens"
).split()
RATES = frozenset({"tok_s", "speedup"})
MAX_RUNS = 200
Values = Sequence[float | None]


@dataclass(frozen=True, slots=True)
class Configuration:
    """Compared runs with equal settings except the seed: repeats, or several prompts.

    Attributes:
        values: a value per run of every figure; None where a run has none.
        decode_s: seconds from first to last commit, per run; None where a run has no speed.
    """

    title: str
    settings: str
    lossless: bool | None
    run_ids: tuple[str, ...]
    num_prompts: int
    values: Mapping[str, Values]
    decode_s: Values

    def spread(self, figure: str) -> Spread | None:
        """Mean and sample standard deviation over the runs that have the figure.

        The mean of a rate is weighted by the runs' seconds, and so equals the tokens of all runs
        over their seconds: the speedup of the baseline is 1.00.
        """
        pairs = zip(self.values[figure], self.decode_s, strict=True)
        timed = [(value, seconds) for value, seconds in pairs if value is not None]
        if not timed:
            return None
        values = [value for value, _ in timed]
        weights = [seconds or 0.0 for _, seconds in timed] if figure in RATES else None
        mean = fmean(values, weights)
        return Spread(mean, stdev(values) if len(values) > 1 else None)


@dataclass(frozen=True, slots=True)
class ComparedRuns:
    """How the selected runs differ, and how fast they were.

    Attributes:
        differences: texts per configuration of every setting that differs.
        machine: texts per configuration of every version or machine fact that differs.
    """

    configurations: tuple[Configuration, ...]
    differences: Mapping[str, Sequence[str]]
    machine: Mapping[str, Sequence[str]]


def compare_runs(log: RunLog, ids: Sequence[str], types: MethodTypes) -> ComparedRuns:
    """Raises ConfigError: too many, or fewer than two of them are in the log."""
    if len(ids) > MAX_RUNS:
        raise ConfigError(f"At most {MAX_RUNS} runs can be compared, got {len(ids)}.")
    runs = list(log.details(ids))
    if len(runs) < 2:
        raise ConfigError("Select at least two runs to compare.")
    baselines = Baselines.of(log, runs)
    groups: dict[str, list[RunDetail]] = {}
    for run in runs:
        groups.setdefault(run.setup_id, []).append(run)
    settings = [
        setting_texts(
            run_settings(run) | {"prompt": " ".join(run.prompt_text.split())} for run in group
        )
        for group in groups.values()
    ]
    heads = [group[0] for group in groups.values()]
    at_defaults = {name for run in heads for name in flatten(run.method)} - {"decoding_type"}
    at_defaults -= {name for run in heads for name in changed_settings(run, types)}
    return ComparedRuns(
        tuple(_configuration(group, types, baselines) for group in groups.values()),
        differences(settings, {f"method.{name}" for name in at_defaults}),
        differences([setting_texts(map(machine, group)) for group in groups.values()]),
    )


def _configuration(
    group: Sequence[RunDetail], types: MethodTypes, baselines: Baselines
) -> Configuration:
    run = group[0]
    return Configuration(
        title=run.method_title,
        settings=non_default(run, types),
        lossless=run.lossless,
        run_ids=tuple(run.id for run in group),
        num_prompts=len({run.prompt_id for run in group}),
        values={
            name: [
                _finite(baselines.speedup(r) if name == "speedup" else getattr(r, name))
                for r in group
            ]
            for name in FIGURES
        },
        decode_s=[ratio(r.num_new_tokens - 1, r.tok_s) for r in group],
    )


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
