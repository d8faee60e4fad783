"""The menu of methods, in groups, each with its last measured speedup on this machine.

A speedup counts for a method of the same settings, on the same weights, in the same dtype and on
the same device as the target's newest run.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from engine import formats
from engine.drafters.method import MethodConfig
from engine.errors import ConfigError
from engine.metrics import SAME
from playground.host.baseline import trusted_speedup
from playground.host.catalog import TYPE_PREFIX, Catalog
from playground.host.local_drafters import LOCAL_PREFIX
from playground.host.plain import PLAIN, SAME_PLACE, plain_step_of
from playground.host.result import compare_with_plain
from storage import RunDetail, RunLog, RunQuery, RunSummary

RECOMMENDED, TRAINED, NO_WEIGHTS = "recommended", "trained", "no weights"
LOCAL = "local models"
BASELINE, FURTHER, UNTRAINED = "baseline", "further", "untrained"
GROUPS = {
    RECOMMENDED: "Recommended",
    TRAINED: "Trained for this target",
    NO_WEIGHTS: "No weights",
    LOCAL: "Smaller models on this machine",
    BASELINE: "The baseline",
    FURTHER: "Other types",
    UNTRAINED: "Untrained, for inspection only",
}
"""Groups in order, with their headings."""
MOST_RECOMMENDED = 3
NEWEST = 20
"""Runs of a method that are searched for one of the same settings with a reliable speedup."""

Choices = list[tuple[str, str]]
"""Labels and keys. A label ends with the name of its group."""


class MethodMenu:
    def __init__(self, catalog: Catalog, log: RunLog) -> None:
        self._catalog, self._log = catalog, log

    def choices(self, target: object) -> Choices:
        """Methods for a target by group, the fastest first where their speed is measured."""
        name = target if isinstance(target, str) else ""
        offered = self._catalog.method_choices(name)
        titles = {key: title for title, key in offered if not self._is_duplicate(key, offered)}
        speedups = self._speedups(name, list(titles))
        best = self._recommended(name, speedups)
        groups = {key: RECOMMENDED if key in best else self._group(key) for key in titles}
        places = list(GROUPS)
        ordered = sorted(titles, key=lambda key: (places.index(groups[key]), -speedups.get(key, 0)))
        return [(_label(titles[key], speedups.get(key), groups[key]), key) for key in ordered]

    def drafting(self, target: object) -> Choices:
        """The same without plain decoding."""
        return [(label, key) for label, key in self.choices(target) if not self._is_plain(key)]

    def _speedups(self, target: str, keys: Sequence[str]) -> dict[str, float]:
        newest = self._log.rows(RunQuery(target=target, status="completed", limit=1))
        here = self._log.get(newest[0].id) if newest else None
        if here is None:
            return {}
        measured, runs = self._measured(here), self._single_runs(here)
        settings = {key: settings_of(self._catalog.method(key).config) for key in keys}
        speedups = {
            key: measured.get(name) or self._sure_speedup(runs[name], here)
            for key, name in settings.items()
        }
        return {key: speedup for key, speedup in speedups.items() if speedup is not None}

    def _measured(self, here: RunDetail) -> dict[str, float]:
        """Speedups of the newest experiments on the machine and weights of a run, by settings.

        Experiments measure plain decoding on the same prompts, so they take precedence over
        single runs.
        """
        ranked = sorted(self._log.experiments.setups(), key=lambda one: one.example.created_at)
        speedups: dict[str, float] = {}
        for one in ranked:
            speedup, settings = trusted_speedup(one.counts), self._settings(one.example)
            if speedup is not None and settings and self._in_place(one.example, here):
                speedups[settings] = speedup
        return speedups

    def _single_runs(self, here: RunDetail) -> Mapping[str, list[RunSummary]]:
        """The newest runs of every method in a run's place, newest first, by settings."""
        runs: dict[str, list[RunSummary]] = defaultdict(list)
        place: dict[str, Any] = {
            name: getattr(here, name) for name in ("target", "dtype", "device")
        }
        for name in self._log.decoding_types() - {PLAIN}:
            query = RunQuery(**place, decoding_type=name, status="completed", limit=NEWEST)
            for run in self._log.rows(query):
                if settings := self._settings(run):
                    runs[settings].append(run)
        return runs

    def _sure_speedup(self, runs: Sequence[RunSummary], here: RunDetail) -> float | None:
        """Speedup of the first run in a run's place whose speedup is reliable to two decimals."""
        for row in runs:
            run = self._log.get(row.id) if self._in_place(row, here) else None
            comparison = run and compare_with_plain(run.metrics, plain_step_of(self._log, run))
            if comparison and comparison.is_sure:
                return comparison.speedup
        return None

    def _settings(self, run: RunSummary) -> str | None:
        """Of a stored run; None where its method is not available here."""
        try:
            return settings_of(self._catalog.types[run.decoding_type].parse(run.method))
        except (KeyError, ConfigError):
            return None

    def _in_place(self, run: RunSummary, here: RunDetail) -> bool:
        """Whether a run is of the same weights, dtype and device as another."""
        if (run.target, run.dtype, run.device) != (here.target, here.dtype, here.device):
            return False
        detail = self._log.get(run.id)
        environment = detail.environment if detail else {}
        return all(environment.get(key) == here.environment.get(key) for key in SAME_PLACE)

    def _recommended(self, target: str, speedups: dict[str, float]) -> Sequence[str]:
        """The fastest that are faster than plain decoding; before any is measured, the first."""
        faster = [key for key, speedup in speedups.items() if speedup > 1 + SAME]
        fast = [key for key in faster if self._group(key) != UNTRAINED]
        first = [] if speedups else [self._catalog.first_method(target)]
        return sorted(fast, key=lambda key: -speedups[key])[:MOST_RECOMMENDED] or [
            key for key in first if self._group(key) != UNTRAINED
        ]

    def _group(self, key: str) -> str:
        if self._is_plain(key):
            return BASELINE
        if key.startswith(TYPE_PREFIX):
            return FURTHER
        preset = self._catalog.presets[key]
        if preset.untrained:
            return UNTRAINED
        if key.startswith(LOCAL_PREFIX):
            return LOCAL
        return TRAINED if self._catalog.is_trained(key) else NO_WEIGHTS

    def _is_plain(self, key: str) -> bool:
        return self._catalog.method(key).config.decoding_type == PLAIN

    def _is_duplicate(self, key: str, offered: Choices) -> bool:
        """Whether a decoding type by itself has the same settings as a preset."""
        config = self._catalog.method(key).config
        presets = [one for _, one in offered if not one.startswith(TYPE_PREFIX)]
        same = any(self._catalog.method(one).config == config for one in presets)
        return key.startswith(TYPE_PREFIX) and same


def settings_of(config: MethodConfig) -> str:
    """Equal for equal settings."""
    return json.dumps(config.model_dump(mode="json"), sort_keys=True)


def _label(title: str, speedup: float | None, group: str) -> str:
    measured = None if speedup is None else formats.speedup(speedup)
    return " · ".join(filter(None, (title, measured, group)))
