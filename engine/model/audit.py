"""Whether a target computes what it should: a fast forward when it is loaded, a text afterwards.

A fast forward (compiled kernels, CUDA graphs) must agree with transformers' modules on a few rows,
or it is not used: see `disagreement`.

The lossless audit says where two greedy texts part, and how close the target's choice was there. In
bfloat16 and float16 a forward over another number of rows rounds differently and can flip a
near-tie. The audit asks the target once more, by one plain forward over prompt and common prefix,
and says how far apart the two tokens are in units of the dtype's own spacing.
"""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from engine.errors import PromptError, first_line
from engine.metrics import first_divergence
from engine.model.clock import now, seconds
from engine.model.labels import token_label
from engine.model.packed import Packed, PackedLinear, num_weights
from engine.model.target import Target
from engine.proposal import Needs, Proposal, TargetOutput
from engine.tree import TreeShape

PROMPT_ROWS = 5
TRIAL_TREE = (-1, 0, 0, 1, 1, 2, 4)
TRIAL_TEXT = "The library opens at nine, but on Monday we wait until noon for its first visitor."
CHEAP_PARAMETERS = 600_000_000
"""A target up to this size is copied to float32 for a second opinion: 2.4 GB at most."""
NEAR_TIE_UNITS = {torch.float32: 64.0, torch.bfloat16: 4.0, torch.float16: 8.0}
"""How many spacings of the dtype two logits may lie apart and still swap by rounding alone.

Rounding adds up over the layers. Half precision rounds the logits themselves last, so few units of
it cover that; in float32 the sums inside a matrix product move by more units, each far smaller.
"""


def reference_logits(plain: Target) -> Tensor:
    """What `disagreement` compares with: the same rows by one forward without committed rows.

    Args:
        plain: runs by transformers' modules, whose matrices may be packed.
    """
    first = PROMPT_ROWS
    parents = [*range(-1, first), *(first + 1 + max(parent, -1) for parent in TRIAL_TREE)]
    cache = plain.new_cache(len(parents))
    whole = Proposal(_trial_tokens(plain, len(parents)), TreeShape(parents))
    try:
        return plain.verify(whole, cache, Needs()).logits[first - 1 :].float()
    finally:
        cache.free()


def wrong_product(packed: Sequence[Packed]) -> str | None:
    """Why packed matrices must not be used, in words: of each format one is tried.

    A row of 8 bits is off by about a percent of the product's own spread.
    """
    tried: set[object] = set()
    for module in packed:
        kind = getattr(getattr(module, "matrix", None), "format", type(module))
        if kind in tried or not isinstance(module, PackedLinear):
            continue
        tried.add(kind)
        matrix = getattr(module, "matrix", None)  # whole, it may take a gigabyte
        some = torch.arange(min(1024, module.out_features))
        weight = module.weight[:1024] if matrix is None else matrix.rows(some)
        x = torch.randn(2, module.in_features, generator=torch.Generator().manual_seed(0))
        x = x.to(weight.dtype)
        expected = linear(
            x.float(), weight.float(), None if module.bias is None else module.bias[:1024].float()
        )
        off = (module.product(x)[:, : len(weight)].float() - expected).square().mean().sqrt()
        if not off <= 0.03 * expected.square().mean().sqrt() + 1e-6:
            return f"a product with a packed matrix is off by {off:.2g}"
    return None


def disagreement(target: Target, expected: Tensor) -> str | None:
    """Why a target's fast forward must not be used, in words; None if it computes what it should.

    It runs a prompt, one row and a tree. Roundings differ and grow from layer to layer, so that
    about half of the dtype's digits agree in the end: rows may be off by four times the root of its
    spacing at 1, as a share of the reference's own spread. A sibling that is seen by mistake, or a
    row in the wrong place, is off by half of that spread and more.
    """
    try:
        outputs = _trial(target)
    except RuntimeError as error:
        return f"it failed: {first_line(error)}"
    logits = torch.cat([output.logits.float() for output in outputs])
    if logits.isnan().any():
        return "its logits are not numbers"
    spread = (expected - expected.mean(dim=-1, keepdim=True)).square().mean(dim=-1)
    off = float(((logits - expected).square().mean(dim=-1) / spread).sqrt().max())
    if not off <= 4 * math.sqrt(torch.finfo(target.dtype).eps):
        return f"its logits differ from those of transformers' modules (by {off:.0%})"
    for output in outputs:
        if output.argmax() != output.logits.argmax(dim=-1).tolist():
            return "its likeliest token is not the one its logits say"
        totals = output.logits.float().logsumexp(dim=-1)
        if output.logsumexp is not None and not torch.allclose(output.logsumexp, totals, 1e-3):
            return "it normalises its logits wrongly"
    return None


