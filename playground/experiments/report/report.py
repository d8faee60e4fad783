"""The report of an experiment, from its finished requests alone: figures, ratios, verdicts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from statistics import fmean
from typing import Any

from engine import metrics
from engine.errors import ConfigError
from engine.formats import plural
from engine.metrics import TimeSplit
from playground.experiments.chooser import Chooser
from playground.experiments.plan import Configuration, ExperimentPlan, Halving, SweepPlan
from playground.experiments.prompts import in_order
from playground.experiments.report.explain import Explanation, explain
from playground.experiments.report.verdict import (
    LOSSY,
    SAMPLED,
    UNSTEADY,
    Audits,
    Contender,
    Verdict,
    audits_of,
    headline,
    num_unsteady,
    trust_in,
    verdict_of,
)
from playground.experiments.statistics import (
    FinishedRequest,
    LatencyTable,
    Pair,
    Totals,
    finished_requests,
    latency_table,
    position_rates,
)
from playground.host.catalog import MethodTypes
from playground.host.speedup import Speedup, pair_requests, ratio_of, request_speedup_of, speedup_of
from storage import Benchmark, RunLog, RunQuery

MIN_GAIN = 1 + metrics.EQUAL_MARGIN
"""Speedup above which a method is worth more than plain decoding."""
CONTEXT_EDGES = (0, *(2**power for power in range(7, 17)))


@dataclass(frozen=True, slots=True)
class Figures:
    """One configuration on one group of prompts, or on all of them."""

    num_requests: int
    num_new_tokens: int
    num_steps: int
    mat: float | None
    tok_s: float | None
    step_ms: float | None
    speedup: Speedup | None
    request_speedup: float | None


@dataclass(frozen=True, slots=True)
class ContextBin:
    """tok/s and MAT of the requests whose context lengths are alike, and the mean of these."""

    context_len: float
    tok_s: float
    mat: float | None


@dataclass(frozen=True, slots=True)
class Section:
    """The report on one configuration.

    Attributes:
        settings: those that differ from the method's defaults.
        num_unsteady: prompts with different greedy answers in different repeats.
        why: why it is faster or slower than plain decoding.
        example_run: id of one of its runs.
        fault: why it failed; empty if it did not.
    """

    name: str
    title: str
    decoding_type: str
    lossless: bool
    reference: bool
    settings: str
    overall: Figures
    groups: Mapping[str, Figures]
    latency: LatencyTable | None
    position_rates: tuple[float, ...]
    draft_acceptance: float | None
    time_split: TimeSplit | None
    itl_ms: float | None
    ttft_ms: float | None
    by_context: tuple[ContextBin, ...]
    verdict: Verdict | None
    num_prompts: int
    num_unsteady: int
    why: Explanation | None
    example_run: str | None
    fault: str

    @property
    def ratio(self) -> float:
        """Its speedup; 0 where none can be given."""
        speedup = self.overall.speedup
        return (speedup and speedup.ratio) or 0.0

    @property
    def verdict_sentence(self) -> str:
        """How its answers compare with plain decoding's; empty where there is nothing to say."""
        verdict = self.verdict
        if self.reference:
            many = f"{self.num_unsteady} of {self.num_prompts} prompts"
            return UNSTEADY.format(many) if self.num_unsteady else ""
        if verdict is None:
            sampled = SAMPLED if self.lossless else LOSSY
            return sampled if self.overall.speedup else ""
        return verdict.sentence if self.lossless else f"{LOSSY} {verdict.place}."


@dataclass(frozen=True, slots=True)
class Report:
    """A whole experiment so far.

    Attributes:
        headline: which configuration is fastest, in sentences.
        leader: the one with the highest speedup, however certain; plain decoding where none is
            above `MIN_GAIN`.
        fastest: the name of the fastest; None unless the intervals tell it from all others.
        recommendation: which method to use, of a search that is over; else empty.
        dropped: configurations that a search has dropped because they were slower.
    """

    configurations: tuple[Section, ...]
    groups: tuple[str, ...]
    num_done: int
    headline: str
    leader: str
    fastest: str | None = None
    recommendation: str = ""
    dropped: tuple[str, ...] = ()

    def section(self, name: str) -> Section:
        return next(section for section in self.configurations if section.name == name)


