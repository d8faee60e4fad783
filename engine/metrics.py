"""How every figure is computed from counts and seconds, once; `engine.figures` has their titles.

The functions compute rates of one run or of several, whose counts are summed before they are
divided; pages, tables, exports, commands and APIs show what they return.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from operator import attrgetter
from typing import Any, NamedTuple, Self

from engine.figures import STEP_PARTS
from engine.steps import End, Prefill, Record, Step

EQUAL_MARGIN = 0.02
"""A speedup this close to 1 is neither faster nor slower."""


def ratio(part: float | None, whole: float | None) -> float | None:
    """None where either is not known, or the divisor is 0.

    Draft acceptance is accepted over drafted tokens; a throughput tokens or requests over the time
    that all of them took; a speedup one tok/s over another.
    """
    return part / whole if whole and part is not None else None


def mat(num_accepted: float, num_steps: float) -> float | None:
    """Mean accepted tokens of one run or several; None without a step."""
    return 1 + num_accepted / num_steps if num_steps else None


def chain_mat(rates: Sequence[float], draft_len: int) -> float:
    """MAT of a chain of this length: 1 + the position rates of a longer one up to it."""
    return 1 + math.fsum(rates[:draft_len])


def predicted_tok_s(mat: float, step_ms: float) -> float:
    """Speed of steps with this MAT and duration: 1000 · MAT / ms of a step."""
    return 1000 * mat / step_ms


def step_ms_of(mat: float | None, tok_s: float | None) -> float | None:
    """Milliseconds from one step to the next: 1000 · MAT / tok/s."""
    return ratio(None if mat is None else 1000 * mat, tok_s)


def at_least(accepted_lens: Mapping[int, int]) -> tuple[int, ...]:
    """Steps that accepted at least 1, 2, … draft tokens, from those that accepted exactly 0, 1, ….

    Example: {0: 3, 1: 2, 3: 1}: three of six accepted one or more, one two, one three: (3, 1, 1).
    """
    longest = max(accepted_lens, default=0)
    return tuple(
        sum(count for length, count in accepted_lens.items() if length >= position)
        for position in range(1, longest + 1)
    )


def position_rates(counts: Sequence[float], num_steps: float) -> tuple[float, ...]:
    """Rates from the counts of `at_least`, of one run or several."""
    return tuple(count / num_steps for count in counts) if num_steps else ()


def tok_s(runs: Iterable[tuple[int, float]]) -> float | None:
    """Decoding rate of one run or several; None where nothing was decoded.

    Args:
        runs: new tokens, and seconds from first to last commit.
    """
    decoded = [(num_new_tokens - 1, seconds) for num_new_tokens, seconds in runs if seconds > 0]
    num_tokens, seconds = sum(n for n, _ in decoded), sum(s for _, s in decoded)
    return num_tokens / seconds if decoded else None


def tpot_ms(num_new_tokens: int, decode_s: float) -> float | None:
    """Time per output token: (request latency - time to first token) / (new tokens - 1).

    None where nothing follows the first token. Other engines' benchmarks call it ITL.
    """
    return 1000 * decode_s / (num_new_tokens - 1) if num_new_tokens > 1 else None


def mean_or_none(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def num_beyond_end(num_accepted: int, num_steps: int, num_new_tokens: int) -> int:
    """Accepted draft tokens + steps - (new tokens - 1): what lies beyond the end of the text.

    Example: one step accepts 16 tokens and adds one, but the text may have two tokens in all, the
    prefill's and one more: 16 + 1 - (2 - 1) = 16 lie beyond its end. MAT is 17.
    """
    return max(0, num_accepted + num_steps - max(0, num_new_tokens - 1))


def expert_reads(num_experts: int, per_token: int, rows: float) -> float:
    """Experts that `rows` tokens read together over those of one, if all are chosen equally often.

    Example: 8 rows that choose 8 of 128 experts each read 6.5 times those of one.
    """
    missed = math.pow(1 - per_token / num_experts, rows)
    return num_experts * (1 - missed) / per_token


def tokens_per_step(num_new_tokens: int, num_steps: int) -> float | None:
    """(new tokens - 1) / steps, after any cut; the prefill's token is no step's."""
    return ratio(num_new_tokens - 1, num_steps)


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
    """Index of the first token that differs or is missing on one side; None if they are equal."""
    pairs = enumerate(zip_longest(ours, reference))
    return next((index for index, (token, expected) in pairs if token != expected), None)


def common_len(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common prefix."""
    divergence = first_divergence(one, other)
    return len(one) if divergence is None else divergence


