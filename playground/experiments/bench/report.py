"""What came of a benchmark, from its finished requests alone: tables, ratios, verdicts.

`FORMULAS` says how each figure is computed; it travels with every report.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from playground.experiments.bench.audits import Audits
from playground.experiments.bench.groups import in_order
from playground.experiments.bench.headline import Contender, headline
from playground.experiments.bench.latency import LatencyTable, latency_table
from playground.experiments.bench.measured import SPLIT, Measured
from playground.experiments.bench.speedup import Pair, Speedup, pooled_tok_s, speedup_of
from playground.experiments.bench.stats import mean
from playground.experiments.bench.verdict import Verdict, trust_in, verdict_of

FORMULAS: dict[str, str] = {
    "speedup": (
        "tok/s over the tok/s of plain decoding on the same requests, tok/s = "
        "Σ (new tokens - 1) / Σ (last commit - first commit)"
    ),
    "mean_of_ratios": "mean over requests of tok/s / tok/s of plain decoding for that request",
    "spread": (
        "lowest … highest speedup of a repeat; with one repeat the quartiles of the requests"
    ),
    "mat": "1 + Σ accepted draft tokens / Σ steps, before any cut by EOS or length",
    "tok_s": "Σ (new tokens - 1) / Σ (last commit - first commit): decoding without prefill",
    "step_ms": "Σ step latency / steps: draft + verify + accept + other",
    "position_rates": "rate i = steps that accepted at least i draft tokens / steps",
    "draft_acceptance": "accepted draft tokens / drafted tokens",
    "itl_ms": "mean over requests of the mean over steps of step latency / tokens committed",
    "ttft_ms": "mean over requests of request in the engine → first commit",
    "split_ms": "Σ seconds in draft, verify, accept and other / steps",
    "by_context": "tok/s of the requests by prompt tokens + half of the new tokens",
    "verdict": "greedy answers that are token for token those of plain decoding / answers",
}
CONTEXT_EDGES = (0, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)


@dataclass(frozen=True, slots=True)
class Cell:
    """One configuration on one group of prompts, or on all of them."""

    num_requests: int
    num_new_tokens: int
    num_steps: int
    mat: float | None
    tok_s: float | None
    step_ms: float | None
    speedup: Speedup | None


@dataclass(frozen=True, slots=True)
class ContextBin:
    """tok/s of the requests whose mean context length lies in [`low`, `high`)."""

    low: int
    high: int
    num_requests: int
    context_len: float
    tok_s: float


@dataclass(frozen=True, slots=True)
class Section:
    """Everything about one configuration; `example_run` is one of its runs in the log."""

    name: str
    title: str
    decoding_type: str
    lossless: bool
    reference: bool
    overall: Cell
    groups: Mapping[str, Cell]
    latency: LatencyTable | None
    position_rates: tuple[float, ...]
    draft_acceptance: float | None
    split_ms: Mapping[str, float] | None
    itl_ms: float | None
    ttft_ms: float | None
    by_context: tuple[ContextBin, ...]
    verdict: Verdict | None
    example_run: str | None


@dataclass(frozen=True, slots=True)
class Report:
    """A whole benchmark so far; `headline` says which configuration is fastest, in sentences."""

    configurations: tuple[Section, ...]
    groups: tuple[str, ...]
    num_done: int
    headline: str

    def section(self, name: str) -> Section:
        return next(section for section in self.configurations if section.name == name)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def make_report(
    plan: Mapping[str, Any], requests: Sequence[Measured], audits: Audits | None = None
) -> Report:
    """The report over a stored plan and what is finished of it.

    Args:
        plan: as `Plan.to_dict` wrote it; the first configuration is the reference.
        audits: of answers that differ from the reference's.
    """
    known = audits or {}
    configurations = plan["configurations"]
    reference = configurations[0]["name"]
    greedy = plan["sampling"]["temperature"] < 1e-5
    by_name: dict[str, list[Measured]] = {c["name"]: [] for c in configurations}
    for request in requests:
        by_name.setdefault(request.configuration, []).append(request)
    plain = {request.pair: request for request in by_name[reference]}
    sections = tuple(
        _section(
            c,
            by_name[c["name"]],
            plain,
            reference=c["name"] == reference,
            audits=known if greedy else None,
        )
        for c in configurations
    )
    groups = tuple(in_order({request.group for request in requests}))
    contenders = [
        Contender(s.name, s.overall.speedup, trust_in(s.verdict, lossless=s.lossless))
        for s in sections[1:]
    ]
    return Report(sections, groups, len(requests), headline(contenders))


def _section(
    head: Mapping[str, Any],
    requests: Sequence[Measured],
    plain: Mapping[tuple[str, str, int, int], Measured],
    *,
    reference: bool,
    audits: Audits | None,
) -> Section:
    """One configuration; without `audits` its answers are not compared with the reference's."""
    pairs = [(r, plain[r.pair]) for r in requests if r.pair in plain]
    compared = audits is not None and not reference
    itl = [r.itl_s for r in requests if r.itl_s is not None]
    drafted = sum(r.num_drafted for r in requests)
    return Section(
        name=head["name"],
        title=head["title"],
        decoding_type=head["config"]["decoding_type"],
        lossless=head["lossless"],
        reference=reference,
        overall=_cell(requests, pairs),
        groups=_by_group(requests, pairs),
        latency=latency_table(requests),
        position_rates=position_rates(requests),
        draft_acceptance=sum(r.num_accepted for r in requests) / drafted if drafted else None,
        split_ms=_split_ms(requests),
        itl_ms=1000 * mean(itl) if itl else None,
        ttft_ms=1000 * mean([r.ttft_s for r in requests]) if requests else None,
        by_context=by_context(requests),
        verdict=verdict_of(pairs, audits) if compared else None,
        example_run=requests[0].run_id if requests else None,
    )


