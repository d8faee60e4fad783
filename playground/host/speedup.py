"""The speedup of a configuration over plain decoding, with its interval; defined here once.

Times and tokens are added up before they are divided, so that a long request weighs more than a
short one.

A step of a method verifies at least the row that a plain step verifies, so on a steady clock it
takes no less time, and no speedup exceeds the tokens of a step.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, NamedTuple, Self, TypeVar

from engine import formats, metrics
from storage import PLAIN, RunLog, RunQuery, RunSummary, TimedRequest

Doubt = Literal["cheap step", "apart", "drift", "noise"]
DOUBTS: dict[Doubt, str] = {
    "cheap step": "a step took less time than a step of plain decoding, so plain decoding was "
    "timed while the machine was slower.",
    "apart": "plain decoding was not timed both before and after this run.",
    "drift": "the machine's speed changed during this run.",
    "noise": "the machine was busy while plain decoding was timed.",
}
DRIFT, NOISE = 1.15, 1.5
"""Ratios above which a baseline is unreliable: of the timings before and after a run, and of the
quartiles of one timing."""
MAX_INTERVAL_RATIO = 10.0
"""Upper over lower bound of an interval; wider ones say nothing and are not given."""
NORMAL = 1.96
"""97.5% quantile of the normal distribution: Student's with any number of answers."""
NoIntervalCause = Literal["few", "scatter"]
NO_INTERVAL: dict[NoIntervalCause, str] = {
    "few": "too few answers for an interval",
    "scatter": "answers that scatter too widely for an interval",
}
TRIAL = "trial"
"""Kind of the artifacts of a sweep."""

Unit = TypeVar("Unit")
Timed = TypeVar("Timed", bound=TimedRequest)


TimedPair = tuple[TimedRequest, TimedRequest]
"""A request as answered by a configuration, and by plain decoding."""


def pair_requests(own: Iterable[Timed], plain: Iterable[Timed]) -> list[tuple[Timed, Timed]]:
    """The requests of both sides that are equal and ran on the same machine, in pairs."""
    partners = {(request.pair_key, request.machine): request for request in plain}
    both = ((request, partners.get((request.pair_key, request.machine))) for request in own)
    return [(request, partner) for request, partner in both if partner is not None]


@dataclass(frozen=True, slots=True)
class Speedup:
    """How much faster than plain decoding, over `num_pairs` requests that both answered.

    Attributes:
        ratio: of pooled tok/s; None where `doubt` says that the baseline is unreliable.
        low, high: 95% interval of `ratio`; None where there is none.
        cause: why there is no interval: the answers are too few (a single measurement, say),
            or scatter so widely that more of them would not help.
    """

    ratio: float | None
    low: float | None
    high: float | None
    num_prompts: int
    num_repeats: int
    num_pairs: int
    cause: NoIntervalCause | None = None
    doubt: Doubt | None = None

    @property
    def text(self) -> str:
        """The ratio as every table, race and sentence writes it."""
        return formats.speedup(self.ratio)

    @property
    def interval(self) -> str:
        """The interval as every table writes it, or why there is none."""
        if self.doubt:
            return "unreliable baseline"
        if self.low is None:
            return NO_INTERVAL[self.cause or "few"]
        return formats.interval(self.low, self.high)

    @property
    def faster(self) -> bool:
        """Whether the interval lies above 1."""
        return self.low is not None and self.low > 1

    @property
    def slower(self) -> bool:
        """Whether the interval lies below 1."""
        return self.high is not None and self.high < 1


def doubt_of(
    own_step_s: float | None,
    plain_step_s: float | None,
    *,
    drift: float | None = 1.0,
    noise: float = 1.0,
) -> Doubt | None:
    """Why this baseline is unreliable; None where it is reliable.

    With `cheap step` no speedup is given at all; with the others none to two decimals.

    Args:
        own_step_s, plain_step_s: wall-clock seconds per step; None where unknown.
        drift: duration of a plain step after the run over that before it; 1 where the two were
            timed alternately, None where it was not timed on both sides.
        noise: ratio of the quartiles of the plain steps.
    """
    if own_step_s and plain_step_s and plain_step_s > (1 + metrics.EQUAL_MARGIN) * own_step_s:
        return "cheap step"
    if drift is None:
        return "apart"
    if not 1 / DRIFT < drift < DRIFT:
        return "drift"
    return "noise" if noise > NOISE else None


