"""Checks a target's numerics: its fast forward on loading, a finished text afterwards.

A fast forward (compiled kernels, CUDA graphs) must agree with transformers' modules on a few rows,
or it is not used: see `forward_mismatch`.

The lossless audit finds where two greedy texts diverge and how close the target's choice was there.
In bfloat16 and float16 a forward over another number of rows rounds differently and can flip a
near-tie. The audit runs one plain forward over prompt and common prefix, and measures the gap
between the two tokens' logits in units of the dtype's spacing.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from engine.errors import PromptError, first_line
from engine.metrics import first_divergence
from engine.model.clock import now, seconds
from engine.model.labels import TokenLabels
from engine.model.packed import PackedLinear
from engine.model.target import Target
from engine.proposal import Needs, Proposal, TargetOutput
from engine.tree import TreeShape

PROMPT_ROWS = 5
TRIAL_TREE = (-1, 0, 0, 1, 1, 2, 4)
TRIAL_TEXT = "The library opens at nine, but on Monday we wait until noon for its first visitor."
NEAR_TIE_UNITS = {torch.float32: 64.0, torch.bfloat16: 4.0, torch.float16: 8.0}
"""How many spacings of the dtype two logits may lie apart and still swap by rounding alone.

Rounding adds up over the layers. Half precision rounds the logits themselves last, so few units of
it cover that; in float32 the sums inside a matrix product move by more units, each far smaller.
"""


def reference_logits(plain: Target) -> Tensor:
    """Logits `(rows, vocab)` for `forward_mismatch`, from one forward on an empty cache.

    Args:
        plain: runs on transformers' modules, whose matrices may be packed.
    """
    root = PROMPT_ROWS + 1
    parents = [*range(-1, PROMPT_ROWS), *(root + parent for parent in TRIAL_TREE)]
    rows = Proposal(_trial_tokens(plain, len(parents)), TreeShape(parents))
    with plain.new_cache(len(parents)) as cache:
        return plain.verify(rows, cache, Needs()).logits[PROMPT_ROWS - 1 :].float()


def check_packed(model: nn.Module) -> str | None:
    """Multiply one packed matrix of each format; unpack all if a product is inaccurate.

    Returns the reason, or None. The error of 8-bit activations is about a percent of the product's
    own spread.
    """
    packed = [module for module in model.modules() if isinstance(module, PackedLinear)]
    formats = (getattr(getattr(module, "matrix", None), "format", None) for module in packed)
    for module in dict(zip(formats, packed, strict=True)).values():
        rows = torch.arange(min(1024, module.out_features))  # all of them may take a gigabyte
        weight = module.rows(rows)
        x = torch.randn(2, module.in_features, generator=torch.Generator().manual_seed(0))
        x = x.to(weight.dtype)
        expected = linear(
            x.float(), weight.float(), None if module.bias is None else module.bias[:1024].float()
        )
        error = (module.product(x)[:, : len(weight)].float() - expected).square().mean().sqrt()
        if not error <= 0.03 * expected.square().mean().sqrt() + 1e-6:
            for linear_module in packed:
                linear_module.uses_kernels = False
            return f"a product with a packed matrix is off by {error:.2g}"
    return None


def forward_mismatch(target: Target, expected: Tensor) -> str | None:
    """Why a target's fast forward must not be used, in words; None if it is accurate.

    It runs a prompt, one row and a tree. Rounding errors grow from layer to layer, so that about
    half of the dtype's digits agree in the end: a row's error may be four times the root of the
    dtype's spacing at 1, relative to the reference's own spread. A sibling that is visible by
    mistake, or a row in the wrong place, causes an error of half of that spread and more.
    """
    try:
        outputs = _trial_outputs(target)
    except RuntimeError as error:
        return f"it failed: {first_line(error)}"
    logits = torch.cat([output.logits.float() for output in outputs])
    if logits.isnan().any():
        return "its logits are not numbers"
    spread = (expected - expected.mean(dim=-1, keepdim=True)).square().mean(dim=-1)
    deviation = float(((logits - expected).square().mean(dim=-1) / spread).sqrt().max())
    if not deviation <= 4 * math.sqrt(torch.finfo(target.dtype).eps):
        return f"its logits differ from those of transformers' modules (by {deviation:.0%})"
    for output in outputs:
        if output.argmax() != output.logits.argmax(dim=-1).tolist():
            return "its most probable token is not the argmax of its logits"
        logsumexp = output.logits.float().logsumexp(dim=-1)
        if output.logsumexp is not None and not torch.allclose(output.logsumexp, logsumexp, 1e-3):
            return "its logsumexp is not that of its logits"
    return None


def plain_step_s(target: Target) -> float:
    """Median seconds of a forward over one row after a short text."""
    device, root = target.device, Proposal(_trial_tokens(target, 1), TreeShape.chain(0))
    spans = []
    with target.new_cache(2 * PROMPT_ROWS) as cache:
        target.prefill(_trial_tokens(target, PROMPT_ROWS), cache, Needs())
        for _ in range(24):
            began = now(device)
            target.verify(root, cache, Needs())
            spans.append((began, now(device)))
    return statistics.median(map(seconds, spans[6:]))


def _trial_outputs(target: Target) -> list[TargetOutput]:
    tree = TreeShape(TRIAL_TREE)
    tokens = _trial_tokens(target, PROMPT_ROWS + 1 + len(tree))
    prompt, root, draft = tokens.split([PROMPT_ROWS, 1, len(tree)])
    with target.new_cache(len(tokens)) as cache:
        outputs = [target.prefill(prompt, cache, Needs())]
        outputs.append(target.verify(Proposal(root, TreeShape.chain(0)), cache, Needs()))
        cache.commit((0,))
        return [*outputs, target.verify(Proposal(draft, tree), cache, Needs())]


def _trial_tokens(target: Target, count: int) -> Tensor:
    """Token ids `(count,)` of a sentence; without a usable tokenizer, spread over the vocabulary.

    Ids that form no text make a trained model ill-conditioned: rounding alone then moved the logits
    of a 270M Gemma by 90% of their spread, where those of a sentence moved by 2%.
    """
    ids: list[int] = []
    with suppress(PromptError):  # its tokenizer cannot be used
        ids = [] if target.tokenizer is None else target.encode(TRIAL_TEXT)
    if len(ids) < count:
        return torch.arange(1, count + 1, device=target.device) * 7919 % target.vocab_size
    return torch.tensor(ids[:count], device=target.device)


@dataclass(frozen=True, slots=True)
class LogitGap:
    """The target's logits after the common prefix, in the run's dtype.

    Attributes:
        best, second: its two most probable tokens, as text.
        gap: logit of `best` minus logit of `second`.
        plain_logit, own_logit: of plain decoding's token and of the method's.
        own_rank: rank of the method's token, from 1.
        unit: spacing of the dtype at the largest logit.
    """

    dtype: str
    best: str
    second: str
    gap: float
    plain_logit: float
    own_logit: float
    own_rank: int
    unit: float
    near_tie: bool


@dataclass(frozen=True, slots=True)
class Audit:
    """The first divergence of a method's greedy text from plain decoding's."""

    plain_token: str
    own_token: str
    view: LogitGap


def audit(
    target: Target,
    prompt_ids: Sequence[int],
    plain: Sequence[int],
    own: Sequence[int],
    *,
    allowed: Callable[[Sequence[int]], Tensor | None] = lambda committed: None,
    text_len: int | None = None,
) -> Audit | None:
    """Examine the first token that differs from plain decoding's; None = no token does.

    Args:
        plain, own: the two outputs.
        allowed: output so far → which tokens `(vocab,)` bool may follow; None = all.
        text_len: of the runs, as in `Target.new_cache`.
    """
    at = first_divergence(plain, own)
    if at is None or at >= min(len(plain), len(own)):
        return None
    prefix_ids, pair = [*prompt_ids, *plain[:at]], (plain[at], own[at])
    plain_token, own_token = map(TokenLabels(target.tokenizer), pair)
    with target.new_cache(len(prefix_ids), text_len=text_len) as cache:
        logits = target.prefill(prefix_ids, cache, Needs()).logits[-1].float()
    view = _logit_gap(target, logits, pair, allowed(plain[:at]))
    return Audit(plain_token, own_token, view)


@torch.inference_mode()
def _logit_gap(
    target: Target, logits: Tensor, pair: tuple[int, int], allowed: Tensor | None
) -> LogitGap:
    unit = spacing(float(logits.abs().max()), target.dtype)
    if allowed is not None:
        logits = logits.masked_fill(~allowed.to(logits.device), -torch.inf)
    best, second = logits.topk(2).indices.tolist()
    plain_logit, own_logit = (float(logits[token]) for token in pair)
    label = TokenLabels(target.tokenizer)
    behind = float(logits[best]) - min(plain_logit, own_logit)
    return LogitGap(
        dtype=target.dtype_name,
        best=label(best),
        second=label(second),
        gap=float(logits[best] - logits[second]),
        plain_logit=plain_logit,
        own_logit=own_logit,
        own_rank=1 + int((logits > own_logit).sum()),
        unit=unit,
        near_tie=behind <= NEAR_TIE_UNITS.get(target.dtype, 1.0) * unit,
    )


def spacing(value: float, dtype: torch.dtype) -> float:
    """Distance from a value to the next larger number of the dtype.

    Example: bfloat16 has 7 bits of fraction, so at 20 (in [16, 32)) it is 16 / 128 = 0.125.
    """
    if value == 0.0 or not math.isfinite(value):
        return torch.finfo(dtype).tiny
    return float(torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(abs(value))))
