"""Which method is fastest on the prompts at hand: all that fit, for about a minute.

Successive halving: all methods answer once beside plain decoding, then the faster half once more,
and so on; the last two go on until the time is up. What is in the log afterwards is a benchmark.
Source: arXiv:1502.07943, Fig. 3.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from engine.drafters import parse_method
from engine.drafters.base import BuildContext
from engine.errors import ConfigError
from engine.metrics import SAME
from playground.experiments.benchmarks import begin, conduct
from playground.experiments.finished import FinishedRequest, Pair, RunGroup, in_pairs
from playground.experiments.job import Job, Jobs, Progress, State, submit
from playground.experiments.measurement import Measurement, Summary
from playground.experiments.plan import BASELINE, TYPED, Configuration, ExperimentPlan
from playground.experiments.report.explain import explain
from playground.experiments.report.statistics import Pool, Speedup, speedup_of
from playground.experiments.report.verdict import NO_NUMBER, extent
from playground.experiments.suites import first_turns, typed_item
from playground.host.baseline import DOUBTS
from playground.host.catalog import TYPE_PREFIX, Catalog
from playground.host.request import read_request
from playground.host.runner import EngineHost
from storage import BenchmarkHead, RunLog, new_id

BUDGET_S, MOST_S = 60.0, 120.0
"""What a search takes, and at most until those that are left have answered twice."""
MAX_TOKENS = 48
"""Of an answer: short answers leave time for more of them."""
MAX_REPEATS = 12
NUM_PROMPTS = 3
"""Of a suite, where no prompt was written."""
PLAIN = "Plain decoding"
FINALISTS = 2
NAME = "Fastest method · "
"""How a search's benchmark is called in the log, before its prompt."""


# ---- what is tried


def methods_to_try(catalog: Catalog, target: str) -> dict[str, str]:
    """Presets that draft for a target, are trained and need no download: keys by title.

    On a target of random weights, untrained ones are as good as any.
    """
    found: dict[str, str] = {}
    is_random = target in catalog.targets and catalog.targets[target].random is not None
    for title, key in catalog.method_choices(target):
        if key.startswith(TYPE_PREFIX) or (catalog.presets[key].untrained and not is_random):
            continue
        config = catalog.method(key).config
        if config.decoding_type == BASELINE:
            continue
        parts = (config, *config.within().values())
        weights = filter(None, (getattr(one, "speculative_model", None) for one in parts))
        if all(_is_here(catalog.locate(one)) for one in weights):
            found[title if title not in found else f"{title} ({key})"] = key
    return found


def _is_here(weights: str) -> bool:
    """Whether they are on this machine: a minute is no time to fetch any."""
    if Path(weights).expanduser().exists():
        return True
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        return isinstance(try_to_load_from_cache(weights, "config.json"), str)
    except HFValidationError:
        return False