def speedup_of(pairs: Sequence[TimedPair]) -> Speedup | None:
    """`ratio_of` over plain decoding; without a number where the baseline is unreliable."""
    both = _decoded(pairs)
    if (ratio := ratio_of(both)) is None:
        return None
    counts = Counts.of(both)
    doubt = doubt_of(
        metrics.ratio(counts.decode_s, sum(own.num_steps for own, _ in both)),
        metrics.ratio(counts.plain_decode_s, sum(plain.num_steps for _, plain in both)),
    )
    return replace(ratio, ratio=None, low=None, high=None, doubt=doubt) if doubt else ratio


def request_speedup_of(pairs: Sequence[TimedPair]) -> float | None:
    """Ratio of output token throughputs, prefill included; None where `speedup_of` has none."""
    decoding = speedup_of(pairs)
    if decoding is None or decoding.ratio is None:
        return None
    own, plain = (
        sum(r.num_new_tokens for r in side) / sum(r.latency_s for r in side)
        for side in zip(*_decoded(pairs), strict=True)
    )
    return float(own / plain)


def ratio_of(pairs: Sequence[TimedPair], num_comparisons: int = 1) -> Speedup | None:
    """Ratio of pooled tok/s with its interval, over the requests that both sides decoded.

    None without any. Bars, tables, races and verdicts all use this estimator:

        ratio = (Σ tokens / Σ seconds) / (Σ plain tokens / Σ plain seconds)

    Turns and repeats of one prompt are not independent, so the scatter is measured between
    prompts. With a single prompt it is measured between its repeats, and the interval holds for
    this prompt alone. With u a prompt's contribution to the log ratio (its share of the tokens
    minus its share of the seconds, minus the same for plain decoding), the standard error is
    se = sqrt(n / (n - 1) · Σ u²) and the interval is ratio · exp(± t · se), t being Student's 97.5%
    quantile for n - 1 degrees of freedom.

    It covers the true ratio in 92 to 94 % of simulated benchmarks of 2 to 24 prompts; a percentile
    bootstrap over prompts covers it in 51 to 91 %.
    Source: Cochran, Sampling Techniques (1977), 6.4: the variance of a ratio by linearisation.

    Where several workers of a cluster have measured, each worker's seconds are in units of its own
    plain decoding (`normalize_clocks`), so that a slow worker does not change the ratio.

    Worked example: one prompt of 10 tokens, plain decoding 1 s, in two repeats 0.5 s and 0.48 s:
    ratio 2 / 0.98 = 2.04; u = ±(0.5 - 0.48 / 0.98) = ±0.0102, se = 0.0204, t = 12.71: 1.57 … 2.64.
    With 0.4 s in the second it would be 0.54 … 9.12, which is too wide to be given.
    """
    both = _decoded(pairs)
    if not both:
        return None
    prompts, repeats = by_prompt(both), group_pairs(both, lambda own: own.repeat)
    units = [Counts.of(unit) for unit in (prompts if len(prompts) > 1 else repeats).values()]
    ratio = ratio_of_counts(units, num_comparisons)
    return replace(ratio, num_prompts=len(prompts), num_repeats=len(repeats), num_pairs=len(both))


def ratio_of_counts(units: Sequence[Counts], num_comparisons: int = 1) -> Speedup:
    """`ratio_of` units whose tokens and seconds are known, each a prompt that was answered once."""
    own_tok_s, plain_s_per_tok = _rates(units)
    ratio = own_tok_s * plain_s_per_tok
    low, high, cause = _interval(ratio, units, num_comparisons)
    return Speedup(ratio, low, high, len(units), 1, len(units), cause)


def _decoded(pairs: Sequence[TimedPair]) -> list[TimedPair]:
    return normalize_clocks([(o, p) for o, p in pairs if o.decode_s > 0 and p.decode_s > 0])


class Counts(NamedTuple):
    """Tokens and seconds of a prompt (or of a repeat of the only one), and of plain decoding.

    Without the first token of each request, which the prefill commits.
    """

    num_tokens: int
    decode_s: float
    num_plain_tokens: int
    plain_decode_s: float

    @classmethod
    def of(cls, unit: Sequence[TimedPair]) -> Self:
        return cls(
            sum(own.num_new_tokens - 1 for own, _ in unit),
            sum(own.decode_s for own, _ in unit),
            sum(plain.num_new_tokens - 1 for _, plain in unit),
            sum(plain.decode_s for _, plain in unit),
        )


