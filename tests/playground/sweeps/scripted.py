"""Sweeps over a method whose speed is a formula, so that what a sweep should find is known.

Their runs are in the log as the engine would have left them: only the clock is scripted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from engine.config import Limits
from engine.drafters.lookup.ngram import NGramConfig
from engine.drafters.method import MethodConfig
from playground.experiments.measurement import Progress, Summary
from playground.experiments.plan import (
    BASELINE_NAME,
    METHOD,
    Configuration,
    ExperimentPlan,
    Item,
    SweepPlan,
)
from playground.experiments.space import OptunaSearch, SearchSettings
from playground.experiments.statistics import METRICS, PARTS, FinishedRequest, Pair
from playground.experiments.sweep.report import SweepResults, read_sweep
from playground.experiments.sweep.search import OnProgress, Sweep
from playground.experiments.sweep.trials import Trial
from storage import PLAIN, RunLog, key_values
from tests.playground.bench.requests import measured, plan_of
from tests.storage.conftest import new_run

PLAIN_TOK_S = 10.0
NUM_PROMPTS = 4
Speed = Callable[[Any], float]
"""tok/s of the method at a point."""


def plan(*vary: str, base: MethodConfig | None = None, **changes: Any) -> SweepPlan:
    """A sweep over n-gram lookup."""
    search: dict[str, Any] = {"objective": "speedup", "trials": 5}
    search |= {key: changes.pop(key) for key in SearchSettings.model_fields if key in changes}
    made = plan_of(
        configurations=[Configuration("ngram", "N-gram", base or NGramConfig())],
        items=[Item("s", str(i), "chat", "chat", ("x",)) for i in range(NUM_PROMPTS)],
        limits=Limits(max_new_tokens=21),
    )
    chooser = OptunaSearch.parse({**search, "varied": vary or ["max_draft_len=1:8"]})
    return SweepPlan.parse({**dict(made), "kind": "sweep", "chooser": chooser, **changes})


def peak_at_5(config: Any) -> float:
    """Fastest with five draft tokens; the lookup plays no part."""
    return 20.0 / (1 + abs(config.max_draft_len - 5) / 5)


def answer(tok_s: float, prompt: int, configuration: str, *, accepted: int = 15) -> FinishedRequest:
    """Twenty-one tokens: the first, one per step, and those accepted."""
    return measured(
        configuration,
        run_id=f"{configuration}{prompt}",
        prompt=str(prompt),
        num_new_tokens=21,
        num_steps=20 - accepted,
        num_drafted=20,
        num_accepted=accepted,
        decode_s=20 / tok_s,
        split_s=(0.0,) * 5,
        output_ids=(7, prompt),
    )


def pair(tok_s: float, prompt: int = 0, *, drift: float = 1.0) -> Pair:
    """The method's answer and plain decoding's, on a machine that is `drift` times as fast."""
    plain = answer(drift * PLAIN_TOK_S, prompt, BASELINE_NAME, accepted=0)
    return answer(drift * tok_s, prompt, METHOD), plain


def write_run(log: RunLog, sweep_id: str, trial: str, request: FinishedRequest) -> FinishedRequest:
    """Write the run of a trial's request to the log; returns the request as it is read there."""
    key = replace(request, experiment_id=sweep_id, kind="sweep", trial=trial)
    method = PLAIN if request.configuration == BASELINE_NAME else "NGram"
    run_id = log.begin(
        new_run(
            **key_values(key),
            method={"decoding_type": method},
            labels={"category": request.category, "group": request.group},
        )
    )
    steps = request.num_steps or 1
    metrics = {name: getattr(request, name) for name in (*METRICS, "decode_s")}
    metrics |= {"at_least": list(request.at_least), "itl_ms": 1000 * (request.itl_s or 0.0)}
    split = {part: s / steps for part, s in zip(PARTS, request.split_s, strict=True)}
    log.finish(
        run_id,
        status="completed",
        output_ids=request.output_ids,
        text=request.text,
        finish_reason=request.finish_reason,
        metrics={**metrics, "time_split": split},
    )
    run = log.get(run_id)
    assert run is not None
    return FinishedRequest.of(run)


class Scripted:
    """Measures by formula; remembers what it was asked."""

    def __init__(
        self, speed: Speed = peak_at_5, *, drift: Callable[[int], float] = lambda trial: 1.0
    ) -> None:
        self.speed = speed
        self.drift = drift
        self.sweep: Sweep
        self.configs: list[Any] = []
        self.groups: list[str] = []
        self.num_answers: list[int] = []

    def pair(self, config: Any, prompt: int) -> Pair:
        # Prompts differ, as prompts do: every later one is a little faster.
        drift = self.drift(len(self.configs) - 1)
        return pair(self.speed(config) * (1 + prompt / 10), prompt, drift=drift)

    def __call__(self, trial: Trial, plan: ExperimentPlan, on_progress: OnProgress) -> Summary:
        config = plan.configuration(METHOD).config
        self.configs.append(config)
        self.groups.append(trial.id)
        num_answers = 0
        while num_answers < NUM_PROMPTS and not self.sweep.cancelled():
            for request in self.pair(config, num_answers):
                last = write_run(self.sweep.log, self.sweep.id, trial.id, request)
                on_progress(Progress(0, 0, f"prompt {num_answers}", None, last=last))
            num_answers += 1
        self.num_answers.append(num_answers)
        return Summary(self.sweep.cancelled(), num_answers, 0, ())


def run(sweep: Sweep, measure: Scripted | None = None) -> Summary:
    """Measure what is left of a sweep by formula."""
    measure = measure or Scripted()
    measure.sweep = sweep
    return sweep.run(partial(sweep.search, measure))


def swept(
    log: RunLog, *vary: str, measure: Scripted | None = None, name: str = "", **changes: Any
) -> SweepResults:
    """A sweep, run to its end."""
    sweep = Sweep(log, plan(*vary, **changes))
    sweep.begin(name)
    run(sweep, measure)
    return read_sweep(log, sweep.id)


def resumed(log: RunLog, sweep_id: str, measure: Scripted | None = None) -> SweepResults:
    """The same sweep, gone on with."""
    sweep = Sweep(log, read_sweep(log, sweep_id).plan, benchmark_id=sweep_id)
    sweep.resume()
    run(sweep, measure)
    return read_sweep(log, sweep_id)