class StepParts(NamedTuple):
    """Seconds of a step."""

    draft: float
    verify: float
    other: float


@dataclass(frozen=True, slots=True)
class TimeSplit:
    """Seconds of a step, or their mean over several, by part; the parts add up to the step.

    Attributes:
        rollback_s: restoring recurrent states; here, not included in `other_s`.
    """

    draft_s: float
    verify_s: float
    accept_s: float
    other_s: float
    rollback_s: float = 0.0

    @property
    def total_s(self) -> float:
        return math.fsum(_PARTS(self))

    @property
    def ms(self) -> dict[str, float]:
        """Milliseconds by part; roll-back only where there is any."""
        parts = zip(STEP_PARTS, _PARTS(self), strict=True)
        return {part: 1000 * each for part, each in parts if each or part != STEP_PARTS[-1]}

    @property
    def parts(self) -> StepParts:
        """As compared with plain decoding: roll-back grows with the rows, and counts as verify."""
        other_s = self.accept_s + self.other_s
        return StepParts(self.draft_s, self.verify_s + self.rollback_s, other_s)

    @classmethod
    def of(cls, step: Any) -> Self:
        """Of a `Step` or its row in the log, whose `other_s` includes roll-back."""
        other_s = step.other_s - step.rollback_s
        return cls(step.draft_s, step.verify_s, step.accept_s, other_s, step.rollback_s)

    @classmethod
    def mean(cls, splits: Sequence[Self]) -> Self:
        """The mean of one or more."""
        columns = zip(*map(_PARTS, splits), strict=True)
        return cls(*(math.fsum(column) / len(splits) for column in columns))


_PARTS = attrgetter("draft_s", "verify_s", "accept_s", "other_s", "rollback_s")
DISTURBED_RATIO = 3.0
"""A step that took this many times as long as similar steps was disturbed."""


def undisturbed(by_size: Mapping[int, Sequence[TimeSplit]]) -> list[TimeSplit]:
    """Steps that nothing else on the machine held up; `by_size` has all, by drafted tokens.

    A cold start, a page that draws or another program multiplies the time of some steps, never the
    same ones in two runs that are compared. Longer drafts are expected to take longer: a step is
    left out if it took more than `DISTURBED_RATIO` times the median of those that drafted as much
    or more.

    Example: {0: [5, 5, 6, 5, 90], 8: [30, 30, 31]} ms. The three steps that drafted 8 are alike;
    the median of all eight is 18, so 90, which exceeds 3 · 18, is left out.
    """
    quiet: list[TimeSplit] = []
    times: list[float] = []
    for size in sorted(by_size, reverse=True):
        times = sorted(times + [split.total_s for split in by_size[size]])
        max_s = DISTURBED_RATIO * percentile(times, 50)
        quiet += [split for split in by_size[size] if split.total_s <= max_s]
    return quiet


@dataclass(frozen=True, slots=True)
class Metrics:
    """Figures of one run; None where a run was too short to define them.

    Attributes:
        at_least: steps that accepted at least 1, 2, … draft tokens.
        decode_s: first commit → last commit.
        num_beyond_end: tokens that steps accepted or added beyond the end of the text.
    """

    num_prompt_tokens: int
    num_new_tokens: int
    num_steps: int
    num_drafted: int
    num_accepted: int
    at_least: tuple[int, ...]
    decode_s: float
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
    num_beyond_end: int = 0
    bypasses: Mapping[str, int] = field(default_factory=dict)
    """Steps that drafted nothing, by `engine.steps.Bypass`; empty for plain decoding."""
    expected_tok_s: float | None = None
    """From the controller's estimates, made before every step; None where drafts are as set."""
    num_undrafted: int = 0
    """Steps in `bypasses` that verified the root alone; lookahead's window has further rows."""
    undrafted_verify_s: float | None = None
    """Mean seconds to verify the root in these; None without any."""