def plain_step_s(target: Target, *, rounds: int = 24) -> float:
    """Seconds of a forward over one row behind a short text; the median."""
    device, root = target.device, Proposal(_trial_tokens(target, 1), TreeShape.chain(0))
    cache = target.new_cache(2 * PROMPT_ROWS)
    spans = []
    try:
        target.prefill(_trial_tokens(target, PROMPT_ROWS), cache, Needs())
        for _ in range(rounds):
            began = now(device)
            target.verify(root, cache, Needs())
            spans.append((began, now(device)))
        return statistics.median(map(seconds, spans[rounds // 4 :]))
    finally:
        cache.free()


def _trial(target: Target) -> list[TargetOutput]:
    tree = TreeShape(TRIAL_TREE)
    tokens = _trial_tokens(target, PROMPT_ROWS + 1 + len(tree))
    prompt, one, drafted = tokens.split([PROMPT_ROWS, 1, len(tree)])
    cache = target.new_cache(len(tokens))
    try:
        outputs = [target.prefill(prompt, cache, Needs())]
        outputs.append(target.verify(Proposal(one, TreeShape.chain(0)), cache, Needs()))
        cache.commit((0,))
        return [*outputs, target.verify(Proposal(drafted, tree), cache, Needs())]
    finally:
        cache.free()


def _trial_tokens(target: Target, count: int) -> Tensor:
    """Tokens of a sentence; where the target reads none, some from all over the vocabulary.

    What no text says can throw a trained model off balance: rounding alone then moved the logits of
    a 270M Gemma by 90% of their spread, where those of a sentence moved by 2%.
    """
    ids: list[int] = []
    with suppress(PromptError):  # its tokenizer cannot be used
        ids = [] if target.tokenizer is None else target.encode(TRIAL_TEXT)
    if len(ids) < count:
        return torch.arange(1, count + 1, device=target.device) * 7919 % target.vocab_size
    return torch.tensor(ids[:count], device=target.device)


@dataclass(frozen=True, slots=True)
class View:
    """What the target says after the common prefix, in one dtype.

    Attributes:
        best, second: its two likeliest tokens, as text.
        gap: logit of `best` minus logit of `second`.
        own_rank: place of the method's token among all, from 1.
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
    """Where a method's greedy text leaves plain decoding's.

    Attributes:
        index: place of the first token that differs, from 0.
        exact: in float32, where that was cheap and the run was not in float32 already.
    """

    index: int
    plain_token: str
    own_token: str
    view: View
    exact: View | None = None


def audit(
    target: Target,
    prompt_ids: Sequence[int],
    plain: Sequence[int],
    own: Sequence[int],
    *,
    allowed: Callable[[Sequence[int]], Tensor | None] = lambda committed: None,
    in_float32: bool = True,
) -> Audit | None:
    """Look at where a method's output parts from plain decoding's; None if no token differs.

    Args:
        allowed: which tokens `(vocab,)` may come after some of the output, where not all may.
        in_float32: also ask a float32 copy of the target, if it is small.
    """
    at = first_divergence(plain, own)
    if at is None or at >= min(len(plain), len(own)):
        return None
    seen, pair = [*prompt_ids, *plain[:at]], (plain[at], own[at])
    may_come = allowed(plain[:at])
    exact = None
    size = num_weights(target.model)
    if in_float32 and target.dtype != torch.float32 and size <= CHEAP_PARAMETERS:
        copied = Target(copy.deepcopy(target.model).float(), target.tokenizer, name=target.name)
        exact = _view(copied, seen, pair, may_come)
    plain_token, own_token = (token_label(target.tokenizer, token) for token in pair)
    return Audit(at, plain_token, own_token, _view(target, seen, pair, may_come), exact)


@torch.inference_mode()
def _view(target: Target, seen: list[int], pair: tuple[int, int], allowed: Tensor | None) -> View:
    cache = target.new_cache(len(seen))
    try:
        logits = target.prefill(seen, cache, Needs()).logits[-1].float()
    finally:
        cache.free()
    unit = spacing(float(logits.abs().max()), target.dtype)
    if allowed is not None:
        logits = logits.masked_fill(~allowed.to(logits.device), -torch.inf)
    best, second = logits.topk(2).indices.tolist()
    plain_logit, own_logit = (float(logits[token]) for token in pair)
    behind = float(logits[best]) - min(plain_logit, own_logit)
    return View(
        dtype=target.dtype_name,
        best=token_label(target.tokenizer, best),
        second=token_label(target.tokenizer, second),
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