def make_report(
    plan: ExperimentPlan,
    requests: Sequence[FinishedRequest],
    audits: Audits | None = None,
    *,
    planned: int | None = None,
    faults: Mapping[str, str] | None = None,
) -> Report:
    """The report on the finished requests of a plan; a search's methods are ranked.

    Args:
        audits: of answers that differ from plain decoding's.
        planned: total number of requests, while the experiment is unfinished.
        faults: why configurations failed, by name.
    """
    examined = (audits or {}) if plan.sampling.greedy else None
    is_whole = planned is None or len(requests) >= planned
    by_name: dict[str, list[FinishedRequest]] = {name: [] for name in plan.names}
    for request in requests:
        by_name.setdefault(request.configuration, []).append(request)
    plain = by_name[plan.reference.name]
    faults = faults or {}
    first, *sections = (
        make_section(one, by_name[one.name], plain, examined, faults.get(one.name, ""))
        for one in plan.configurations
    )
    running = Chooser.of(plan, requests, faults).running
    dropped = tuple(name for name in plan.names[1:] if name not in running)
    is_search = isinstance(plan.chooser, Halving)
    if is_search:
        sections.sort(key=lambda one: (one.name in dropped, -one.ratio))
    contenders = [_contender(one, dropped=one.name in dropped) for one in sections]
    num_done = len(requests)
    so_far = plural(num_done, "answer") if is_search else f"{num_done} of {planned} requests"
    untried = sum(not (one.overall.num_requests or one.fault) for one in sections)
    if is_search and untried:
        so_far += f", {untried} of {plural(len(sections), 'method')} not tried"

    def over(one: str, other: str) -> Speedup | None:
        return ratio_of(pair_requests(by_name[one], by_name[other]), len(contenders))

    preliminary = "" if is_whole else so_far
    text, fastest = headline(first.name, contenders, over, preliminary=preliminary)
    kept = [one for one in sections if one.name not in dropped]
    leader = leader_of([first, *kept])
    is_found = is_search and is_whole and any(one.ratio for one in sections)
    return Report(
        configurations=(first, *sections),
        groups=tuple(in_order(request.group for request in requests)),
        num_done=num_done,
        headline=text,
        fastest=fastest,
        leader=leader.name,
        recommendation=_recommendation(leader, over(leader.name, first.name)) if is_found else "",
        dropped=dropped,
    )


def leader_of(sections: Sequence[Section]) -> Section:
    """The section with the highest speedup; plain decoding's where none is above `MIN_GAIN`."""
    return max(sections, key=lambda one: MIN_GAIN if one.reference else one.ratio)


def _contender(section: Section, *, dropped: bool) -> Contender:
    trust = trust_in(section.verdict, lossless=section.lossless)
    return Contender(section.name, section.overall.speedup, trust, dropped)


def _recommendation(leader: Section, gain: Speedup | None) -> str:
    """Which method to use, in a sentence; `gain` is the leader's over plain decoding."""
    if leader.reference:
        return "Recommended: stay with plain decoding."
    return f"{'Recommended' if gain and gain.faster else 'Worth a try'}: {leader.name}."


def make_section(
    configuration: Configuration,
    requests: Sequence[FinishedRequest],
    plain: Sequence[FinishedRequest],
    audits: Audits | None,
    fault: str = "",
) -> Section:
    """The section of a configuration; without `audits`, answers are not compared."""
    reference = requests is plain
    pairs = [(one, one) for one in plain] if reference else pair_requests(requests, plain)
    totals = Totals.of(requests)
    itl = [r.itl_s for r in requests if r.itl_s is not None]
    return Section(
        name=configuration.name,
        title=configuration.title,
        decoding_type=configuration.decoding_type,
        lossless=configuration.lossless,
        reference=reference,
        settings=_settings_text(configuration),
        overall=_figures(requests, pairs),
        groups={
            group: _figures(
                [r for r in requests if r.group == group], [p for p in pairs if p[0].group == group]
            )
            for group in in_order(r.group for r in requests)
        },
        latency=latency_table(requests),
        position_rates=position_rates(requests),
        draft_acceptance=totals.draft_acceptance,
        time_split=totals.time_split,
        itl_ms=1000 * fmean(itl) if itl else None,
        ttft_ms=1000 * fmean([r.ttft_s for r in requests]) if requests else None,
        by_context=by_context(requests),
        verdict=None if reference or audits is None else verdict_of(pairs, audits),
        num_prompts=len({(r.suite, r.prompt, r.turn) for r in requests}),
        num_unsteady=0 if audits is None else num_unsteady(requests),
        why=None if reference else explain(pairs),
        example_run=requests[0].run_id if requests else None,
        fault=fault,
    )


def _settings_text(configuration: Configuration) -> str:
    """The settings that differ from the method's defaults; trees by their size."""

    def short(value: Any) -> str:
        is_long = isinstance(value, list) and len(str(value)) > 24
        return f"of {len(value)}" if is_long else str(value)

    try:
        changed = configuration.config.changed_flat
    except ConfigError:
        return "settings of another version"
    return ", ".join(f"{key} {short(value)}" for key, value in changed.items())


