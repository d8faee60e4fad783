"""The menu of methods, in groups, each with its last measured speedup on this machine.

A speedup counts for a method with the same settings, on the same weights, in the same dtype and on
the same device as the target's newest run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine import formats
from engine.errors import ConfigError
from engine.metrics import EQUAL_MARGIN
from playground.host.catalog import TYPE_PREFIX, Catalog, stored_config
from playground.host.local_drafters import LOCAL_PREFIX
from playground.host.result import sure_speedup
from playground.host.speedup import newest_speedups
from storage import PLAIN, RunDetail, RunLog, RunQuery, RunSummary

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
SAME_ENVIRONMENT = ("device_name", "threads", "weights", "revision", "dtype")
"""Entries that must be equal in two environments whose speeds are compared."""
MAX_RECOMMENDED = 3
MAX_SEARCHED = 20
"""Newest runs of a method among which a reliable speedup of given settings is looked for."""

Choices = list[tuple[str, str]]
"""Labels and keys. A label ends with the name of its group."""


class MethodMenu:
    def __init__(self, catalog: Catalog, log: RunLog) -> None:
        self._catalog, self._log = catalog, log

    def choices(self, target: object) -> Choices:
        """Methods for a target by group, the fastest first where their speed is measured."""
        name = target if isinstance(target, str) else ""
        offered = self._catalog.method_choices(name)
        configs = {key: self._catalog.method(key).config for _, key in offered}
        presets = [config for key, config in configs.items() if not key.startswith(TYPE_PREFIX)]
        # A decoding type by itself is left out where a preset has the same settings.
        titles = {
            key: title
            for title, key in offered
            if not (key.startswith(TYPE_PREFIX) and configs[key] in presets)
        }
        speedups = self._speedups(name, titles)
        best = self._recommended(name, speedups)
        groups = {key: RECOMMENDED if key in best else self._group(key) for key in titles}
        order = list(GROUPS)
        ordered = sorted(titles, key=lambda key: (order.index(groups[key]), -speedups.get(key, 0)))
        measured = {key: formats.speedup(speedup) for key, speedup in speedups.items()}
        labels = {key: (titles[key], measured.get(key), groups[key]) for key in ordered}
        return [(" · ".join(filter(None, label)), key) for key, label in labels.items()]

    def drafting(self, target: object) -> Choices:
        """The choices without plain decoding."""
        return [(label, key) for label, key in self.choices(target) if not self._is_plain(key)]

    def _speedups(self, target: str, keys: Iterable[str]) -> dict[str, float]:
        """The last reliable speedups, those of experiments first."""
        newest = self._log.rows(RunQuery(target=target, status="completed", limit=1))
        current = self._log.get(newest[0].id) if newest else None
        if current is None:
            return {}
        settings = {key: self._catalog.method(key).config.model_dump_json() for key in keys}
        measured = self._experiment_speedups(current)
        measured = {**self._run_speedups(current, {*settings.values()} - {*measured}), **measured}
        return {key: measured[name] for key, name in settings.items() if name in measured}

    def _experiment_speedups(self, current: RunDetail) -> dict[str, float]:
        """Speedups by settings, from the newest experiments in the environment of a run."""
        speedups: dict[str, float] = {}
        for speedup, run in sorted(newest_speedups(self._log), key=lambda pair: pair[1].created_at):
            settings = self._settings(run)
            if speedup is not None and settings and self._comparable(run, current):
                speedups[settings] = speedup
        return speedups

    def _run_speedups(self, current: RunDetail, wanted: set[str]) -> dict[str, float]:
        """The newest reliable speedups of single runs, by settings."""
        speedups: dict[str, float] = {}
        place = {name: getattr(current, name) for name in ("target", "dtype", "device")}
        for name in {*self._log.distinct_values("decoding_type")} - {PLAIN}:
            query = RunQuery(**place, decoding_type=name, status="completed", limit=MAX_SEARCHED)
            for row in self._log.rows(query):
                settings = self._settings(row)
                if settings not in wanted or settings in speedups:
                    continue
                run = self._comparable(row, current)
                speedup = run and sure_speedup(run.metrics)
                if settings and speedup:
                    speedups[settings] = speedup
        return speedups

    def _settings(self, run: RunSummary) -> str | None:
        """The settings of a stored run as a key; None where its method is not available."""
        try:
            return stored_config(run.method, self._catalog.types).model_dump_json()
        except ConfigError:
            return None

    def _comparable(self, run: RunSummary, current: RunDetail) -> RunDetail | None:
        """The whole run, if its target, weights, dtype and device equal those of another."""
        if (run.target, run.dtype, run.device) != (current.target, current.dtype, current.device):
            return None
        detail = self._log.get(run.id)
        if detail is None or any(
            detail.environment.get(key) != current.environment.get(key) for key in SAME_ENVIRONMENT
        ):
            return None
        return detail

    def _recommended(self, target: str, speedups: dict[str, float]) -> Sequence[str]:
        """The fastest, if faster than plain decoding; the first where nothing is measured."""
        keys = sorted(speedups, key=lambda key: -speedups[key])
        best = [key for key in keys if speedups[key] > 1 + EQUAL_MARGIN]
        if not speedups:
            best = [self._catalog.first_method(target)]
        return [key for key in best if self._group(key) != UNTRAINED][:MAX_RECOMMENDED]

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
