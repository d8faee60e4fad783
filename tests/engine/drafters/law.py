"""Checks by chi-square that what a method samples follows the target's own law."""

from __future__ import annotations

from collections import Counter

from scipy.stats import chisquare

from engine.config import Limits, Sampling
from engine.decode import decode
from engine.drafters.base import Drafter
from engine.model.target import Target
from engine.proposal import Needs
from engine.sampling import probabilities
from engine.steps import End

Continuation = tuple[int, ...]


def exact_law(
    target: Target, prompt_ids: list[int], length: int, sampling: Sampling
) -> dict[Continuation, float]:
    """Probability of every continuation of this length, from plain causal forwards."""
    law: dict[Continuation, float] = {(): 1.0}
    for _ in range(length):
        longer: dict[Continuation, float] = {}
        for start, mass in law.items():
            output = target.prefill([*prompt_ids, *start], target.new_cache(64), Needs())
            probs = probabilities(output.logits[-1], sampling).tolist()
            longer.update({(*start, token): mass * p for token, p in enumerate(probs)})
        law = longer
    return law


def joint_p_value(
    target: Target,
    drafter: Drafter,
    prompt_ids: list[int],
    *,
    runs: int,
    length: int,
    temperature: float,
) -> float:
    """Chi-square p-value of the sampled continuations against the target's law.

    Every run has its own seed. Continuations expected fewer than 5 times are counted together.
    """
    limits = Limits(max_new_tokens=length, ignore_eos=True)
    seen: Counter[Continuation] = Counter()
    for seed in range(runs):
        sampling = Sampling(temperature=temperature, seed=seed)
        *_, end = decode(target, drafter, prompt_ids, sampling=sampling, limits=limits)
        assert isinstance(end, End)
        seen[end.output_ids] += 1
    law = exact_law(target, prompt_ids, length, Sampling(temperature=temperature))
    observed, expected = [0], [0.0]
    for continuation, mass in sorted(law.items(), key=lambda item: item[1]):
        if expected[-1] >= 5:
            observed.append(0)
            expected.append(0.0)
        observed[-1] += seen[continuation]
        expected[-1] += mass * runs
    scale = sum(observed) / sum(expected)
    return float(chisquare(observed, [e * scale for e in expected]).pvalue)
