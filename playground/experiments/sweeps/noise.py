"""Whether two trials differ by more than the noise of their timing.

Every trial answers the same prompts, so trials are compared prompt by prompt: what makes one prompt
faster than another cancels out. With d the difference of log speedups of a prompt, two trials are
told apart when |mean d| > t · sd(d) / sqrt(prompts), t being Student's 97.5 % quantile.

Worked example: speedups 2.0, 1.5, 1.0 and 1.8, 1.4, 0.9 on the same prompts give d = 0.105, 0.069,
0.105, mean 0.093 and 4.30 · 0.021 / sqrt(3) = 0.052: the first is faster.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from playground.experiments.bench.stats import mean, std
from playground.experiments.sweeps.plan import Objective
from playground.experiments.sweeps.trials import Trial

MIN_PROMPTS = 3
"""Fewer do not tell how much they scatter."""
_T = "12.71 4.30 3.18 2.78 2.57 2.45 2.36 2.31 2.26 2.23 2.20 2.18 2.16 2.14 2.13 2.12 2.11 2.10"
QUANTILES = tuple(map(float, _T.split()))
"""Student's t at 97.5 % for 1, 2, … degrees of freedom; 2 beyond."""


def as_good(best: Trial, trials: list[Trial], objective: Objective) -> list[Trial]:
    """Measured trials that cannot be told from the best one; none for MAT, which has no noise."""
    if objective == "mat" or best.figures is None:
        return []
    ours = best.figures.ratios
    others = [t for t in trials if t.outcome == "measured" and t.number != best.number]
    return [t for t in others if t.figures is not None and not differ(ours, t.figures.ratios)]


def differ(ours: Mapping[str, float], theirs: Mapping[str, float]) -> bool:
    """Whether two trials' speedups by prompt differ by more than they scatter."""
    both = [math.log(ours[prompt] / theirs[prompt]) for prompt in ours if prompt in theirs]
    if len(both) < MIN_PROMPTS:
        return True
    freedom = len(both) - 1
    quantile = QUANTILES[freedom - 1] if freedom <= len(QUANTILES) else 2.0
    return abs(mean(both)) > quantile * (std(both) or 0.0) / math.sqrt(len(both))
