"""Times drafting, by level and width, and the loop's own work, on the real drafter and loop."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import numpy as np
import torch

from engine.config import Limits, Sampling
from engine.decode import decode
from engine.drafters.base import Drafter, Start, Workbench
from engine.drafters.draft_target import DraftTargetConfig
from engine.drafters.eagle import EagleConfig
from engine.drafters.eagle3 import Eagle3Config
from engine.drafters.medusa import MedusaConfig
from engine.drafters.method import MethodConfig
from engine.drafters.redrafter import ReDrafterConfig
from engine.model.target import Target
from engine.proposal import Needs, Outcome, Proposal, TargetOutput
from engine.sampling import SeededDraws
from engine.steps import Step
from engine.tree import ChoiceTree, TreeShape
from engine.tuning.latency import synchronise
from engine.tuning.offline import drafter_maker
from engine.tuning.shape import draft_shape
from engine.tuning.step_latency import DraftLatency, OtherCurve
from engine.tuning.watch import UNWATCHED, Watch

WIDTHS = (1, 4, 16)
"""Rows per level that are timed; others lie between."""
OTHER_ROWS = (1, 16, 64)


class _FixedChain(Drafter):
    """Proposes the same chain at every step."""

    def __init__(self, num_rows: int, target: Target) -> None:
        self._tokens = torch.arange(num_rows, device=target.device) % target.vocab_size
        self._probs = torch.full((num_rows,), 0.5, device=target.device)
        self._shape = TreeShape.chain(num_rows - 1)

    def start(self, start: Start) -> None:
        self._root = start.root

    def propose(self, max_depth: int) -> Proposal:
        tokens = self._tokens.clone()
        tokens[0] = self._root
        return Proposal(tokens, self._shape, draft_probs=self._probs)

    def observe(self, outcome: Outcome) -> None:
        self._root = outcome.next_root


def measure_other(
    target: Target,
    *,
    rows: tuple[int, ...] = OTHER_ROWS,
    context_len: int = 256,
    repeats: int = 8,
    watch: Watch = UNWATCHED,
) -> OtherCurve:
    """Measure what real steps of the loop spend on neither drafting nor verifying.

    Raises:
        StoppedError: somebody stopped it.
    """
    room = repeats + 2
    context_len = max(1, min(context_len, target.context_len - (max(rows) + 1) * room))
    prompt = [i % target.vocab_size for i in range(context_len)]
    limits = Limits(max_new_tokens=max(rows) * room, ignore_eos=True)
    medians = []
    for done, n in enumerate(rows):
        watch.at(done, len(rows))
        taken = []
        records = decode(target, _FixedChain(n, target), prompt, limits=limits)
        for record in records:
            if isinstance(record, Step):
                taken.append(record.accept_s + record.other_s)
            if len(taken) > repeats:
                break
        records.close()  # type: ignore[attr-defined]
        medians.append(1000 * statistics.median(taken[1:] or taken))
    watch.at(1, 1)
    return OtherCurve(rows, tuple(medians))


# ---- drafting


def measure_draft(
    config: MethodConfig,
    bench: Workbench,
    *,
    context_len: int = 256,
    repeats: int = 5,
    watch: Watch = UNWATCHED,
) -> DraftLatency:
    """Time drafts of several widths and depths, and solve for what a level of each width costs.

    The drafter really drafts, from made-up features: its speed does not depend on their values.

    Raises:
        ConfigError: the method cannot draft without the target.
        SourceError, DrafterError: the drafter cannot be had.
        StoppedError: somebody stopped it.
    """
    make, needs = drafter_maker(config, bench)
    tried = variants(config)
    timed: list[tuple[tuple[int, ...], float]] = []
    for done, variant in enumerate(tried):
        watch.at(done, len(tried))
        drafter = make(variant)
        ms = _time_drafts(drafter, needs, bench.target, context_len, repeats)
        timed.append((draft_shape(variant).levels, ms))
    watch.at(1, 1)
    return solve(config.decoding_type, timed)


def variants(config: MethodConfig) -> list[MethodConfig]:
    """Settings whose drafts differ in depth and in width; the given ones among them."""
    if isinstance(config, MedusaConfig):
        depth = ChoiceTree(config.medusa_choices).depth
        chains = [ChoiceTree.chain(n).paths for n in {1, depth}]
        return [config, *(config.replace(medusa_choices=paths) for paths in chains)]
    if isinstance(config, DraftTargetConfig):
        return [config.replace(max_draft_len=n) for n in sorted({1, 4, config.max_draft_len})]
    if isinstance(config, EagleConfig) and not config.use_dynamic_tree:
        combs = [_comb(width, depth) for width in WIDTHS for depth in (2, 4)]
        return [config, *(config.replace(eagle_choices=comb) for comb in combs)]
    if isinstance(config, Eagle3Config) and not config.use_dynamic_tree:
        return [config.replace(max_draft_len=n) for n in sorted({1, 4, config.max_draft_len})]
    if isinstance(config, EagleConfig | Eagle3Config):
        widths = sorted({1, config.dynamic_tree_max_topK})
        sizes = [(width, depth) for width in widths for depth in (2, 4)]
        return [config, *(_dynamic(config, *size) for size in sizes)]
    if isinstance(config, ReDrafterConfig):
        widths = sorted({1, config.beam_width})
        return [
            config.replace(beam_width=width, beam_length=1 + depth)
            for width in widths
            for depth in (2, 4)
        ]
    return [config]


def _comb(width: int, depth: int) -> tuple[tuple[int, ...], ...]:
    """`width` chains below the root, so that every level but the first runs `width` rows."""
    return tuple((i, *(0,) * d) for d in range(depth) for i in range(width))


def _dynamic(config: EagleConfig | Eagle3Config, width: int, depth: int) -> MethodConfig:
    most = width if depth == 1 else width + (depth - 1) * width * width
    return config.replace(
        dynamic_tree_max_topK=width,
        max_draft_len=depth,
        max_total_draft_tokens=max(depth, min(most, config.max_total_draft_tokens)),
        max_non_leaves_per_layer=None,
    )


def solve(decoding_type: str, timed: Sequence[tuple[tuple[int, ...], float]]) -> DraftLatency:
    """Start and level costs that explain the timed drafts best (least squares, none negative).

    Example: levels (1,) 3 ms, (1, 1) 5 ms → start 1 ms, a level of one row 2 ms.
    """
    widths = sorted({n for levels, _ in timed for n in levels})
    counts = np.array([[1, *(levels.count(n) for n in widths)] for levels, _ in timed], dtype=float)
    ms = np.array([taken for _, taken in timed])
    solved = np.linalg.lstsq(counts, ms, rcond=None)[0]
    if (solved < 0).any():
        # A negative start is noise around nothing: explain the times without it.
        solved = np.maximum(0.0, np.r_[0.0, np.linalg.lstsq(counts[:, 1:], ms, rcond=None)[0]])
    return DraftLatency(
        decoding_type,
        float(solved[0]),
        tuple(widths),
        tuple(float(value) for value in solved[1:]),
    )


@torch.inference_mode()
def _time_drafts(
    drafter: Drafter, needs: Needs, target: Target, context_len: int, repeats: int
) -> float:
    """Median milliseconds of a draft after a step that accepted two tokens, if it drafted two."""
    context_len = max(2, min(context_len, target.context_len // 2))
    prompt = [(7 * i) % min(97, target.vocab_size) for i in range(context_len)]
    start = Start(
        prompt, 1, _made_up(needs, target, context_len), Sampling(), SeededDraws(0), Limits()
    )
    drafter.start(start)
    taken = []
    try:
        for _ in range(repeats + 1):
            synchronise(target.device)
            began = time.perf_counter()
            proposal = drafter.propose(64)
            tokens = proposal.tokens.tolist()
            taken.append(time.perf_counter() - began)
            path = [0]
            while len(path) < 3 and proposal.shape.children[path[-1]]:
                path.append(proposal.shape.children[path[-1]][0])
            output = _made_up(needs, target, len(tokens))
            committed = (*(tokens[node] for node in path[1:]), 1)
            drafter.observe(Outcome(proposal, output, tuple(path), committed))
    finally:
        drafter.finish()
    return 1000 * statistics.median(taken[1:])


def _made_up(needs: Needs, target: Target, rows: int) -> TargetOutput:
    """Random features."""
    generator = torch.Generator().manual_seed(rows)

    def features(width: int) -> torch.Tensor:
        return torch.randn(rows, width, generator=generator).to(target.device, target.dtype)

    size = target.hidden_size
    return TargetOutput(
        torch.empty(0, 0, device=target.device),
        features(size) if needs.hidden else None,
        features(size * len(needs.layers)) if needs.layers else None,
    )
