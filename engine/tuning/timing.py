"""Times drafts and verify forwards, of one text and of several, on the real models."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch

from engine.config import Sampling
from engine.drafters.base import Drafter, Start
from engine.errors import TargetError
from engine.feature_log import FeatureLog
from engine.model.batch import TextBatch
from engine.model.cache import TreeCache
from engine.model.clock import synchronize, time_s
from engine.model.target import Target
from engine.proposal import Budget, Needs, Outcome, Proposal, SharedRows, TargetOutput
from engine.sampling import SeededDraws
from engine.tree import TreeShape
from engine.tuning import OnProgress, no_progress
from engine.tuning.latency import BatchLatency, LatencyCurve, TreeLatency

TREE_ROWS = (4, 16)
"""Row counts of the trees that are timed besides chains; times are linear between them."""
TREE_DEPTH = 4
"""Depth of the trees that show what a level costs; less where there are few rows."""
BATCHES, BATCH_ROWS = (1, 2, 4, 8, 16, 32), (1, 2, 4, 8, 16, 32, 64)
MAX_NOISE, STEADY_TRY_S = 1.1, 3.0
"""Ratio of the two least times of a shape up to which they are taken for its own time, and the
seconds during which a measurement that something disturbs is repeated."""
MAX_BATCH_ROWS = 256
"""The most rows of a batch, all texts together; larger batches are extrapolated."""
MAX_BATCH_BYTES = 2 << 30
"""The most memory for a batch's KV cache; larger batches are left out."""


TEXT = """A lighthouse keeper wrote down the weather every evening for forty-one years. In 1887
the wind blew from the north-west on 112 days; fog hid the reef 36 times, and twice a ship came too
near. "Steady on," she would say, and turn the lamp by hand. def mean(values): return sum(values) /
len(values). Her notebooks, found behind a cupboard, list gulls, tides, letters and the price of
oil: what nobody else thought worth keeping is why climatologists read them today, page after page.
"""
"""Of many kinds of words, so that rows choose different experts."""


def measure_curve(
    target: Target,
    *,
    rows: tuple[int, ...],
    context_len: int = 256,
    repeats: int = 5,
    on_progress: OnProgress = no_progress,
) -> LatencyCurve:
    """Time verify forwards; every repeat times all shapes, so that drift affects all alike.

    Shapes are timed at least `repeats` times, and on a busy machine more often.

    With recurrent layers, the time includes rolling their state back to the accepted path, and
    trees are timed as well as chains.
    """
    context_len = max(1, min(context_len, target.context_len - max(rows) - 1))
    tree_rows = tuple(n for n in TREE_ROWS if n <= max(rows)) if len(target.recurrent) else ()
    shapes = [TreeShape.chain(n - 1) for n in rows]
    shapes += [comb_tree(n, depth) for n in tree_rows for depth in (1, _tree_depth(n))]
    order = sorted(range(len(shapes)), key=lambda i: -len(shapes[i]))
    times_s = list[list[float]]()
    with target.new_cache(context_len + max(rows)) as cache:
        target.prefill(text_tokens(target, 0, context_len), cache, Needs())
        began_s = time_s()
        while len(times_s) <= repeats or not _is_steady(times_s[1:]):
            if len(times_s) > repeats and time_s() - began_s > STEADY_TRY_S:
                break
            seconds = [0.0] * len(shapes)
            # Largest first: many rows evict the caches, at the cost of the forward that follows.
            for done, i in enumerate(order):
                on_progress(min(1.0, (len(times_s) + done / len(shapes)) / (repeats + 1)))
                seconds[i] = _time_verify(target, cache, shapes[i])
            times_s.append(seconds)
    # Whatever else the machine does only adds to a time.
    least: list[float] = (1000 * np.min(times_s[1:], axis=0)).tolist()
    chain_ms = non_decreasing(least[: len(rows)])
    if not tree_rows:
        return LatencyCurve(rows, chain_ms, context_len)
    star_ms = non_decreasing(least[len(rows) :: 2])
    times = zip(tree_rows, star_ms, least[len(rows) + 1 :: 2], strict=True)
    level_ms = tuple((deep - star) / (_tree_depth(n) - 1) for n, star, deep in times)
    return LatencyCurve(rows, chain_ms, context_len, TreeLatency(tree_rows, star_ms, level_ms))


