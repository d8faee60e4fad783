"""What came of an experiment, from its finished requests alone: figures, ratios, verdicts.

`FORMULAS` says how each figure is computed; it travels with every report.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any

from engine import metrics
from engine.errors import ConfigError
from engine.metrics import TimeSplit
from playground.experiments.finished import (
    FinishedRequest,
    Pair,
    finished_requests,
    in_pairs,
    pairs_of,
)
from playground.experiments.plan import Configuration, ExperimentPlan, Types
from playground.experiments.prompts import in_order
from playground.experiments.report.explain import Explanation, explain
from playground.experiments.report.statistics import (
    LATENCY_ROWS,
    LatencyTable,
    Speedup,
    Totals,
    latency_table,
    position_rates,
    ratio_of,
    request_speedup_of,
    speedup_of,
)
from playground.experiments.report.verdict import (
    LOSSY,
    LOSSY_SAMPLED,
    SAMPLED,
    UNSTEADY,
    Audits,
    Contender,
    Headline,
    Verdict,
    audits_of,
    headline,
    num_unsteady,
    trust_in,
    verdict_of,
)
from storage import Benchmark, RunDetail, RunLog, RunQuery

FORMULAS: dict[str, str] = {
    "speedup": (
        "tok/s over the tok/s of plain decoding on the same requests, tok/s = "
        "Σ (new tokens - 1) / Σ (last commit - first commit); none where a step took less time "
        "than a plain step, for then plain decoding was timed while the machine was slower"
    ),
    "request_speedup": (
        "of whole requests, prefill included: Σ output tokens / Σ request latency over that of "
        "plain decoding on the same requests, as genai-perf's throughputs compare"
    ),
    "interval": (
        "95% interval of each speedup by itself: Student's t on the scatter between prompts, or "
        "between the repeats of a single prompt; none where its bounds would be more than 10 times "
        "apart. Which is the fastest is judged with Bonferroni's correction for their number"
    ),
    "mat": "1 + Σ accepted draft tokens / Σ steps, before any cut by EOS or length",
    "tok_s": "Σ (new tokens - 1) / Σ (last commit - first commit): decoding without prefill",
    "step_ms": "Σ step latency / steps: draft + verify + accept + other + roll-back",
    "position_rates": metrics.FORMULAS["position_rates"],
    "draft_acceptance": metrics.FORMULAS["draft_acceptance"],
    "itl_ms": "mean over requests of the mean over steps of step latency / tokens committed",
    "ttft_ms": "mean over requests of the time from entering the engine to the first commit",
    "time_split": "Σ seconds in draft, verify, accept, other and roll-back / steps",
    "by_context": "tok/s and MAT of the requests by prompt tokens + half of the new tokens",
    "output_token_throughput": "Σ output tokens / Σ request latency: one request at a time",
    "request_throughput": "requests / Σ request latency: one request at a time",
    **{key: definition for key, (_, definition) in LATENCY_ROWS.items()},
    "verdict": "greedy answers identical, token for token, to plain decoding's / answers",
}
CONTEXT_EDGES = (0, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)


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
    """tok/s and MAT of the requests whose mean context length lies in [`low`, `high`)."""

    low: int
    high: int
    num_requests: int
    context_len: float
    tok_s: float
    mat: float | None = None


@dataclass(frozen=True, slots=True)
class Section:
    """Everything about one configuration.

    Attributes:
        settings: those that are not the method's defaults.
        num_unsteady: prompts to which it gave another greedy answer in another repeat.
        why: what made it faster or slower than plain decoding.
        example_run: one of its runs in the log.
        fault: why it could not go on.
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
    fault: str = ""

    @property
    def verdict_sentence(self) -> str:
        """What can be said of its answers beside plain decoding's; empty where there is nothing."""
        verdict = self.verdict
        if self.reference:
            many = f"{self.num_unsteady} of {self.num_prompts} prompts"
            return UNSTEADY.format(many) if self.num_unsteady else ""
        if verdict is None:
            unsure = SAMPLED if self.lossless else LOSSY_SAMPLED
            return unsure if self.overall.speedup else ""
        if self.lossless:
            return verdict.sentence
        return (
            f"Lossy by design, yet {verdict.sentence}"
            if verdict.identical
            else (f"{LOSSY} {verdict.place}.")
        )


