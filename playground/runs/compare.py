"""Compares runs by configuration: the settings that differ, and every figure with its spread."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.errors import ConfigError
from engine.formats import DASH
from engine.metrics import ratio
from playground.host.catalog import MethodTypes
from playground.runs.settings import changed_settings, flatten, machine, non_default, short
from playground.runs.table import own_speedup
from storage import RunDetail, RunLog, RunSummary, Spread

FIGURES = (
    "tok_s speedup mat draft_acceptance ttft_s itl_ms step_p50_ms step_p95_ms num_new_tokens"
).split()
RATES = frozenset({"tok_s", "speedup"})
MAX_RUNS = 200


@dataclass(frozen=True, slots=True)
class Configuration:
    """Compared runs with equal settings except the seed: repeats, or several prompts.

    Attributes:
        spreads: of every figure; None where no run has it.
    """

    title: str
    settings: str
    lossless: bool | None
    run_ids: tuple[str, ...]
    num_prompts: int
    spreads: Mapping[str, Spread | None]


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
        tuple(_configuration(group, types) for group in groups.values()),
        differences(settings, {f"method.{name}" for name in at_defaults}),
        differences([setting_texts(map(machine, group)) for group in groups.values()]),
    )


def _configuration(group: Sequence[RunDetail], types: MethodTypes) -> Configuration:
    run = group[0]
    return Configuration(
        title=run.method_title,
        settings=non_default(run, types),
        lossless=run.lossless,
        run_ids=tuple(run.id for run in group),
        num_prompts=len({run.prompt_id for run in group}),
        spreads={name: _spread(group, name) for name in FIGURES},
    )


def _spread(group: Sequence[RunDetail], name: str) -> Spread | None:
    """Mean and standard deviation over the runs that have the figure.

    Rates are weighted by the runs' seconds, so that their mean is the tokens of all over the
    seconds of all.
    """
    pairs = [(r, v) for r in group if (v := _figure(r, name)) is not None and math.isfinite(v)]
    terms = [
        (w, w * w, w * v, w * v * v)
        for run, v in pairs
        if (w := ratio(run.num_new_tokens - 1, run.tok_s) if name in RATES else 1.0)
    ]
    return Spread.of_sums(*map(math.fsum, zip(*terms, strict=True))) if terms else None


def _figure(run: RunDetail, name: str) -> float | None:
    if name == "speedup":
        return own_speedup(run, run.metrics)
    figure: float | None = getattr(run, name)
    return figure


# ---- settings that differ


def run_settings(run: RunSummary) -> dict[str, Any]:
    """All settings of a run, flat: `method.max_draft_len`, `sampling.top_k`, `label.turn`.

    Without the seed of a greedy run, which has no effect.
    """
    sampling = dict(run.sampling)
    if not sampling.get("temperature"):
        sampling.pop("seed", None)
    groups = {"method": run.method, "sampling": sampling, "limits": run.limits, "label": run.labels}
    return {"target": run.target, "dtype": run.dtype, "device": run.device} | flatten(
        {name: values for name, values in groups.items() if values}
    )


Texts = Mapping[str, Collection[str]]
"""The distinct values of each setting in the runs of a configuration, as short texts."""


def setting_texts(all_settings: Iterable[Mapping[str, Any]]) -> Texts:
    texts: dict[str, set[str]] = {}
    for settings in all_settings:
        for name, value in settings.items():
            texts.setdefault(name, set()).add(short(value))
    return texts


def differences(
    configurations: Sequence[Texts], ignored: Collection[str] = ()
) -> dict[str, list[str]]:
    """The settings that differ between configurations, or between the runs of a single one.

    Returns:
        A text per configuration for each name; a dash where a configuration lacks it.
    """
    names = dict.fromkeys(name for each in configurations for name in each if name not in ignored)
    rows = {name: [sorted(each.get(name, [DASH])) for each in configurations] for name in names}
    return {
        name: [", ".join(texts) for texts in row]
        for name, row in rows.items()
        if any(texts != row[0] for texts in row) or (len(row) == 1 and len(row[0]) > 1)
    }