def _is_steady(times_s: Sequence[Sequence[float]]) -> bool:
    """Whether the two least times `(repeats, shapes)` of every shape agree."""
    least, second = np.sort(times_s, axis=0)[:2] if len(times_s) > 1 else (1.0, 1.0)
    return bool(np.all(second <= MAX_NOISE * least))


def non_decreasing(ms: Sequence[float]) -> tuple[float, ...]:
    """Times by ascending row count, none above that of more rows: it was held up by something.

    Example: 9, 4, 5 → 4, 4, 5.
    """
    return tuple(accumulate(reversed(ms), min))[::-1]


def _tree_depth(rows: int) -> int:
    return min(TREE_DEPTH, rows - 2)


def comb_tree(rows: int, depth: int) -> TreeShape:
    """A tree like those fitted to texts: one path of this depth, with side branches.

    Example: 8 rows of depth 3 are 0-1-2-3, with 4-5 below 0, 6-7 below 1.
    """
    parents = list(range(-1, depth))
    while len(parents) < rows:
        at = (len(parents) - depth - 1) // 2 % max(1, depth - 1)
        parents += [at, at if depth == 1 else len(parents)]
    return TreeShape(parents[:rows])


def text_tokens(target: Target, start: int, count: int) -> list[int]:
    """Tokens from a place of a text on, over and over.

    A mixture of experts reads more experts for them than for equal or for meaningless rows.
    """
    encoded = target.encode(TEXT) if target.tokenizer is not None else []
    ids = [i for i in encoded if i < target.vocab_size] or list(range(target.vocab_size))
    return [ids[i % len(ids)] for i in range(start, start + count)]


