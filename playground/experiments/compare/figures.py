"""What one configuration's runs come to: sums over prompts and repeats, and the cost of a step.

Times and tokens are summed before they are divided, so that a long run counts for more than a short
one and the figures obey the formula of the explanation exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

from engine.metrics import FORMULAS
from playground.experiments.bench.measured import Measured
from playground.experiments.bench.report import position_rates
from playground.experiments.bench.speedup import Speedup, speedup_of

POOLED = "summed over prompts and repeats before dividing"
FIGURE_FORMULAS = {
    **FORMULAS,
    "speedup": f"{FORMULAS['speedup']}; {POOLED}. Spread: lowest … highest of the repeats",
    "tok_s": f"{FORMULAS['tok_s']}; {POOLED}",
    "mat": f"{FORMULAS['mat']}; {POOLED}",
    "position_rates": f"{FORMULAS['position_rates']}; {POOLED}",
    "time_split": f"{FORMULAS['time_split']}; {POOLED}",
    "ttft_s": f"{FORMULAS['ttft_s']}; median over prompts and repeats",
    "itl_ms": f"{FORMULAS['itl_ms']}; mean over prompts and repeats",
    "verdict": "greedy: every text compared with plain decoding's, token by token",
}
"""Tooltips of the comparison's table."""
Pair = tuple[Measured, Measured]
"""A configuration's run, and plain decoding's on the same prompt in the same repeat."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Mean seconds per step.

    Attributes:
        between_s: from the end of a step to the begin of the next: the loop itself.
    """

    draft_s: float
    verify_s: float
    accept_s: float
    other_s: float
    between_s: float

    @property
    def step_s(self) -> float:
        """The step's own clock, without what lies between steps."""
        return self.draft_s + self.verify_s + self.accept_s + self.other_s


@dataclass(frozen=True, slots=True)
class Pooled:
    """Sums over runs.

    Attributes:
        num_committed: tokens after each run's first, counted after any cut.
        decode_s: first commit → last commit.
        split_s: seconds in draft, verify, accept and other.
    """

    num_runs: int
    num_committed: int
    num_steps: int
    num_drafted: int
    num_accepted: int
    decode_s: float
    split_s: tuple[float, float, float, float]
    rates: tuple[float, ...]
    ttft_s: float
    itl_s: float | None

    @property
    def tok_s(self) -> float:
        return self.num_committed / self.decode_s

    @property
    def mat(self) -> float:
        return 1 + self.num_accepted / self.num_steps

    @property
    def kept(self) -> float:
        """Share of the tokens of all steps that was left after cuts by EOS, stop or length."""
        return self.num_committed / (self.num_steps + self.num_accepted)

    @property
    def cost(self) -> Cost:
        draft_s, verify_s, accept_s, other_s = (part / self.num_steps for part in self.split_s)
        between_s = max(0.0, self.decode_s - sum(self.split_s)) / self.num_steps
        return Cost(draft_s, verify_s, accept_s, other_s, between_s)

    def to_dict(self) -> dict[str, Any]:
        """The figures as the page shows them."""
        cost = self.cost
        return {
            "num_runs": self.num_runs,
            "num_new_tokens": self.num_committed + self.num_runs,
            "num_steps": self.num_steps,
            "tok_s": self.tok_s,
            "mat": self.mat,
            "draft_acceptance": self.num_accepted / self.num_drafted if self.num_drafted else None,
            "position_rates": list(self.rates),
            "ttft_s": self.ttft_s,
            "itl_ms": None if self.itl_s is None else 1000 * self.itl_s,
            "split": {
                "draft_s": cost.draft_s,
                "verify_s": cost.verify_s,
                "accept_s": cost.accept_s,
                "other_s": cost.other_s,
            },
        }


def pool(runs: Sequence[Measured]) -> Pooled | None:
    """The sums; None where nothing was decoded after the first tokens."""
    decoded = [run for run in runs if run.num_steps and run.decode_s > 0]
    if not decoded:
        return None
    itl = [run.itl_s for run in decoded if run.itl_s is not None]
    draft_s, verify_s, accept_s, other_s = (
        sum(run.split_s[part] for run in decoded) for part in range(4)
    )
    return Pooled(
        num_runs=len(decoded),
        num_committed=sum(run.num_new_tokens - 1 for run in decoded),
        num_steps=sum(run.num_steps for run in decoded),
        num_drafted=sum(run.num_drafted for run in decoded),
        num_accepted=sum(run.num_accepted for run in decoded),
        decode_s=sum(run.decode_s for run in decoded),
        split_s=(draft_s, verify_s, accept_s, other_s),
        rates=position_rates(decoded),
        ttft_s=median(run.ttft_s for run in decoded),
        itl_s=mean(itl) if itl else None,
    )


def in_pairs(own: Sequence[Measured], plain: Sequence[Measured]) -> list[Pair]:
    """The configuration's runs that have a partner, with it."""
    partners = {run.pair: run for run in plain}
    return [(run, partners[run.pair]) for run in own if run.pair in partners]


def by_prompt(pairs: Sequence[Pair]) -> list[tuple[str, Speedup]]:
    """Every prompt's own speedup, in the order of the prompts."""
    names = dict.fromkeys(own.prompt for own, _ in pairs)
    found = [
        (prompt, speedup_of([pair for pair in pairs if pair[0].prompt == prompt]))
        for prompt in names
    ]
    return [(prompt, speedup) for prompt, speedup in found if speedup is not None]


def speedup_dict(pairs: Sequence[Pair]) -> dict[str, Any] | None:
    """The speedup as the page shows it; None where no run has a partner."""
    speedup = speedup_of(pairs)
    if speedup is None:
        return None
    return {
        "value": speedup.ratio,
        "low": speedup.low,
        "high": speedup.high,
        "spread_over": speedup.spread_over if speedup.num_pairs > 1 else None,
        "num_repeats": len({own.repeat for own, _ in pairs}),
        "by_prompt": [[name, one.ratio] for name, one in by_prompt(pairs)],
    }