@dataclass(slots=True)
class Tally:
    """Collects records; computes `Metrics` at any time, in time linear in new records."""

    num_prompt_tokens: int = 0
    num_new_tokens: int = 0
    num_drafted: int = 0
    num_cut: int = 0
    num_cached: int = 0
    ttft_s: float | None = None
    last_commit_s: float = 0.0
    accepted_lens: dict[int, int] = field(default_factory=dict)
    """Steps by how many draft tokens they accepted."""
    step_s: list[float] = field(default_factory=list)
    bypasses: Counter[str] = field(default_factory=Counter)
    undrafted_s: list[float] = field(default_factory=list)
    """Seconds to verify the root alone, where the method drafted nothing."""
    by_size: dict[int, list[TimeSplit]] = field(default_factory=dict)
    """Steps with the time until the next, by how many tokens they drafted."""
    quiet: TimeSplit | None = None
    num_disturbed: int = 0
    quiet_due: int = 0
    itl_sum_s: float = 0.0
    num_itl: int = 0
    split_sums_s: list[float] = field(default_factory=lambda: [0.0] * 5)
    expected: tuple[float, float] = (0.0, 0.0)
    """Tokens and seconds by the controller's estimates."""

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
        if step.bypass is not None:
            self.bypasses[step.bypass] += 1
            if not step.num_extra_rows:
                self.undrafted_s.append(step.verify_s)
        if step.expected is not None:
            tokens, seconds = self.expected
            self.expected = tokens + step.expected[0], seconds + step.expected[1]
        between_s = max(0.0, step.at_s - self.last_commit_s - step.total_s)
        self.last_commit_s = step.at_s
        self.accepted_lens[step.num_accepted] = self.accepted_lens.get(step.num_accepted, 0) + 1
        self.step_s.append(step.total_s)
        if step.num_committed:
            self.itl_sum_s += step.total_s / step.num_committed
            self.num_itl += 1
        split = TimeSplit.of(step)
        sums = zip(self.split_sums_s, _PARTS(split), strict=True)
        self.split_sums_s = [total + part for total, part in sums]
        whole = replace(split, other_s=split.other_s + between_s)
        self.by_size.setdefault(step.num_drafted, []).append(whole)

    @property
    def metrics(self) -> Metrics:
        steps = len(self.step_s)
        counts = at_least(self.accepted_lens)
        accepted = sum(counts)
        decode_s = self.last_commit_s - (self.ttft_s or 0.0)
        return Metrics(
            num_prompt_tokens=self.num_prompt_tokens,
            num_new_tokens=self.num_new_tokens,
            num_steps=steps,
            num_drafted=self.num_drafted,
            num_accepted=accepted,
            at_least=counts,
            decode_s=decode_s,
            mat=mat(accepted, steps),
            position_rates=position_rates(counts, steps),
            draft_acceptance=ratio(accepted, self.num_drafted),
            ttft_s=self.ttft_s,
            tok_s=tok_s([(self.num_new_tokens, decode_s)] if steps else []),
            itl_ms=1000 * self.itl_sum_s / self.num_itl if self.num_itl else None,
            step_p50_ms=1000 * percentile(self.step_s, 50) if steps else None,
            step_p95_ms=1000 * percentile(self.step_s, 95) if steps else None,
            time_split=TimeSplit(*(s / steps for s in self.split_sums_s)) if steps else None,
            num_cut=self.num_cut,
            num_cached=self.num_cached,
            quiet_split=self._quiet_split() if steps else None,
            num_disturbed=self.num_disturbed,
            num_beyond_end=num_beyond_end(accepted, steps, self.num_new_tokens),
            bypasses=dict(self.bypasses),
            expected_tok_s=ratio(*self.expected),
            num_undrafted=len(self.undrafted_s),
            undrafted_verify_s=mean_or_none(self.undrafted_s),
        )

    def _quiet_split(self) -> TimeSplit | None:
        """Sorts all steps, so only after every sixteenth more steps, and at the end."""
        steps = len(self.step_s)
        if steps >= self.quiet_due:
            self.quiet_due = steps + 1 + steps // 16
            quiet = undisturbed(self.by_size)
            self.quiet, self.num_disturbed = TimeSplit.mean(quiet), steps - len(quiet)
        return self.quiet


def measure(records: Iterable[Record]) -> Metrics:
    """Metrics of a whole run."""
    tally = Tally()
    for record in records:
        tally.add(record)
    return tally.metrics
