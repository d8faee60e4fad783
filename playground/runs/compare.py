"""Compares runs by configuration: the settings that differ, and every figure with its spread."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from engine.errors import ConfigError
from engine.metrics import ratio
from playground.runs.columns import SPLIT
from playground.runs.settings import (
    SettingTexts,
    Types,
    chosen,
    defaults,
    differences,
    machine,
    non_default,
)
from playground.runs.table import Divisor
from storage import RunDetail, RunLog, Spread

FIGURES = (
    "tok_s speedup mat draft_acceptance ttft_s itl_ms step_p50_ms step_p95_ms num_new_tokens"
).split()
RATES = frozenset({"tok_s", "speedup"})
MAX_RUNS = 200
Values = Sequence[float | None]


@dataclass(frozen=True, slots=True)
class Configuration:
    """Compared runs of equal settings but for the seed: repeats, or several prompts.

    Attributes:
        values: of every figure, a value per run; None where a run has none.
        decode_s: seconds from first to last commit, per run; None where a run has no speed.
    """

    setup_id: str
    title: str
    settings: str
    lossless: bool | None
    run_ids: tuple[str, ...]
    num_prompts: int
    values: Mapping[str, Values]
    decode_s: Values

    @property
    def name(self) -> str:
        return " · ".join(filter(None, (self.title, self.settings)))

    def spread(self, figure: str) -> Spread | None:
        """Mean and sample standard deviation over the runs that have the figure.

        The mean of a rate is weighted by the runs' seconds: tokens of all runs over the seconds of
        all runs, so that the baseline is 1.00 times itself.
        """
        pairs = zip(self.values[figure], self.decode_s, strict=True)
        having = [(value, seconds) for value, seconds in pairs if value is not None]
        if not having:
            return None
        values = [value for value, _ in having]
        weights = [seconds or 0.0 for _, seconds in having] if figure in RATES else None
        mean = fmean(values, weights)
        return Spread(mean, stdev(values) if len(values) > 1 else None, len(values))


@dataclass(frozen=True, slots=True)
class ComparedRuns:
    """What the ticked runs have different, and how fast they were.

    Attributes:
        differences: texts per configuration of every setting that differs.
        machine: the same of versions and machines.
    """

    configurations: tuple[Configuration, ...]
    differences: Mapping[str, Sequence[str]]
    machine: Mapping[str, Sequence[str]]


def compare_runs(log: RunLog, ids: Sequence[str], types: Types) -> ComparedRuns:
    """Raises ConfigError: too many, or fewer than two of them are in the log."""
    if len(ids) > MAX_RUNS:
        raise ConfigError(f"At most {MAX_RUNS} runs can be compared, got {len(ids)}.")
    runs = list(log.details(ids))
    if len(runs) < 2:
        raise ConfigError("Select at least two runs to compare.")
    base = Divisor.of(log, runs)
    groups: dict[str, list[RunDetail]] = {}
    for run in runs:
        groups.setdefault(run.setup_id, []).append(run)
    machines = [SettingTexts.of([machine(run) for run in group]) for group in groups.values()]
    return ComparedRuns(
        tuple(_configuration(group, types, base) for group in groups.values()),
        differences([_settings(group, types) for group in groups.values()]),
        differences(machines),
    )


def _settings(group: Sequence[RunDetail], types: Types) -> SettingTexts:
    """A configuration's settings, and which prompts and labels its runs have."""
    run = group[0]
    usual = defaults(run.decoding_type, types)
    same = frozenset(f"method.{k}" for k, v in usual.items() if run.method.get(k) == v)
    prompts = [{"prompt": " ".join(run.prompt_text.split())} for run in group]
    settings = [chosen(run) | prompt for run, prompt in zip(group, prompts, strict=True)]
    return SettingTexts.of(settings, same)


def _configuration(group: Sequence[RunDetail], types: Types, base: Divisor) -> Configuration:
    run = group[0]
    return Configuration(
        setup_id=run.setup_id,
        title=run.method_title,
        settings=non_default(run, types),
        lossless=run.lossless,
        run_ids=tuple(run.id for run in group),
        num_prompts=len({run.prompt_id for run in group}),
        values={
            name: [
                _finite(base.speedup(r) if name == "speedup" else getattr(r, name)) for r in group
            ]
            for name in (*FIGURES, *SPLIT)
        },
        decode_s=[ratio(r.num_new_tokens - 1, r.tok_s) for r in group],
    )


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