def _figures(requests: Sequence[FinishedRequest], pairs: Sequence[Pair]) -> Figures:
    totals = Totals.of(requests)
    return Figures(
        num_requests=totals.num_requests,
        num_new_tokens=totals.num_new_tokens,
        num_steps=totals.num_steps,
        mat=totals.mat,
        tok_s=totals.tok_s,
        step_ms=None if totals.step_s is None else 1000 * totals.step_s,
        speedup=speedup_of(pairs),
        request_speedup=request_speedup_of(pairs),
    )


def by_context(requests: Sequence[FinishedRequest]) -> tuple[ContextBin, ...]:
    """tok/s and MAT by length of context (prompt + half the answer), in bins that double."""
    bins = []
    for low, high in pairwise(CONTEXT_EDGES):
        members = [r for r in requests if r.decode_s > 0 and low <= r.context_len < high]
        totals = Totals.of(members)
        if totals.tok_s is not None:
            middle = fmean([r.context_len for r in members])
            bins.append(ContextBin(middle, totals.tok_s, totals.mat))
    return tuple(bins)


@dataclass(frozen=True, slots=True)
class Results:
    """An experiment, its finished requests and the report on them.

    Attributes:
        environment: that of its first run; empty before it.
    """

    benchmark: Benchmark
    plan: ExperimentPlan
    requests: tuple[FinishedRequest, ...]
    report: Report
    environment: Mapping[str, Any]

    @property
    def about(self) -> str:
        """The settings that all configurations share, in one line."""
        plan, here = self.plan, self.environment
        sampling = plan.sampling
        parts = (
            plan.target.title or plan.target.name,
            here.get("dtype", plan.dtype),
            here.get("device_name", ""),
            sampling.words if sampling.greedy else f"{sampling.words}, seed {sampling.seed}",
            f"at most {plan.limits.max_new_tokens} tokens",
        )
        return " · ".join(filter(None, map(str, parts)))


def read_results(
    log: RunLog,
    benchmark_id: str,
    requests: Iterable[FinishedRequest] | None = None,
    types: MethodTypes | None = None,
    faults: Mapping[str, str] | None = None,
) -> Results:
    """The results of an experiment so far.

    Args:
        requests: its finished requests; by default read from the log.
        faults: configurations that failed, while the experiment runs; by default from the log.
    """
    row, plan = stored_experiment(log, benchmark_id, types)
    finished = tuple(finished_requests(log, benchmark_id) if requests is None else requests)
    faults = row.summary.get("faults", {}) if faults is None else faults
    planned = None if row.status == "completed" else plan.num_requests
    audits = audits_of(log, benchmark_id)
    report = make_report(plan, finished, audits, planned=planned, faults=faults)
    return Results(row, plan, finished, report, environment_of(log, benchmark_id))


def stored_experiment(
    log: RunLog, benchmark_id: str, types: MethodTypes | None = None
) -> tuple[Benchmark, ExperimentPlan]:
    """The row of an experiment and its plan.

    Raises ConfigError: no such experiment is in the log, or it is a sweep (see `stored_sweep`).
    """
    row = log.benchmarks.get(benchmark_id)
    if row is None or row.kind == "sweep":
        raise unknown_experiment(benchmark_id)
    return row, ExperimentPlan.stored(row.plan, types)


def unknown_experiment(benchmark_id: str) -> ConfigError:
    return ConfigError(f"No experiment {benchmark_id!r:.80} is in the log.")


def environment_of(log: RunLog, benchmark_id: str) -> Mapping[str, Any]:
    """The environment of an experiment's first run; empty before it."""
    query = RunQuery(experiment_id=benchmark_id, descending=False, limit=1)
    first = next(iter(log.rows(query)), None)
    run = None if first is None else log.get(first.id)
    return {} if run is None else run.environment


def default_name(plan: ExperimentPlan) -> str:
    """The name of an experiment that the user did not name."""
    if isinstance(plan, SweepPlan):
        kind = plan.swept.decoding_type.lower().replace("_", "-")
        return f"{kind}-{plan.chooser.objective}-{datetime.now():%m%d-%H%M%S}"
    words = " ".join(plan.items[0].turns[0].split())[:40]
    if plan.kind in ("compare", "fastest"):
        return f"{'Comparison' if plan.kind == 'compare' else 'Fastest method'} · {words}"
    suites = " + ".join(dict.fromkeys(item.suite for item in plan.items))
    return f"{suites}: {', '.join(c.name for c in plan.configurations[1:]) or 'plain'}"