def _by_group(requests: Sequence[Measured], pairs: Sequence[Pair]) -> dict[str, Cell]:
    groups = in_order({request.group for request in requests})
    return {
        group: _cell(
            [r for r in requests if r.group == group], [p for p in pairs if p[0].group == group]
        )
        for group in groups
    }


def _cell(requests: Sequence[Measured], pairs: Sequence[Pair]) -> Cell:
    steps = sum(r.num_steps for r in requests)
    seconds = sum(sum(r.split_s) for r in requests)
    return Cell(
        num_requests=len(requests),
        num_new_tokens=sum(r.num_new_tokens for r in requests),
        num_steps=steps,
        mat=1 + sum(r.num_accepted for r in requests) / steps if steps else None,
        tok_s=pooled_tok_s(requests),
        step_ms=1000 * seconds / steps if steps else None,
        speedup=speedup_of(pairs),
    )


def position_rates(requests: Sequence[Measured]) -> tuple[float, ...]:
    """Rate i = steps that accepted at least i draft tokens / steps, over all requests."""
    steps = sum(r.num_steps for r in requests)
    deepest = max((len(r.at_least) for r in requests), default=0)
    counts = [sum(r.at_least[i] for r in requests if i < len(r.at_least)) for i in range(deepest)]
    return tuple(count / steps for count in counts)


def _split_ms(requests: Sequence[Measured]) -> dict[str, float] | None:
    """Mean milliseconds per step in draft, verify, accept and other."""
    steps = sum(r.num_steps for r in requests)
    if not steps:
        return None
    total = [sum(r.split_s[i] for r in requests) for i in range(len(SPLIT))]
    return {
        part.removesuffix("_s"): 1000 * seconds / steps
        for part, seconds in zip(SPLIT, total, strict=True)
    }


def by_context(requests: Sequence[Measured]) -> tuple[ContextBin, ...]:
    """tok/s over the length of the context: prompt + half of the answer, in bins that double."""
    bins = []
    for low, high in zip(CONTEXT_EDGES, CONTEXT_EDGES[1:], strict=False):
        members = [r for r in requests if r.decode_s > 0 and low <= r.context_len < high]
        tok_s = pooled_tok_s(members)
        if tok_s is not None:
            middle = mean([r.context_len for r in members])
            bins.append(ContextBin(low, high, len(members), middle, tok_s))
    return tuple(bins)