def prompt_counts(pairs: Sequence[TimedPair]) -> dict[str, Counts]:
    """Counts by prompt, as `differ` compares them."""
    prompts = by_prompt(_decoded(pairs))
    return {"/".join(prompt): Counts.of(unit) for prompt, unit in prompts.items()}


def differ(
    ours: Mapping[str, Counts], theirs: Mapping[str, Counts], num_comparisons: int = 1
) -> bool:
    """Whether two speedups on the same prompts differ by more than their scatter.

    Differences between prompts cancel out: with u a prompt's contribution to the ratio of the two
    speedups, as in `ratio_of`, they differ where |log ratio| > t · se. False for fewer than two
    prompts.
    """
    shared = [prompt for prompt in ours if prompt in theirs]
    if len(shared) < 2:
        return False
    a, b = ([side[prompt] for prompt in shared] for side in (ours, theirs))
    logs = [sign * math.log(rate) for sign, units in ((1, a), (-1, b)) for rate in _rates(units)]
    se = _standard_error([x - y for x, y in zip(_contributions(a), _contributions(b), strict=True)])
    return abs(math.fsum(logs)) > student_t(len(shared) - 1, num_comparisons) * se


def _rates(units: Sequence[Counts]) -> tuple[float, float]:
    """Pooled tok/s, and the seconds per token of plain decoding; their product is the speedup."""
    tokens, seconds, plain_tokens, plain_seconds = map(math.fsum, zip(*units, strict=True))
    return tokens / seconds, plain_seconds / plain_tokens


def _interval(
    ratio: float, units: Sequence[Counts], num_comparisons: int
) -> tuple[float, float, None] | tuple[None, None, NoIntervalCause]:
    """The bounds of the pooled ratio, or why there are none."""
    if len(units) < 2:
        return None, None, "few"
    se = _standard_error(_contributions(units))
    reach = student_t(len(units) - 1, num_comparisons) * se
    if 2 * reach > math.log(MAX_INTERVAL_RATIO):
        return None, None, "scatter" if 2 * NORMAL * se > math.log(MAX_INTERVAL_RATIO) else "few"
    return ratio / math.exp(reach), ratio * math.exp(reach), None


def _standard_error(changes: Sequence[float]) -> float:
    """Standard error of a log ratio, from the contributions of at least two units."""
    squares = math.fsum(change**2 for change in changes)
    return math.sqrt(len(changes) / (len(changes) - 1) * squares)


def _contributions(units: Sequence[Counts]) -> list[float]:
    """The contribution of each unit to the log ratio, u of `ratio_of`."""
    tokens, seconds, plain_tokens, plain_seconds = map(math.fsum, zip(*units, strict=True))
    return [
        (u.num_tokens / tokens - u.decode_s / seconds)
        - (u.num_plain_tokens / plain_tokens - u.plain_decode_s / plain_seconds)
        for u in units
    ]


def normalize_clocks(pairs: Sequence[TimedPair]) -> list[TimedPair]:
    """The pairs with each machine's seconds times the tok/s of plain decoding there.

    Pairs of a single machine stay as they are. Worked example: a prompt of 10 tokens takes one
    worker 1 s plain and 0.5 s with the method, another worker 4 s and 2 s. Both become 10 and 5.
    """
    machines = group_pairs(pairs, lambda own: own.machine)
    if len(machines) < 2:
        return list(pairs)
    scale = {
        machine: metrics.tok_s((plain.num_new_tokens, plain.decode_s) for _, plain in own) or 1.0
        for machine, own in machines.items()
    }

    def scaled(request: TimedRequest) -> TimedRequest:
        unit = scale[request.machine]
        return replace(request, ttft_s=request.ttft_s * unit, decode_s=request.decode_s * unit)

    return [(scaled(own), scaled(plain)) for own, plain in pairs]


def by_prompt(pairs: Sequence[TimedPair]) -> dict[tuple[str, str], list[TimedPair]]:
    """Pairs by suite and prompt."""
    return group_pairs(pairs, lambda own: (own.suite, own.prompt))