@dataclass(frozen=True, slots=True)
class Report:
    """A whole experiment so far.

    Attributes:
        headline: which configuration is fastest, in sentences.
        fastest: its name; None unless the intervals tell it from all others.
    """

    configurations: tuple[Section, ...]
    groups: tuple[str, ...]
    num_done: int
    greedy: bool
    headline: str
    fastest: str | None

    def section(self, name: str) -> Section:
        return next(section for section in self.configurations if section.name == name)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def make_report(
    plan: ExperimentPlan,
    requests: Sequence[FinishedRequest],
    audits: Audits | None = None,
    *,
    planned: int | None = None,
    faults: Mapping[str, str] | None = None,
    running: Collection[str] | None = None,
) -> Report:
    """The report over a plan and what is finished of it.

    Args:
        audits: of answers that differ from plain decoding's.
        planned: how many requests there will be, while they are not all done.
        faults: why configurations could not go on, by name.
        running: those that a search has not dropped; all, where nothing is searched for.

    Where several kinds of device have measured, each has sections of its own.
    """
    greedy = plan.sampling.greedy
    examined = (audits or {}) if greedy else None
    is_whole = planned is None or len(requests) >= planned
    preliminary = "" if is_whole else f"{len(requests)} of {planned} requests"
    by_device: dict[str, list[FinishedRequest]] = {}
    for request in requests:
        by_device.setdefault(request.device, []).append(request)
    groups = tuple(in_order(request.group for request in requests))
    every: list[Section] = []
    texts: list[str] = []
    best = Headline("")
    for device, own in (by_device or {"": []}).items():
        configurations: Sequence[Configuration] = plan.configurations
        if len(by_device) > 1:
            configurations = [replace(c, name=f"{c.name} on {device}") for c in configurations]
            own = [replace(r, configuration=f"{r.configuration} on {device}") for r in own]
        sections, best = _on_one_device(configurations, own, examined, preliminary, running)
        every += [replace(one, fault=(faults or {}).get(one.name, "")) for one in sections]
        if best.text:
            texts.append(f"{device}: {best.text}" if len(by_device) > 1 else best.text)
    fastest = best.fastest if len(by_device) < 2 else None
    return Report(tuple(every), groups, len(requests), greedy, " ".join(texts), fastest)


def _on_one_device(
    configurations: Sequence[Configuration],
    requests: Sequence[FinishedRequest],
    audits: Audits | None,
    preliminary: str,
    running: Collection[str] | None,
) -> tuple[tuple[Section, ...], Headline]:
    """Every configuration on one kind of device, and which is fastest there."""
    by_name: dict[str, list[FinishedRequest]] = {c.name: [] for c in configurations}
    for request in requests:
        by_name.setdefault(request.configuration, []).append(request)
    plain = by_name[configurations[0].name]
    sections = tuple(_section(c, by_name[c.name], plain, audits=audits) for c in configurations)
    contenders = [
        Contender(
            s.name,
            s.overall.speedup,
            trust_in(s.verdict, lossless=s.lossless),
            dropped=running is not None and s.name not in running,
        )
        for s in sections[1:]
    ]
    best = headline(
        sections[0].name,
        contenders,
        lambda one, other: ratio_of(in_pairs(by_name[one], by_name[other]), len(contenders)),
        preliminary=preliminary,
    )
    return sections, best


def _section(
    configuration: Configuration,
    requests: Sequence[FinishedRequest],
    plain: Sequence[FinishedRequest],
    *,
    audits: Audits | None,
) -> Section:
    """One configuration; without `audits` its answers are not compared with plain decoding's."""
    reference = requests is plain
    pairs = in_pairs(requests, plain)
    pool = Totals.of(requests)
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
        draft_acceptance=pool.draft_acceptance,
        time_split=pool.time_split,
        itl_ms=1000 * fmean(itl) if itl else None,
        ttft_ms=1000 * fmean([r.ttft_s for r in requests]) if requests else None,
        by_context=by_context(requests),
        verdict=None if reference or audits is None else verdict_of(pairs, audits),
        num_prompts=len({(r.suite, r.prompt, r.turn) for r in requests}),
        num_unsteady=0 if audits is None else num_unsteady(requests),
        why=None if reference else explain(pairs),
        example_run=requests[0].run_id if requests else None,
    )


def _settings_text(configuration: Configuration) -> str:
    """The settings that are not the method's defaults; a tree by its size."""

    def short(value: Any) -> str:
        is_long = isinstance(value, list) and len(str(value)) > 24
        return f"of {len(value)}" if is_long else str(value)

    try:
        changed = configuration.config.changed_flat
    except ConfigError:
        return "settings of another version"
    return ", ".join(f"{key} {short(value)}" for key, value in changed.items())


