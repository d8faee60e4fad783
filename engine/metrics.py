"""The figures of a run and their definitions, computed from its records.

MAT and the position rates count acceptance before any cut by EOS or length; tok/s counts what was
committed after it. `FORMULAS` defines every figure the user sees. Rates of several runs
are pooled: numerators and denominators are summed before they are divided.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple, Self

from engine.steps import End, Prefill, Record, Step

FORMULAS: dict[str, str] = {
    "mat": "mean accepted tokens: "
    "1 + accepted draft tokens / steps, before any cut by EOS or length",
    "position_rates": "how deep drafts go: "
    "rate i = steps that accepted at least i draft tokens / steps",
    "draft_acceptance": "how much of the draft is right: accepted draft tokens / drafted tokens; "
    "what structured output forbids is cut before it is verified, and is not among them",
    "ttft_s": "time to first token: request in the engine, model loaded → first commit, in seconds",
    "tok_s": "decoding without prefill: "
    "(new tokens - 1) / (last commit - first commit), in seconds",
    "itl_ms": "inter-token latency: "
    "mean of step latency / tokens the step committed, in milliseconds",
    "step_p50_ms": "median latency of a step, in milliseconds",
    "step_p95_ms": "95th percentile of the latency of a step, in milliseconds",
    "time_split": "mean seconds per step in draft, verify, accept and other. Of other, roll-back: "
    "what recurrent layers take for a tree beyond as many tokens of one text (copied states, calls "
    "per level or branch), and to have the state after the accepted path; 0 without such layers",
    "quiet_split": "seconds per step up to the next step, without the steps that something else on "
    "the machine disturbed",
    "num_prompt_tokens": "the prompt: tokens that were read / tokens in the cache already, from an "
    "earlier turn",
    "num_new_tokens": "new tokens, counted after any cut by EOS or length / steps of the loop",
    "speedup": "tok/s over the tok/s of plain decoding: same target, prompt, device and dtype",
}


def mat(num_accepted: int, num_steps: int) -> float | None:
    """Mean accepted tokens of one run or several; None without a step."""
    return 1 + num_accepted / num_steps if num_steps else None


def tok_s(runs: Iterable[tuple[int, float]]) -> float | None:
    """Decoding rate of one run or several; None where nothing was decoded.

    Args:
        runs: new tokens, and seconds from first to last commit.
    """
    decoded = [(num_new_tokens - 1, seconds) for num_new_tokens, seconds in runs if seconds > 0]
    num_tokens, seconds = sum(n for n, _ in decoded), sum(s for _, s in decoded)
    return num_tokens / seconds if decoded else None


def percentile(values: Sequence[float], q: float) -> float:
    """The q-th percentile (0 … 100), linear between the closest ranks as numpy's default.

    Example: the 75th of 10, 20, 40 lies at rank 0.75 · 2 = 1.5, half way from 20 to 40: 30.
    """
    ordered = sorted(values)
    at = q / 100 * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def first_divergence(ours: Sequence[int], reference: Sequence[int]) -> int | None:
    """Place of the first token that differs or is missing on one side; None if they are equal."""
    for at, (a, b) in enumerate(zip(ours, reference, strict=False)):
        if a != b:
            return at
    return None if len(ours) == len(reference) else min(len(ours), len(reference))


def common_len(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens that two texts begin with in common."""
    parted = first_divergence(one, other)
    return len(one) if parted is None else parted


@dataclass(frozen=True, slots=True)
class TimeSplit:
    """Mean seconds per step."""

    draft_s: float
    verify_s: float
    accept_s: float
    other_s: float
    rollback_s: float = 0.0
    """A part of `other_s`, and none of `verify_s`; see `engine.model.states.RollBack`."""

    @property
    def total_s(self) -> float:
        return self.draft_s + self.verify_s + self.accept_s + self.other_s

    @classmethod
    def mean(cls, splits: Sequence[Self]) -> Self:
        """Of at least one."""
        return cls(*(math.fsum(map(part, splits)) / len(splits) for part in PARTS))