def plan_of(catalog: Catalog, raw: Mapping[str, Any]) -> ExperimentPlan:
    """What is tried, from what the Generate page holds; without a prompt, a few of a suite.

    Raises ConfigError: a setting is wrong, or no method fits.
    """
    own = bool(str(raw.get("prompt") or "").strip())
    asked = read_request(catalog, raw if own else {**raw, "prompt": TYPED})
    names = methods_to_try(catalog, asked.target.name)
    if not names:
        raise ConfigError("No method that fits this target is on this machine.")
    tried = [Configuration(name, name, catalog.method(key).config) for name, key in names.items()]
    plain = Configuration(PLAIN, PLAIN, parse_method({"decoding_type": BASELINE}))
    most = min(MAX_TOKENS, asked.limits.max_new_tokens)
    suite = catalog.suites.get("quick") or next(iter(catalog.suites.values()))
    return ExperimentPlan.parse(
        {
            "target": asked.target,
            "dtype": asked.dtype,
            "configurations": [plain, *tried],
            "items": [typed_item(asked)] if own else first_turns(suite, NUM_PROMPTS),
            "repeats": MAX_REPEATS,
            "sampling": asked.sampling,
            "limits": asked.limits.replace(max_new_tokens=most),
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


class Search(Job):
    """One search; its answers are a benchmark of this id."""

    def __init__(
        self,
        host: EngineHost,
        plan: ExperimentPlan,
        *,
        owner: str,
        budget_s: float = BUDGET_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        words = " ".join(plan.items[0].turns[0].split())[:40]
        super().__init__(new_id(), owner=owner)
        self.plan = plan
        self.name = NAME + words
        self._clock = clock
        self._budget_s = budget_s
        self._began_s: float | None = None
        self._requests: list[FinishedRequest] = []
        self._running = [c.name for c in plan.configurations[1:]]
        self._measurement = Measurement(
            plan=plan,
            log=host.log,
            group=RunGroup(self.id),
            tell=self.tell,
            cancelled=lambda: self.cancelled() or self._is_late(),
            drop_faulty=True,
            left_out=lambda name: name != PLAIN and name not in self._running,
            audits_each=0,
        )

    @classmethod
    def start(
        cls,
        host: EngineHost,
        jobs: Jobs,
        plan: ExperimentPlan,
        *,
        owner: str,
        budget_s: float = BUDGET_S,
    ) -> Search:
        """Queue a search; an unfinished one of the same owner is cancelled.

        Raises QueueFullError, ClosingError: it was not taken on; then the log has nothing of it.
        """
        job = cls(host, plan, owner=owner, budget_s=budget_s)

        def take_on() -> Callable[[], State]:
            result = submit(host, job, plan, job.measure)
            begin(host.log, plan, job.name, benchmark_id=job.id)
            return lambda: conduct(host.log, job.id, result).status

        jobs.start(job, take_on)
        return job

    def measure(self, bench: BuildContext) -> Summary:
        """On the engine's thread; the time counts from here, the target being loaded."""
        self._began_s = self._clock()
        return replace(self._measurement.run(bench), cancelled=self.cancelled())

    def tell(self, progress: Progress) -> None:
        if progress.last is not None:
            self._requests.append(progress.last)
            self._halve(progress.last.repeat)
        super().tell(replace(progress, eta_s=self.left_s))

    @property
    def left_s(self) -> float:
        """Seconds that are left; on a slow machine two answers of each take longer."""
        spent_s = 0.0 if self._began_s is None else self._clock() - self._began_s
        return max(0.0, self._budget_s - spent_s)

    def _is_late(self) -> bool:
        if self._began_s is None or self.left_s:
            return False
        return (
            self._is_confirmed()
            or self._clock() - self._began_s > MOST_S / BUDGET_S * self._budget_s
        )

    def _is_confirmed(self) -> bool:
        """Whether those in the running have answered everything twice: an interval needs that."""
        alive = [name for name in self._running if name not in self._measurement.faults]
        twice = Counter(r.configuration for r in self._requests if r.repeat == 1)
        return all(twice[name] >= len(self.plan.items) for name in alive)

    def _halve(self, repeat: int) -> None:
        """Leave out the slower half of those that have answered everything of this repeat."""
        alive = [name for name in self._running if name not in self._measurement.faults]
        both = {PLAIN, *alive}
        answers = sum(r.repeat == repeat and r.configuration in both for r in self._requests)
        if len(alive) <= FINALISTS or answers < len(both) * len(self.plan.items):
            return
        best = sorted(alive, key=self._speed, reverse=True)
        self._running = best[: max(FINALISTS, -(-len(best) // 2))]

    # ---- what came of it

    def _pairs(self, name: str) -> Sequence[Pair]:
        mine, plain = (
            [r for r in self._requests if r.configuration == one] for one in (name, PLAIN)
        )
        return in_pairs(mine, plain)

    def _speed(self, name: str) -> float:
        """Speedup so far; where the baseline is in doubt its bound, so that it is timed again."""
        pairs = self._pairs(name)
        found = speedup_of(pairs)
        return (found and (found.ratio or Pool.of([own for own, _ in pairs]).mat)) or 0.0

    def contenders(self) -> list[Contender]:
        """All methods: those in the running first, the fastest of them on top."""
        found = []
        for configuration in self.plan.configurations[1:]:
            name = configuration.name
            mine = [r for r in self._requests if r.configuration == name]
            fault = self._measurement.faults.get(name)
            running: Standing = "kept" if self.over.is_set() else "running"
            state: Standing = running if name in self._running else "dropped"
            state = "failed" if fault else state if mine else "waiting"
            last = mine[-1] if mine else None
            found.append(
                Contender(
                    name,
                    speedup_of(self._pairs(name)),
                    Pool.of(mine).mat,
                    state,
                    last.run_id if last else None,
                    fault or "",
                )
            )
        return sorted(found, key=lambda c: (c.state in ("running", "kept"), c.ratio), reverse=True)

    @property
    def leader(self) -> Contender | None:
        """The fastest so far, if it is faster than plain decoding; a single answer may say so."""
        first = next(iter(self.contenders()), None)
        return first if first and first.ratio > 1 + SAME else None

    @property
    def best(self) -> Contender | None:
        """What is recommended; None where nothing pays, or too few answers show it."""
        first = self.leader
        return first if first and first.speedup and first.speedup.low is not None else None

    @property
    def advice(self) -> str:
        """What to use, why, how sure that is, and on what it was tried."""
        found = self.contenders()
        doubts = "".join(
            f" {NO_NUMBER.format(c.name, DOUBTS[c.speedup.doubt])}"
            for c in found
            if c.speedup and c.speedup.doubt
        )
        first = next((c for c in found if c.ratio), None)
        if first is None or first.speedup is None:
            return f"Nothing was measured.{doubts}"
        tokens = self.plan.limits.max_new_tokens
        own = self.plan.items[0].suite == TYPED
        on = "your prompt" if own else f"{len(self.plan.items)} shipped prompts"
        rounds = first.speedup.num_repeats
        tried = f"Tried on {on}, {tokens} tokens each, {rounds} time{'s' * (rounds != 1)}."
        if waiting := [c.name for c in found if c.state == "waiting"]:
            tried += f" Time ran out before {', '.join(waiting)}."
        tried += doubts
        if first.speedup.low is None:
            return (
                f"Not confirmed: {first.name} reached {first.speedup.text} plain decoding, with "
                f"{first.speedup.interval}. {tried} Search again to confirm."
            )
        if self.best is None:
            return (
                f"Nothing beats plain decoding here. The best was {first.name}: "
                f"{first.speedup.text} plain decoding. {tried}"
            )
        why = explain(self._pairs(first.name))
        because = f" {why.because}" if why else ""
        gain = "" if first.speedup.faster else ", which includes no gain"
        among = extent(first.speedup, sum(c.speedup is not None for c in found))
        reached = f"{first.speedup.text} plain decoding ({among}){gain}"
        return f"{first.name}: {reached}.{because} {tried}"


def interrupted(log: RunLog) -> BenchmarkHead | None:
    """The newest benchmark of the log, if it is a search whose process ended."""
    newest = next(iter(log.benchmarks.list(1)), None)
    if newest is None or newest.status != "interrupted":
        return None
    return newest if newest.name.startswith(NAME) else None
