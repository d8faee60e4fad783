"""Compares ticked runs: only the settings that differ, and every figure with its spread."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import fmean, stdev
from typing import Any

from engine.errors import ConfigError
from playground.runs.listing import RunList, speedup
from playground.runs.query import read_ids, read_mapping
from playground.runs.settings import (
    Column,
    Types,
    changed,
    defaults,
    differences,
    settings_of,
    surroundings_of,
    values_in_words,
    words,
)
from storage import Circumstance, RunDetail, RunLog, Spread

FIGURES = (
    "tok_s",
    "speedup",
    "mat",
    "draft_acceptance",
    "ttft_s",
    "itl_ms",
    "step_p50_ms",
    "step_p95_ms",
    "num_new_tokens",
)
SPLIT = ("draft_s", "verify_s", "accept_s", "other_s")
MAX_RUNS = 200
Rates = Mapping[Circumstance, Spread]


class Comparison:
    """Answers the compare view; `types` as for `RunList`."""

    def __init__(self, log: RunLog, types: Types | None = None) -> None:
        self._log = log
        self._list = RunList(log, types)
        self._types = types or {}

    def compare(self, asked: Any) -> dict[str, Any]:
        """The runs of `ids`, put together by setup: repeats and prompts of one are its spread.

        Raises:
            ConfigError: the question is malformed, or fewer than two runs are there.
        """
        raw = read_mapping("The question", asked)
        ids = read_ids(raw.get("ids"))
        if len(ids) > MAX_RUNS:
            raise ConfigError(f"At most {MAX_RUNS} runs can be compared, got {len(ids)}.")
        runs = [run for run_id in ids if (run := self._log.get(run_id)) is not None]
        if len(runs) < 2:
            raise ConfigError("Tick at least two runs to compare them.")
        rates = self._list.base_rates(runs, raw.get("baseline"))
        setups: dict[str, list[RunDetail]] = {}
        for run in runs:
            setups.setdefault(run.setup_id, []).append(run)
        groups = list(setups.values())
        different = differences([self._chosen(group) for group in groups])
        return {
            "setups": [self._setup(group, rates, raw.get("baseline")) for group in groups],
            "differences": different,
            "surroundings": differences([_surroundings(group) for group in groups]),
            "lines": _lines(groups, rates, [row["name"] for row in different]),
        }

    def _chosen(self, group: Sequence[RunDetail]) -> Column:
        """A setup's settings, and which prompts and labels its runs have."""
        prompts = values_in_words([{"prompt": " ".join(r.prompt_text.split())} for r in group])
        usual = defaults(group[0].decoding_type, self._types)
        same = {f"method.{k}" for k, v in usual.items() if group[0].method.get(k) == v}
        values = values_in_words([_axes_of(run) for run in group])
        return Column(values | prompts, frozenset(same))

    def _setup(self, group: Sequence[RunDetail], rates: Rates, baseline: object) -> dict[str, Any]:
        first = group[0]
        return {
            "id": first.setup_id,
            "title": first.method_title,
            "settings": changed(first, self._types),
            "target": first.target,
            "lossless": first.lossless,
            "baseline": first.setup_id == baseline,
            "runs": [run.id for run in group],
            "num_prompts": len({run.prompt_id for run in group}),
            "figures": {name: _figure(group, rates, name) for name in FIGURES},
            "split": {name: mean_of([getattr(run, name) for run in group]) for name in SPLIT},
        }


def _surroundings(group: Sequence[RunDetail]) -> Column:
    return Column(values_in_words([surroundings_of(run) for run in group]))


def _axes_of(run: RunDetail) -> dict[str, Any]:
    """Settings and labels of a run, flat; a greedy one without the seed, which decides nothing."""
    settings = settings_of(run)
    if not run.sampling.get("temperature"):
        settings.pop("sampling.seed", None)
    return settings | {f"label.{key}": value for key, value in run.labels.items()}


def _figure(group: Sequence[RunDetail], rates: Rates, name: str) -> dict[str, Any]:
    """A figure of a setup: mean, sample standard deviation, and the value of every run."""
    values = [figure_of(run, rates, name) for run in group]
    return {"values": values, **asdict(spread_of(values))} if any_finite(values) else {}


def figure_of(run: RunDetail, rates: Rates, name: str) -> float | None:
    """One figure of one run; None where it has none, NaN and infinities included."""
    value = speedup(run, rates) if name == "speedup" else getattr(run, name)
    return value if value is not None and math.isfinite(value) else None


def any_finite(values: Sequence[float | None]) -> bool:
    return any(value is not None for value in values)


def spread_of(values: Sequence[float | None]) -> Spread:
    """Mean and sample standard deviation of those that are there."""
    known = [value for value in values if value is not None]
    return Spread(fmean(known), stdev(known) if len(known) > 1 else None, len(known))


def mean_of(values: Sequence[float | None]) -> float | None:
    """The mean of those that are there; None of none."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    return fmean(known) if known else None


def _lines(
    groups: Sequence[Sequence[RunDetail]], rates: Rates, different: Sequence[str]
) -> dict[str, Any]:
    """Parallel coordinates: an axis per setting that differs and per figure, a line per run."""
    runs = [(place, run) for place, group in enumerate(groups) for run in group]
    settings = [_axes_of(run) for _, run in runs]
    known = {name for one in settings for name, value in one.items() if value is not None}
    figures = [(name, [figure_of(run, rates, name) for _, run in runs]) for name in FIGURES]
    return {
        "runs": [run.id for _, run in runs],
        "setups": [place for place, _ in runs],
        "axes": [_axis(name, settings) for name in different if name in known],
        "figures": [{"name": n, "values": v} for n, v in figures if any_finite(v)],
    }


def _axis(name: str, settings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """An axis of a setting: numbers as they are, anything else as words; null where it is not."""
    values = [one.get(name) for one in settings]
    there = [value for value in values if value is not None]
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in there):
        return {"name": name, "values": values, "words": None}
    shown = [words(one[name]) if name in one else None for one in settings]
    order = list(dict.fromkeys(word for word in shown if word is not None))
    places = [None if word is None else order.index(word) for word in shown]
    return {"name": name, "values": places, "words": order}
