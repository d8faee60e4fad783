"""Measures one point: the method and plain decoding answer every prompt in turn."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from engine.drafters.method import MethodConfig
from engine.errors import ConfigError
from playground.experiments.bench.measured import Measured, measured_runs
from playground.experiments.bench.plan import Configuration, make_plan
from playground.experiments.bench.runner import Bench, Progress, run_plan
from playground.experiments.sweeps.plan import Objective, SweepPlan
from playground.experiments.sweeps.trials import Figures
from storage import RunLog

METHOD = "trial"
"""Configuration name of the method in the runs of a trial; plain decoding keeps its own."""
Pair = tuple[Measured, Measured]
"""One prompt answered by plain decoding and by the method."""


class Watch(Protocol):
    """Looks on while a point is measured."""

    def pair(self, pairs: list[Pair]) -> bool:
        """All pairs so far, whenever there is a new one; False ends the measuring."""

    def say(self, words: str) -> None:
        """What is being done."""

    def cancelled(self) -> bool:
        """Whether to end at once."""


class Measure(Protocol):
    """Where points are measured: on the command line's own models, or on the page's engine."""

    def __call__(self, config: MethodConfig, run_group: str, watch: Watch) -> list[Pair]:
        """Every pair of answers of a point; fewer if the watch ended it.

        Args:
            run_group: the runs' `benchmark_id` in the log. What is there under it already is not
                run again.

        Raises:
            ConfigError, DrafterError: the target cannot run this point; the sentence says why.
        """


def measure_on(bench: Bench, log: RunLog, plan: SweepPlan) -> Measure:
    """Measures on a loaded target."""

    def measure(config: MethodConfig, run_group: str, watch: Watch) -> list[Pair]:
        bench_plan = make_plan(
            plan.target,
            plan.dtype,
            [Configuration(METHOD, plan.title, config)],
            plan.items,
            repeats=plan.repeats,
            sampling=plan.sampling,
            limits=plan.limits,
        )
        collected = _Collector(watch, measured_runs(log, run_group))
        outcome = run_plan(
            bench_plan,
            bench,
            log,
            run_group,
            tell=collected.take,
            cancelled=lambda: collected.ended or watch.cancelled(),
        )
        pairs = collected.pairs()
        if not pairs and not outcome.cancelled:
            raise ConfigError(_why_nothing([skipped.reason for skipped in outcome.skipped]))
        return pairs

    return measure


def _why_nothing(reasons: list[str]) -> str:
    said = f" {reasons[0]}" if reasons else " Its runs in the log say why."
    return f"No prompt was answered by both methods.{said}"


class _Collector:
    """Joins the answers of both methods to pairs, and shows them to the watch."""

    def __init__(self, watch: Watch, known: Iterable[Measured]) -> None:
        self._watch = watch
        self._plain: dict[object, Measured] = {}
        self._method: dict[object, Measured] = {}
        self.ended = False
        for measured in known:
            self._add(measured)

    def _add(self, measured: Measured) -> bool:
        """Whether it completes a pair."""
        mine = self._method if measured.configuration == METHOD else self._plain
        mine[measured.pair] = measured
        return measured.pair in self._method and measured.pair in self._plain

    def take(self, progress: Progress) -> None:
        self._watch.say(progress.words)
        if progress.last is not None and self._add(progress.last):
            self.ended = not self._watch.pair(self.pairs())

    def pairs(self) -> list[Pair]:
        """In the order in which the method answered."""
        both = (key for key in self._method if key in self._plain)
        return [(self._plain[key], self._method[key]) for key in both]


def figures_of(pairs: list[Pair], objective: Objective, reference_tok_s: float | None) -> Figures:
    """The figures of a point.

    Args:
        reference_tok_s: tok/s of plain decoding in the sweep's first trial; None in that trial.

    Raises:
        ConfigError: the answers are too short for the objective to be defined.
    """
    plain = tok_s_of([pair[0] for pair in pairs])
    method = tok_s_of([pair[1] for pair in pairs])
    steps = sum(pair[1].num_steps for pair in pairs)
    accepted = sum(pair[1].num_accepted for pair in pairs)
    mat = 1 + accepted / steps if steps else None
    speedup = method / plain if method and plain else None
    value = mat if objective == "mat" else speedup
    if objective == "tok_s" and speedup is not None:
        value = speedup * (reference_tok_s or plain or 0.0)
    if value is None:
        raise ConfigError(
            "The answers end after their first token, so nothing can be measured. Choose other "
            "prompts, a larger max_new_tokens, or ignore_eos."
        )
    same = sum(pair[0].output_ids == pair[1].output_ids for pair in pairs)
    return Figures(value, method, plain, speedup, mat, len(pairs), same, _ratios(pairs))


def _ratios(pairs: list[Pair]) -> dict[str, float]:
    """Speedup of every answer that both took time for, by prompt."""
    return {
        "/".join(map(str, method.pair)): method.tok_s / plain.tok_s
        for plain, method in pairs
        if plain.tok_s and method.tok_s
    }


def tok_s_of(answers: Iterable[Measured]) -> float | None:
    """New tokens after the first / seconds of decoding, over all answers."""
    timed = [answer for answer in answers if answer.decode_s > 0]
    seconds = sum(answer.decode_s for answer in timed)
    return sum(answer.num_new_tokens - 1 for answer in timed) / seconds if timed else None