def group_pairs(
    pairs: Sequence[TimedPair], unit: Callable[[TimedRequest], Unit]
) -> dict[Unit, list[TimedPair]]:
    """Pairs by a key of the configuration's request, in order of first appearance."""
    units: dict[Unit, list[TimedPair]] = {}
    for pair in pairs:
        units.setdefault(unit(pair[0]), []).append(pair)
    return units


@lru_cache
def student_t(dof: int, num_comparisons: int = 1) -> float:
    """Student's quantile at 97.5%, or beyond 2.5% / `num_comparisons` (Bonferroni).

    Picking the largest of several compares it with all the others.
    Source: Abramowitz and Stegun, 26.7.3 and 26.7.4, by bisection of the angle atan(t / sqrt(n)).
    """
    inside, low, high = 1 - 0.05 / num_comparisons, 0.0, math.pi / 2
    for _ in range(60):
        angle = (low + high) / 2
        low, high = (angle, high) if _central_probability(angle, dof) < inside else (low, angle)
    return math.sqrt(dof) * math.tan(low)


def _central_probability(angle: float, dof: int) -> float:
    """P(|t| < sqrt(dof) · tan(angle)) of Student's distribution."""
    odd, squared = dof % 2, math.cos(angle) ** 2
    term = math.cos(angle) if odd else 1.0
    total = term if dof > 1 else 0.0
    for k in range(2 + odd, dof, 2):
        term *= squared * (k - 1) / k
        total += term
    whole = math.sin(angle) * total
    return 2 / math.pi * (angle + whole) if odd else whole


# ---- from the log


Measured = tuple[TimedRequest, Speedup]
"""The newest request of a configuration, or of a trial of a sweep, and its speedup over all."""


def speedups_of(log: RunLog, experiment_ids: Sequence[str]) -> dict[str, list[Measured]]:
    """What experiments compared with plain decoding, with the speedups of their reports, by id."""
    timed = log.experiments.timed_requests(experiment_ids)
    newest = {(one.experiment_id, one.trial, one.key): one for one in timed}
    sides: dict[tuple[str, str, str], list[TimedRequest]] = defaultdict(list)
    for one in newest.values():
        name = "" if one.decoding_type == PLAIN else one.configuration
        sides[one.experiment_id or "", one.trial, name].append(one)
    sweeps = {experiment_id for experiment_id, trial, _ in sides if trial}
    left_out = {
        (sweep_id, trial_id(trial["point"]))
        for sweep_id in sweeps
        for trial in trials_of(log, sweep_id)
        if trial["outcome"] != "measured"
    }
    measured: dict[str, list[Measured]] = {one: [] for one in experiment_ids}
    for (experiment_id, trial, name), own in sides.items():
        speedup = speedup_of(pair_requests(own, sides.get((experiment_id, trial, ""), ())))
        if name and speedup and (experiment_id, trial) not in left_out:
            measured[experiment_id].append((own[-1], speedup))
    return measured


def newest_speedups(log: RunLog) -> list[tuple[float | None, RunSummary]]:
    """The speedup of each configuration in the newest experiments, and a run of it.

    If several experiments measured one, the newest counts.
    """
    newest: dict[str, Measured] = {}
    for measured in speedups_of(log, log.experiments.newest()).values():
        for request, speedup in measured:
            newest.setdefault(request.setup_id, (request, speedup))
    ratios = {request.run_id: speedup.ratio for request, speedup in newest.values()}
    ids = tuple(ratios)
    return [(ratios[run.id], run) for run in log.rows(RunQuery(ids=ids, limit=len(ids)))]


# ---- the trials of a sweep


def key_of(point: Mapping[str, Any]) -> str:
    """A point as text that is equal for equal points; 1 and true differ."""
    return json.dumps(dict(sorted(point.items())))


def trial_id(point: Mapping[str, Any]) -> str:
    """What the runs of a point carry, equal for every attempt at it."""
    return hashlib.sha256(key_of(point).encode()).hexdigest()[:8]


def trials_of(log: RunLog, sweep_id: str) -> list[Mapping[str, Any]]:
    """The trials that have begun, by number; a copied log may have one twice."""
    oldest_first = reversed(log.artifacts.find(TRIAL, benchmark_id=sweep_id))
    metas = {one.meta["number"]: one.meta for one in oldest_first}
    return [metas[number] for number in sorted(metas)]