def _time_verify(target: Target, cache: TreeCache, shape: TreeShape) -> float:
    tokens = text_tokens(target, cache.length, len(shape))
    proposal = Proposal(torch.tensor(tokens, device=target.device), shape)
    synchronize(target.device)
    began = time_s()
    target.verify(proposal, cache, Needs()).logits.argmax(dim=-1).tolist()
    if cache.recurrent is None:
        return time_s() - began
    # Roll the recurrent state back, as if the path was accepted half way.
    length = cache.length
    cache.commit(tuple(range(1 + shape.max_depth // 2)))
    synchronize(target.device)
    elapsed_s = time_s() - began
    cache.truncate(length)
    return elapsed_s


@torch.inference_mode()
def measure_batch(
    target: Target,
    *,
    rows: tuple[int, ...] = BATCH_ROWS,
    context_len: int = 256,
    repeats: int = 5,
    seconds: float = 20.0,
    on_progress: OnProgress = no_progress,
) -> BatchLatency:
    """Time verify forwards of several texts in lock-step, all with the same context.

    Every size is timed once before any is timed again, from small to large; where that takes more
    than `seconds`, the largest are extrapolated from the smaller ones.

    Raises TargetError: the target cannot read several texts at once.
    """
    if not target.can_pack_texts:
        raise TargetError(
            f"{target.name} has layers that no mask keeps apart, and is read one text after the "
            "other here: what batching would bring it cannot be measured."
        )
    context_len = max(1, min(context_len, target.context_len - max(rows)))
    max_len = context_len + max(rows)
    batches = tuple(b for b in BATCHES if b * max_len * target.kv_bytes <= MAX_BATCH_BYTES) or (1,)
    sizes = [(b, n) for b in batches for n in rows if b * n <= max(MAX_BATCH_ROWS, 2 * b)]
    sizes.sort(key=lambda size: (size[1] > rows[1], size[0] * size[1]))
    least = 2 * len(batches)  # a slope needs two points
    batch = TextBatch(target, max(batches), max_len)
    batch.advance([(0, 0, text_tokens(target, 0, context_len))])
    batch.repeat(context_len)
    times_s: dict[tuple[int, int], list[float]] = {}
    began = time_s()
    for repeat in range(repeats):
        for done, size in enumerate(sizes):
            on_progress((repeat + done / len(sizes)) / repeats)
            late = time_s() - began > seconds
            if late and (repeat or done >= least):
                break
            tokens = text_tokens(target, context_len, size[0] * size[1])  # none reads another's
            places = [(text, i) for text in range(size[0]) for i in range(size[1])]
            inputs = [
                (text, token, context_len + i)
                for (text, i), token in zip(places, tokens, strict=True)
            ]
            synchronize(target.device)
            start = time_s()
            batch.step(inputs).argmax(dim=-1).tolist()
            times_s.setdefault(size, []).append(time_s() - start)
    curves = tuple(_batch_curve(times_s, b, context_len) for b in batches)
    return BatchLatency(batches, curves, batch.name)


def _batch_curve(
    times_s: Mapping[tuple[int, int], Sequence[float]], texts: int, context_len: int
) -> LatencyCurve:
    """The least time of any batch of at least this many texts and rows.

    Other load only adds to a time, and more work never takes less.
    """
    rows = tuple(sorted(n for b, n in times_s if b == texts))
    least = (
        min(min(seconds) for (b, more), seconds in times_s.items() if b >= texts and more >= n)
        for n in rows
    )
    return LatencyCurve(rows, tuple(1000 * least_s for least_s in least), context_len)


class DraftTiming(NamedTuple):
    """Milliseconds of reading one prompt token and of a draft (median), and the draft's depth."""

    prompt_token_ms: float
    draft_ms: float
    depth: int


@torch.inference_mode()
def time_drafts(
    drafter: Drafter, target: Target, budget: Budget, *, repeats: int = 3
) -> DraftTiming:
    """Time drafts, each after a step that accepted two draft tokens, if there were two.

    The target makes a step before each draft, as in a run: it evicts the processor's caches.
    """
    context_len = max(2, min(256, target.context_len // 2))
    prompt = [(7 * i) % min(97, target.vocab_size) for i in range(context_len)]
    times_s, cache = [], target.new_cache(1)
    shared: tuple[SharedRows, ...] = ()
    if drafter.needs.shared:
        # Only the target knows their shape; twice the prompt is longer than the text will get.
        shared = target.prefill(2 * prompt, cache, drafter.needs).shared
    log = FeatureLog(prompt, drafter.needs, target.device)
    session = drafter.open(Start(log, Sampling(), SeededDraws(0)))
    log.read_prompt(_random_features(drafter.needs, target, context_len, shared))
    log.begin(1)
    try:
        for _ in range(repeats + 1):
            _time_verify(target, cache, TreeShape.chain(0))
            synchronize(target.device)
            began = time_s()
            proposal = session.propose(budget)
            tokens, depth = proposal.tokens.tolist(), proposal.shape.max_depth
            times_s.append(time_s() - began)
            path = [0]
            while len(path) < 3 and proposal.shape.children[path[-1]]:
                path.append(proposal.shape.children[path[-1]][0])
            output = _random_features(drafter.needs, target, len(tokens), shared)
            committed = (*(tokens[node] for node in path[1:]), 1)
            outcome = Outcome(proposal, output, tuple(path), committed)
            log.commit(outcome)
            session.observe(outcome)
    finally:
        session.close()
        cache.free()
    usual_s = statistics.median(times_s[1:])
    reading_s = max(0.0, times_s[0] - usual_s) / context_len
    return DraftTiming(1000 * reading_s, 1000 * usual_s, depth)


def _random_features(
    needs: Needs, target: Target, rows: int, shared: tuple[SharedRows, ...]
) -> TargetOutput:
    """Random features in place of a target's, and keys and values that it computed."""
    generator = torch.Generator().manual_seed(rows)

    def features(width: int) -> torch.Tensor:
        return torch.randn(rows, width, generator=generator).to(target.device, target.dtype)

    return TargetOutput(
        torch.empty(0, 0, device=target.device),
        features(target.hidden_size) if needs.hidden else None,
        features(target.layer_width * len(needs.layers)) if needs.layers else None,
        shared=shared,
    )
