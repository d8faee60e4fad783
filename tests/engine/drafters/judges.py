"""What every lossless method must pass: plain decoding's text, and the target's law."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from scipy.stats import chi2

from engine.config import Limits, Sampling
from engine.decode import decode
from engine.drafters.base import Drafter, Start
from engine.drafters.method import MethodConfig
from engine.feature_log import FeatureLog
from engine.metrics import Metrics, measure
from engine.model.target import Target
from engine.proposal import Outcome, TargetOutput
from engine.sampling import SeededDraws, probabilities
from engine.steps import End, Prefill, Step
from tests.models import build_context, plain_greedy, tiny_target

slow = functools.partial(pytest.param, marks=pytest.mark.slow)
FAMILIES = ["llama", *map(slow, ("qwen3", "gemma3_text", "gpt_neox", "opt"))]
PROMPTS = ([7, 8, 9, 7, 8, 9, 7, 8], [65], [3, 200, 17, 99, 3, 200, 17, 40, 41])


@dataclass(frozen=True)
class Text:
    """The records of a text."""

    prefill: Prefill
    steps: list[Step]
    end: End

    @property
    def output(self) -> list[int]:
        return list(self.end.output_ids)

    @property
    def num_accepted(self) -> int:
        return sum(step.num_accepted for step in self.steps)

    @property
    def metrics(self) -> Metrics:
        return measure([self.prefill, *self.steps, self.end])


def write(
    target: Target,
    drafter: Drafter,
    prompt: Sequence[int],
    *,
    tokens: int = 24,
    temperature: float = 0.0,
    seed: int = 0,
    sampling: Sampling | None = None,
    limits: Limits | None = None,
    **options: Any,
) -> Text:
    """Decode a text, with further options of `decode`, and keep its records.

    Args:
        limits: by default so many `tokens`, whatever would end the text before.
    """
    sampling = sampling or Sampling(temperature=temperature, seed=seed)
    limits = limits or Limits(max_new_tokens=tokens, ignore_eos=True)
    records = decode(target, drafter, prompt, sampling=sampling, limits=limits, **options)
    prefill, *steps, end = records
    assert isinstance(prefill, Prefill) and isinstance(end, End)
    return Text(prefill, [step for step in steps if isinstance(step, Step)], end)


Reference = Callable[[list[int]], list[int]]
"""A text, its root included → the tokens that are to be drafted after it."""


def assert_drafts_equal(
    reference: Reference,
    target: Target,
    drafter: Drafter,
    *,
    prompts: Sequence[Sequence[int]] = PROMPTS,
    tokens: int = 30,
) -> int:
    """Every draft is the reference's, and the text that of plain decoding.

    Returns accepted drafts.
    """
    accepted = 0
    for prompt in prompts:
        text = write(target, drafter, prompt, tokens=tokens)
        assert text.output == plain_greedy(target, list(prompt), tokens)
        before = [*prompt, text.output[0]]
        for step in text.steps:
            assert list(step.tokens[1:]) == reference(before)
            before += step.committed
        accepted += text.num_accepted
    return accepted


@torch.inference_mode()
def begin(
    drafter: Drafter,
    text: Sequence[int],
    *,
    target: Target | None = None,
    sampling: Sampling | None = None,
    seed: int = 0,
) -> Any:
    """The session of a text whose last token is the root; by default of the tiny Llama."""
    *prompt, root = text
    target = target or target_of("llama")
    shown = target.prefill(prompt, target.new_cache(len(prompt)), drafter.needs)
    return open_session(drafter, prompt, root, shown, sampling, seed)


def open_session(
    drafter: Drafter,
    prompt: Sequence[int],
    root: int,
    shown: TargetOutput,
    sampling: Sampling | None = None,
    seed: int = 0,
) -> Any:
    """The session of a text whose prompt was read: the target has `shown` this of it."""
    log = FeatureLog(prompt, drafter.needs, shown.logits.device)
    session = drafter.open(Start(log, sampling or Sampling(), SeededDraws(seed)))
    log.read_prompt(shown)
    log.begin(root)
    return session


def observe(session: Any, outcome: Outcome) -> None:
    """A step, as the loop tells of it."""
    session.log.commit(outcome)
    session.observe(outcome)


def started(config: MethodConfig, text: Sequence[int]) -> Any:
    """A session on the tiny Llama that may read a text; its last token is the root."""
    return begin(config.build(build_context(target_of("llama"))), text)


# Tests share these targets: made in inference mode, their weights cannot be written to outside it.


@functools.cache
@torch.inference_mode()
def target_of(family: str) -> Target:
    return tiny_target(family, eos_token_id=None)


def assert_greedy_lossless(target: Target, drafter: Drafter, *, tokens: int = 24) -> int:
    """One drafter writes all prompts in turn, as plain decoding does; return accepted drafts."""
    accepted = 0
    for prompt in PROMPTS:
        text = write(target, drafter, prompt, tokens=tokens)
        assert text.output == plain_greedy(target, prompt, tokens)
        accepted += text.num_accepted
    return accepted


SAMPLED_VOCAB = 12


@functools.cache
@torch.inference_mode()
def sampled_target() -> Target:
    """A target with few tokens, none of them much likelier than the others."""
    return few_tokens(0.35)


def few_tokens(scale: float, *, family: str = "llama", layers: int = 1, **settings: Any) -> Target:
    """A model of twelve tokens, its logits times `scale`."""
    target = tiny_target(
        family,
        vocab_size=SAMPLED_VOCAB,
        num_hidden_layers=layers,
        eos_token_id=None,
        max_position_embeddings=512,
        **settings,
    )
    with torch.no_grad():
        target.lm_head.get_parameter("weight").mul_(scale)
    return target


class _Counts:
    """How often each of several outcomes came up, against their chances before each draw.

    The differences are a martingale's, with a covariance known from the chances: a chi-square with
    outcomes - 1 degrees of freedom.
    """

    def __init__(self, outcomes: int) -> None:
        self.off = torch.zeros(outcomes, dtype=torch.float64)
        self.covariance = torch.zeros(outcomes, outcomes, dtype=torch.float64)

    def add(self, chances: torch.Tensor, outcome: torch.Tensor) -> None:
        """Chances (draws, outcomes), and which came up (draws)."""
        came = torch.nn.functional.one_hot(outcome, len(self.off)).double()
        self.off += (came - chances).sum(dim=0)
        self.covariance += torch.diag(chances.sum(dim=0)) - chances.T @ chances

    @property
    def p_value(self) -> float:
        off = self.off[:-1]
        statistic = off @ torch.linalg.solve(self.covariance[:-1, :-1], off)
        return float(chi2.sf(float(statistic), len(off)))


def p_value(
    target: Target, drafter: Drafter, *, seeds: int = 2, tokens: int = 300, drawn: bool = False
) -> float:
    """How well sampled texts agree with the target's own distribution; the smallest of the tests.

    Every token is a draw from the target's distribution given the text before it, which one plain
    forward over the text tells. Counted are the tokens; their ranks in that distribution; and
    whether a token is the one drafted first for its place, which is fixed before the draw: a
    verifier that errs after rejections shows there, however little the drafts know of the target.
    Drafts that are themselves `drawn` are coupled with the text; for them the first two stand.
    """
    prompt = [1, 2, 3, 1, 2, 3, 1, 2]
    by_token, by_rank, by_draft = _Counts(SAMPLED_VOCAB), _Counts(SAMPLED_VOCAB), _Counts(2)
    for seed in range(seeds):
        text = write(target, drafter, prompt, tokens=tokens, temperature=1.0, seed=seed)
        assert len(text.output) == tokens and text.num_accepted > 0
        output, probs = torch.tensor(text.output), _chances(target, prompt, text.output)
        by_token.add(probs, output)
        ranked, order = probs.sort(dim=-1, descending=True)
        by_rank.add(ranked, (order == output[:, None]).int().argmax(dim=-1))
        if not drawn:
            places, drafted = map(torch.tensor, zip(*first_drafts(text).items(), strict=True))
            chance = probs[places, drafted]
            by_draft.add(torch.stack([1 - chance, chance], 1), (output[places] == drafted).long())
    tests = [by_token, by_rank] if drawn else [by_token, by_rank, by_draft]
    return min(1.0, len(tests) * min(test.p_value for test in tests))


def first_drafts(text: Text) -> dict[int, int]:
    """Output position → the token drafted first for it, where the tree went on from there."""
    drafts: dict[int, int] = {}
    at = 0
    for step in text.steps:
        for node in (0, *step.accepted):
            at += 1
            children = [c for c, parent in enumerate(step.parents) if parent == node and c]
            if children and at < len(text.output):
                drafts[at] = step.tokens[children[0]]
    return drafts


@torch.inference_mode()
def _chances(target: Target, prompt: list[int], output: list[int]) -> torch.Tensor:
    """The target's distribution at every output position, (tokens, vocabulary)."""
    logits = target.model(torch.tensor([[*prompt, *output]])).logits[0, len(prompt) - 1 : -1]
    return probabilities(logits, Sampling(temperature=1.0)).double()