PARTS = [attrgetter(name) for name in ("draft_s", "verify_s", "accept_s", "other_s", "rollback_s")]


BUSY = 3.0
"""A step that took this many times what steps like it take was disturbed."""


def undisturbed(by_size: Mapping[int, Sequence[TimeSplit]]) -> list[TimeSplit]:
    """Steps that nothing else on the machine held up, out of all by the number of drafted tokens.

    A cold start, a page that draws or another program multiplies the time of some steps, and of
    two runs that are compared it never meets the same ones. A longer draft takes longer by right:
    a step is left out if it took more than `BUSY` times the median of those that drafted as much
    or more.

    Example: {0: [5, 5, 6, 5, 90], 8: [30, 30, 31]} ms. Three steps that drafted 8 are like each
    other; the median of all eight is 18, so 90 is over 3 · 18 and goes.
    """
    kept: list[TimeSplit] = []
    times: list[float] = []
    for size in sorted(by_size, reverse=True):
        times = sorted(times + [one.total_s for one in by_size[size]])
        most_s = BUSY * percentile(times, 50)
        kept += [one for one in by_size[size] if one.total_s <= most_s]
    return kept


@dataclass(frozen=True, slots=True)
class Metrics:
    """Figures of one run; None where a run was too short to define them."""

    num_prompt_tokens: int
    num_new_tokens: int
    num_steps: int
    num_drafted: int
    num_accepted: int
    mat: float | None
    position_rates: tuple[float, ...]
    draft_acceptance: float | None
    ttft_s: float | None
    tok_s: float | None
    itl_ms: float | None
    step_p50_ms: float | None
    step_p95_ms: float | None
    time_split: TimeSplit | None
    num_cut: int = 0
    num_cached: int = 0
    quiet_split: TimeSplit | None = None
    num_disturbed: int = 0


@dataclass(slots=True)
class Tally:
    """Collects records and computes `Metrics` at any moment, in time linear in new records."""

    num_prompt_tokens: int = 0
    num_new_tokens: int = 0
    num_drafted: int = 0
    num_cut: int = 0
    num_cached: int = 0
    ttft_s: float | None = None
    last_commit_s: float = 0.0
    accepted_counts: dict[int, int] = field(default_factory=dict)
    step_s: list[float] = field(default_factory=list)
    by_size: dict[int, list[TimeSplit]] = field(default_factory=dict)
    """Steps with the time until the next, by how many tokens they drafted."""
    quiet: TimeSplit | None = None
    num_disturbed: int = 0
    quiet_due: int = 0
    itl_sum_s: float = 0.0
    num_itl: int = 0
    split_sum_s: list[float] = field(default_factory=lambda: [0.0] * 5)

    def add(self, record: Record) -> None:
        if isinstance(record, Prefill):
            self.num_prompt_tokens = record.num_prompt_tokens
            self.num_cached = record.num_cached
            self.num_new_tokens = 1
            self.ttft_s = self.last_commit_s = record.ttft_s
        elif isinstance(record, Step):
            self._add_step(record)
        elif isinstance(record, End):
            self.num_new_tokens = len(record.output_ids)
            self.quiet_due = 0

    def _add_step(self, step: Step) -> None:
        self.num_new_tokens += step.num_committed
        self.num_drafted += step.num_drafted
        self.num_cut += step.num_cut
        between_s = max(0.0, step.at_s - self.last_commit_s - step.total_s)
        self.last_commit_s = step.at_s
        self.accepted_counts[step.num_accepted] = self.accepted_counts.get(step.num_accepted, 0) + 1
        self.step_s.append(step.total_s)
        if step.num_committed:
            self.itl_sum_s += step.total_s / step.num_committed
            self.num_itl += 1
        parts = (step.draft_s, step.verify_s, step.accept_s, step.other_s, step.rollback_s)
        for i, seconds in enumerate(parts):
            self.split_sum_s[i] += seconds
        draft_s, verify_s, accept_s, other_s, rollback_s = parts
        whole = TimeSplit(draft_s, verify_s, accept_s, other_s + between_s, rollback_s)
        self.by_size.setdefault(step.num_drafted, []).append(whole)

    @property
    def metrics(self) -> Metrics:
        steps = len(self.step_s)
        accepted = sum(length * count for length, count in self.accepted_counts.items())
        decoding_s = self.last_commit_s - (self.ttft_s or 0.0)
        return Metrics(
            num_prompt_tokens=self.num_prompt_tokens,
            num_new_tokens=self.num_new_tokens,
            num_steps=steps,
            num_drafted=self.num_drafted,
            num_accepted=accepted,
            mat=mat(accepted, steps),
            position_rates=self._position_rates(),
            draft_acceptance=accepted / self.num_drafted if self.num_drafted else None,
            ttft_s=self.ttft_s,
            tok_s=tok_s([(self.num_new_tokens, decoding_s)] if steps else []),
            itl_ms=1000 * self.itl_sum_s / self.num_itl if self.num_itl else None,
            step_p50_ms=1000 * percentile(self.step_s, 50) if steps else None,
            step_p95_ms=1000 * percentile(self.step_s, 95) if steps else None,
            time_split=TimeSplit(*(s / steps for s in self.split_sum_s)) if steps else None,
            num_cut=self.num_cut,
            num_cached=self.num_cached,
            quiet_split=self._quiet_split() if steps else None,
            num_disturbed=self.num_disturbed,
        )

    def _quiet_split(self) -> TimeSplit | None:
        """Computed anew once a sixteenth more steps are there, and at the end: it sorts them."""
        steps = len(self.step_s)
        if steps >= self.quiet_due:
            self.quiet_due = steps + 1 + steps // 16
            quiet = undisturbed(self.by_size)
            self.quiet, self.num_disturbed = TimeSplit.mean(quiet), steps - len(quiet)
        return self.quiet

    def _position_rates(self) -> tuple[float, ...]:
        steps = len(self.step_s)
        longest = max(self.accepted_counts, default=0)
        at_least = [
            sum(count for length, count in self.accepted_counts.items() if length >= position)
            for position in range(1, longest + 1)
        ]
        return tuple(count / steps for count in at_least)


