"""Which method is fastest on the prompts at hand: all that fit, for about a minute.

An experiment whose configurations are chosen by successive halving.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from engine.drafters import parse_method
from engine.errors import ConfigError
from engine.metrics import SAME
from playground.experiments.chooser import pairs_of
from playground.experiments.experiment import Experiment
from playground.experiments.finished import Pair
from playground.experiments.plan import (
    BASELINE,
    BASELINE_NAME,
    TYPED,
    Configuration,
    ExperimentPlan,
    Halving,
)
from playground.experiments.report.explain import explain
from playground.experiments.report.statistics import Speedup, Totals, speedup_of
from playground.experiments.report.verdict import NO_NUMBER, extent
from playground.experiments.suites import first_turns, typed_item
from playground.host.baseline import DOUBTS
from playground.host.catalog import TYPE_PREFIX, Catalog
from playground.host.request import read_request
from storage import BenchmarkHead, RunLog

BUDGET_S = 60.0
"""What a search takes."""
MAX_TOKENS = 48
"""Of an answer: short answers leave time for more of them."""
MAX_REPEATS = 12
NUM_PROMPTS = 3
"""Of a suite, where no prompt was written."""
NAME = "Fastest method · "
"""How a search's benchmark is called in the log, before its prompt."""


# ---- what is tried


def methods_to_try(catalog: Catalog, target: str) -> dict[str, str]:
    """Presets that draft for a target, are trained and need no download: keys by title.

    On a target of random weights, untrained ones are as good as any.
    """
    methods: dict[str, str] = {}
    is_random = target in catalog.targets and catalog.targets[target].random is not None
    for title, key in catalog.method_choices(target):
        if key.startswith(TYPE_PREFIX) or (catalog.presets[key].untrained and not is_random):
            continue
        config = catalog.method(key).config
        if config.decoding_type == BASELINE:
            continue
        parts = (config, *config.within().values())
        weights = filter(None, (getattr(one, "speculative_model", None) for one in parts))
        if all(map(catalog.is_local, weights)):
            methods[title if title not in methods else f"{title} ({key})"] = key
    return methods


def plan_of(catalog: Catalog, raw: Mapping[str, Any]) -> ExperimentPlan:
    """What is tried, from what the Generate page holds; without a prompt, a few of a suite.

    Raises ConfigError: a setting is wrong, or no method fits.
    """
    own = bool(str(raw.get("prompt") or "").strip())
    request = read_request(catalog, raw if own else {**raw, "prompt": TYPED})
    names = methods_to_try(catalog, request.target.name)
    if not names:
        raise ConfigError("No method that fits this target is on this machine.")
    methods = [Configuration(name, name, catalog.method(key).config) for name, key in names.items()]
    plain = Configuration(BASELINE_NAME, BASELINE_NAME, parse_method({"decoding_type": BASELINE}))
    most = min(MAX_TOKENS, request.limits.max_new_tokens)
    suite = catalog.suites.get("quick") or next(iter(catalog.suites.values()))
    return ExperimentPlan.parse(
        {
            "kind": "fastest",
            "chooser": Halving(budget_s=BUDGET_S),
            "target": request.target,
            "dtype": request.dtype,
            "configurations": [plain, *methods],
            "items": [typed_item(request)] if own else first_turns(suite, NUM_PROMPTS),
            "repeats": MAX_REPEATS,
            "sampling": request.sampling,
            "limits": request.limits.replace(max_new_tokens=most),
        }
    )


# ---- the search

Standing = Literal["waiting", "running", "kept", "dropped", "failed"]


@dataclass(frozen=True, slots=True)
class Contender:
    """A method as it stands.

    Attributes:
        speedup: over plain decoding; None before its first answer.
        mat: tokens a step, before any cut.
        run_id: one of its runs.
        fault: why it failed.
    """

    name: str
    speedup: Speedup | None
    mat: float | None
    state: Standing
    run_id: str | None
    fault: str = ""

    @property
    def ratio(self) -> float:
        """The speedup; 0 where none can be given."""
        return (self.speedup and self.speedup.ratio) or 0.0


