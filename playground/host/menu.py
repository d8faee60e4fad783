"""The methods to pick from, in groups, each with the speedup that was last measured of it here."""

from __future__ import annotations

from collections.abc import Sequence

from engine import formats
from playground.host.catalog import TYPE_PREFIX, Catalog
from playground.host.plain import PLAIN, plain_step_of
from playground.host.result import weigh
from storage import MeasuredSetup, RunLog, RunQuery

RECOMMENDED, TRAINED, NO_WEIGHTS = "recommended", "trained", "no weights"
BASELINE, FURTHER, UNTRAINED = "baseline", "further", "untrained"
GROUPS = {
    RECOMMENDED: "Recommended",
    TRAINED: "Trained for this target",
    NO_WEIGHTS: "No weights",
    BASELINE: "The baseline",
    FURTHER: "Other types",
    UNTRAINED: "Untrained, for inspection only",
}
"""Groups in order, with their headings."""
MOST_RECOMMENDED = 3
NEWEST = 4
"""Runs of a method among which one with a sure speedup is looked for."""

Choices = list[tuple[str, str]]
"""Labels and keys. A label ends with the name of its group, which a style sheet makes a heading."""


class MethodMenu:
    def __init__(self, catalog: Catalog, log: RunLog) -> None:
        self._catalog, self._log = catalog, log

    def choices(self, target: object) -> Choices:
        """Methods that fit a target, group by group; the fastest first where it is known."""
        name = target if isinstance(target, str) else ""
        offered = self._catalog.method_choices(name)
        titles = {key: title for title, key in offered if not self._stands_twice(key, offered)}
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
        if not self._log.find(RunQuery(target=target, status="completed", limit=1)).rows:
            return {}
        measured = self._measured(target)
        found = {key: measured.get(key) or self.speedup(target, key) for key in keys}
        return {key: speedup for key, speedup in found.items() if speedup is not None}

    def _measured(self, target: str) -> dict[str, float]:
        """What the newest experiments found of the methods on a target, by key.

        They asked plain decoding the same, so that they are worth more than single runs.
        """
        found: dict[tuple[str, str], MeasuredSetup] = {}
        for one in self._log.experiments.ranked():
            method = one.example.decoding_type, one.example.method_title
            known = found.get(method)
            newer = known is None or known.example.created_at < one.example.created_at
            if one.example.target == target and newer:
                found[method] = one
        methods = {
            key: self._catalog.method(key) for _, key in self._catalog.method_choices(target)
        }
        named = {key: (one.config.decoding_type, one.title) for key, one in methods.items()}
        return {key: found[name].speedup for key, name in named.items() if name in found}

    def speedup(self, target: str, key: str) -> float | None:
        """Speedup of the newest run of a method, where it is sure to two decimals."""
        method = self._catalog.method(key)
        query = RunQuery(
            target=target,
            decoding_type=method.config.decoding_type,
            method_title=method.title,
            status="completed",
            limit=NEWEST,
        )
        for row in () if self._is_plain(key) else self._log.find(query).rows:
            run = self._log.get(row.id)
            weighed = run and weigh(run.metrics, plain_step_of(self._log, run))
            if weighed and weighed.is_sure:
                return weighed.balance.formula
        return None

    def _recommended(self, target: str, speedups: dict[str, float]) -> Sequence[str]:
        """The fastest that are faster than plain decoding; before any is known, the first."""
        fast = [key for key in speedups if speedups[key] > 1 and self._group(key) != UNTRAINED]
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
        return TRAINED if self._catalog.is_trained(key) else NO_WEIGHTS

    def _is_plain(self, key: str) -> bool:
        return self._catalog.method(key).config.decoding_type == PLAIN

    def _stands_twice(self, key: str, offered: Choices) -> bool:
        """Whether a decoding type by itself has the very settings of a preset."""
        config = self._catalog.method(key).config
        presets = [one for _, one in offered if not one.startswith(TYPE_PREFIX)]
        same = any(self._catalog.method(one).config == config for one in presets)
        return key.startswith(TYPE_PREFIX) and same


def _label(title: str, speedup: float | None, group: str) -> str:
    measured = None if speedup is None else formats.speedup(speedup)
    return " · ".join(filter(None, (title, measured, group)))