def measure(records: Iterable[Record]) -> Metrics:
    """Metrics of a whole run."""
    tally = Tally()
    for record in records:
        tally.add(record)
    return tally.metrics


# ---- why decoding is faster or slower than plain decoding

SAME = 0.02
"""A speedup this close to 1 is neither faster nor slower."""


def hardly_drafts(tokens_a_step: float) -> bool:
    """Whether so few drafts are accepted that no cost of drafting could matter."""
    return tokens_a_step < 1.05


class StepParts(NamedTuple):
    """Seconds of a step."""

    draft: float
    verify: float
    other: float


@dataclass(frozen=True, slots=True)
class Balance:
    """What one step saves and pays, in units of a plain step.

        speedup = tokens a step · t_plain / (t_draft + t_verify + t_other)

    A step saves all of its tokens but one and pays for drafting, for verifying more rows than one
    and for everything else; it is faster where it saves more than it pays.

    Attributes:
        mat: tokens that a step commits.
        paid: what it costs beyond a plain step, by part; negative where it costs less.
    """

    mat: float
    paid: Mapping[str, float]

    @classmethod
    def of(cls, mat: float, own: StepParts, plain: StepParts) -> Self:
        """Of a step that took `own` where one of plain decoding takes `plain`."""
        unit = sum(plain)
        extra = ((ours - theirs) / unit for ours, theirs in zip(own, plain, strict=True))
        return cls(mat, dict(zip(StepParts._fields, extra, strict=True)))

    @property
    def total(self) -> float:
        return sum(self.paid.values())

    @property
    def largest(self) -> str:
        return max(self.paid, key=lambda part: self.paid[part])

    @property
    def formula(self) -> float:
        return self.mat / (1 + self.total)

    @property
    def without_largest(self) -> float:
        """The speedup if the largest cost were nothing."""
        return self.mat / (1 + self.total - max(0.0, self.paid[self.largest]))
