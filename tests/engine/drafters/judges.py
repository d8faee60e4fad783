"""What every lossless method must pass: plain decoding's text, and the target's law."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from scipy.stats import chi2

from engine.config import Limits, Sampling
from engine.decode import decode
from engine.drafters.base import Drafter
from engine.drafters.method import MethodConfig
from engine.model.target import Target
from engine.sampling import probabilities
from engine.steps import End, Step
from tests.models import build_context, plain_greedy, tiny_target

PROMPTS = ([7, 8, 9, 7, 8, 9, 7, 8], [65], [3, 200, 17, 99, 3, 200, 17, 40, 41])


@dataclass(frozen=True)
class Text:
    output: list[int]
    steps: list[Step]
    finish_reason: str

    @property
    def num_accepted(self) -> int:
        return sum(step.num_accepted for step in self.steps)


def write(
    target: Target,
    drafter: Drafter,
    prompt: Sequence[int],
    *,
    tokens: int = 24,
    temperature: float = 0.0,
    seed: int = 0,
) -> Text:
    """Decode a text and keep its records."""
    sampling = Sampling(temperature=temperature, seed=seed)
    limits = Limits(max_new_tokens=tokens, ignore_eos=True)
    records = list(decode(target, drafter, prompt, sampling=sampling, limits=limits))
    end = records[-1]
    assert isinstance(end, End)
    steps = [record for record in records if isinstance(record, Step)]
    return Text(list(end.output_ids), steps, end.finish_reason)


@functools.cache
def target_of(family: str) -> Target:
    return tiny_target(family, eos_token_id=None)


@functools.cache
def plain_text(family: str, prompt: tuple[int, ...], tokens: int) -> list[int]:
    return plain_greedy(target_of(family), list(prompt), tokens)


def assert_greedy_lossless(
    config: MethodConfig,
    family: str,
    *,
    prompts: Sequence[Sequence[int]] = PROMPTS,
    tokens: int = 24,
) -> int:
    """One drafter writes all prompts in turn, as plain decoding does; return accepted drafts."""
    target = target_of(family)
    drafter = config.build(build_context(target))
    accepted = 0
    for prompt in prompts:
        text = write(target, drafter, prompt, tokens=tokens)
        assert text.output == plain_text(family, tuple(prompt), tokens)
        accepted += text.num_accepted
    return accepted


def assert_lossless_to_the_context_end(config: MethodConfig, family: str) -> None:
    """A prompt just below the context length: the text fills the context exactly."""
    target = target_of(family)
    room = 9
    prompt = ([7, 8, 9, 10] * 64)[: target.context_len - room]
    text = write(target, config.build(build_context(target)), prompt, tokens=50)
    assert text.finish_reason == "context"
    assert text.output == plain_text(family, tuple(prompt), room)


SAMPLED_VOCAB = 12


@functools.cache
def sampled_target() -> Target:
    """A target with few tokens, none of them much likelier than the others."""
    target = tiny_target(
        "llama",
        vocab_size=SAMPLED_VOCAB,
        num_hidden_layers=1,
        eos_token_id=None,
        max_position_embeddings=512,
    )
    with torch.no_grad():
        target.lm_head.weight.mul_(0.35)
    return target


def p_value(
    target: Target, drafter: Drafter, *, seeds: int = 2, tokens: int = 300, drawn: bool = False
) -> float:
    """How well sampled texts agree with the target's own distribution; the smaller of two tests.

    Every token is a draw from the target's distribution given the text before it, so how often the
    token of rank r comes up is a sum of martingale differences, with mean and covariance known
    from one plain forward over the text: a chi-square with vocabulary - 1 degrees of freedom. So
    is how often a token is the one drafted first for its place, which is fixed before the draw: a
    verifier that errs after rejections shows there, however little the drafts know of the target.
    Drafts that are themselves `drawn` are coupled with the text; for them the first test stands.
    """
    prompt = [1, 2, 3, 1, 2, 3, 1, 2]
    observed = torch.zeros(SAMPLED_VOCAB, dtype=torch.float64)
    expected = torch.zeros(SAMPLED_VOCAB, dtype=torch.float64)
    covariance = torch.zeros(SAMPLED_VOCAB, SAMPLED_VOCAB, dtype=torch.float64)
    excess, variance = 0.0, 0.0
    for seed in range(seeds):
        text = write(target, drafter, prompt, tokens=tokens, temperature=1.0, seed=seed)
        assert len(text.output) == tokens and text.num_accepted > 0
        probs, order = _ranked(target, prompt, text.output)
        rank = (order == torch.tensor(text.output)[:, None]).double()
        observed += rank.sum(dim=0)
        expected += probs.sum(dim=0)
        covariance += torch.diag(probs.sum(dim=0)) - probs.T @ probs
        for at, drafted in first_drafts(text).items():
            chance = float(probs[at][order[at] == drafted])
            excess += (text.output[at] == drafted) - chance
            variance += chance * (1 - chance)
    off = (observed - expected)[:-1]
    statistic = off @ torch.linalg.solve(covariance[:-1, :-1], off)
    by_rank = float(chi2.sf(float(statistic), SAMPLED_VOCAB - 1))
    if drawn:
        return by_rank
    by_draft = float(chi2.sf(excess**2 / variance, 1))
    return min(1.0, 2 * min(by_rank, by_draft))


def first_drafts(text: Text) -> dict[int, int]:
    """Output position → the token drafted first for it, where the tree went on from there."""
    found: dict[int, int] = {}
    at = 0
    for step in text.steps:
        for node in (0, *step.accepted):
            at += 1
            children = [c for c, parent in enumerate(step.parents) if parent == node and c]
            if children and at < len(text.output):
                found[at] = step.tokens[children[0]]
    return found


@torch.inference_mode()
def _ranked(target: Target, prompt: list[int], output: list[int]) -> tuple[torch.Tensor, ...]:
    """The target's distribution at every output position, likeliest token first."""
    logits = target.model(torch.tensor([[*prompt, *output]])).logits[0, len(prompt) - 1 : -1]
    ranked = probabilities(logits, Sampling(temperature=1.0)).double().sort(dim=-1, descending=True)
    return ranked.values, ranked.indices