def _figures(requests: Sequence[FinishedRequest], pairs: Sequence[Pair]) -> Figures:
    pool = Totals.of(requests)
    return Figures(
        num_requests=pool.num_requests,
        num_new_tokens=pool.num_new_tokens,
        num_steps=pool.num_steps,
        mat=pool.mat,
        tok_s=pool.tok_s,
        step_ms=None if pool.step_s is None else 1000 * pool.step_s,
        speedup=speedup_of(pairs),
        request_speedup=request_speedup_of(pairs),
    )


def by_context(requests: Sequence[FinishedRequest]) -> tuple[ContextBin, ...]:
    """tok/s and MAT by length of context (prompt + half the answer), in bins that double."""
    bins = []
    for low, high in zip(CONTEXT_EDGES, CONTEXT_EDGES[1:], strict=False):
        members = [r for r in requests if r.decode_s > 0 and low <= r.context_len < high]
        pool = Totals.of(members)
        if pool.tok_s is not None:
            middle = fmean([r.context_len for r in members])
            bins.append(ContextBin(low, high, len(members), middle, pool.tok_s, pool.mat))
    return tuple(bins)


@dataclass(frozen=True, slots=True)
class Results:
    """An experiment, its finished requests and the report over them.

    Attributes:
        environment: where its first request ran; empty before it.
    """

    benchmark: Benchmark
    plan: ExperimentPlan
    requests: tuple[FinishedRequest, ...]
    report: Report
    environment: Mapping[str, Any]

    @property
    def about(self) -> str:
        """What is the same for every configuration."""
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

    def pairs(self, name: str) -> list[Pair]:
        """A configuration's answers beside plain decoding's."""
        return pairs_of(self.requests, name, self.plan)


def read_results(
    log: RunLog,
    benchmark_id: str,
    requests: Iterable[FinishedRequest] | None = None,
    types: Types | None = None,
    faults: Mapping[str, str] | None = None,
) -> Results:
    """Everything that an experiment has shown so far.

    Args:
        requests: its finished requests where they are at hand; else they are read from the log.
        faults: configurations that could not go on, where the experiment is not over.
    """
    row, plan = stored_experiment(log, benchmark_id, types)
    runs = RunQuery(benchmark_id=benchmark_id)
    finished = tuple(finished_requests(log, runs) if requests is None else requests)
    faults = row.summary.get("faults", {}) if faults is None else faults
    planned = None if row.status == "completed" else plan.num_requests
    audits = audits_of(log, benchmark_id)
    report = make_report(plan, finished, audits, planned=planned, faults=faults)
    return Results(row, plan, finished, report, environment_of(log, runs))


def stored_experiment(
    log: RunLog, benchmark_id: str, types: Types | None = None
) -> tuple[Benchmark, ExperimentPlan]:
    """Its row, and its plan.

    Raises ConfigError: no such experiment is in the log, or it is a sweep, which has a store.
    """
    row = log.benchmarks.get(benchmark_id)
    if row is None or row.plan.get("kind") == "sweep":
        raise unknown_experiment(benchmark_id)
    return row, ExperimentPlan.stored(row.plan, types)


def unknown_experiment(benchmark_id: str) -> ConfigError:
    return ConfigError(f"No experiment {benchmark_id!r:.80} is in the log. Was it deleted?")


def first_run(log: RunLog, benchmark_id: str) -> RunDetail:
    """Raises ConfigError: no such experiment is in the log, or none of its runs."""
    ids = log.ids(RunQuery(benchmark_id=benchmark_id, descending=False))
    run = log.get(ids[0]) if ids else None
    if run is None:
        raise unknown_experiment(benchmark_id)
    return run


def environment_of(log: RunLog, runs: RunQuery) -> Mapping[str, Any]:
    """Where the first of an experiment's runs was made; empty before it."""
    first = next(iter(log.rows(replace(runs, descending=False, limit=1))), None)
    detail = None if first is None else log.get(first.id)
    return {} if detail is None else detail.environment


def default_name(plan: ExperimentPlan) -> str:
    """What an experiment is called that nobody named."""
    words = " ".join(plan.items[0].turns[0].split())[:40]
    if plan.kind in ("compare", "fastest"):
        return f"{'Comparison' if plan.kind == 'compare' else 'Fastest method'} · {words}"
    suites = " + ".join(dict.fromkeys(item.suite for item in plan.items))
    return f"{suites}: {', '.join(c.name for c in plan.configurations[1:]) or 'plain'}"