class Standings:
    """The methods of a search as they stand now.

    Attributes:
        contenders: those in the running first, the fastest of them on top.
    """

    def __init__(self, search: Experiment) -> None:
        self._plan, self._requests = search.plan, tuple(search.requests)
        contenders = [self._contender(search, c.name) for c in search.plan.configurations[1:]]
        order = lambda c: (c.state in ("running", "kept"), c.ratio)  # noqa: E731
        self.contenders: list[Contender] = sorted(contenders, key=order, reverse=True)

    def _contender(self, search: Experiment, name: str) -> Contender:
        own = [r for r in self._requests if r.configuration == name]
        fault = search.faults.get(name, "")
        state: Standing = "kept" if search.over.is_set() else "running"
        state = state if name in search.chooser.running else "dropped"
        state = "failed" if fault else state if own else "waiting"
        run_id = own[-1].run_id if own else None
        speedup = speedup_of(self._pairs(name))
        return Contender(name, speedup, Totals.of(own).mat, state, run_id, fault)

    def _pairs(self, name: str) -> list[Pair]:
        return pairs_of(self._requests, name, self._plan)

    @property
    def leader(self) -> Contender | None:
        """The fastest so far, if it is faster than plain decoding; a single answer may say so."""
        first = next(iter(self.contenders), None)
        return first if first and first.ratio > 1 + SAME else None

    @property
    def best(self) -> Contender | None:
        """What is recommended; None where nothing pays, or too few answers show it."""
        first = self.leader
        return first if first and first.speedup and first.speedup.low is not None else None

    @property
    def advice(self) -> str:
        """What to use, why, how sure that is, and on what it was tried."""
        contenders = self.contenders
        doubts = "".join(
            f" {NO_NUMBER.format(c.name, DOUBTS[c.speedup.doubt])}"
            for c in contenders
            if c.speedup and c.speedup.doubt
        )
        first = next((c for c in contenders if c.ratio), None)
        if first is None or first.speedup is None:
            return f"Nothing was measured.{doubts}"
        tokens = self._plan.limits.max_new_tokens
        own = self._plan.items[0].suite == TYPED
        on = "your prompt" if own else f"{len(self._plan.items)} shipped prompts"
        rounds = first.speedup.num_repeats
        times = f"{tokens} tokens each, {rounds} time{'s' * (rounds != 1)}"
        target = self._plan.target.title or self._plan.target.name
        tried = f"Tried on {on}, {times}, with {target}."
        if waiting := [c.name for c in contenders if c.state == "waiting"]:
            tried += f" Time ran out before {', '.join(waiting)}."
        tried += doubts
        if first.speedup.low is None:
            return (
                f"Not confirmed: {first.name} reached {first.speedup.text} plain decoding, with "
                f"{first.speedup.interval}. {tried} Search again to confirm."
            )
        if self.best is None:
            return (
                f"Stay with plain decoding: nothing beats it here. The best was {first.name}: "
                f"{first.speedup.text} plain decoding. {tried}"
            )
        why = explain(self._pairs(first.name))
        because = f" {why.because}" if why else ""
        gain = "" if first.speedup.faster else ", which includes no gain"
        among = extent(first.speedup, sum(c.speedup is not None for c in contenders))
        reached = f"{first.speedup.text} plain decoding ({among}){gain}"
        return f"{first.name}: {reached}.{because} {tried}"


def interrupted(log: RunLog) -> BenchmarkHead | None:
    """The newest benchmark of the log, if it is a search whose process ended."""
    newest = next(iter(log.benchmarks.list(1)), None)
    if newest is None or newest.status != "interrupted":
        return None
    return newest if newest.name.startswith(NAME) else None
