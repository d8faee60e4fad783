"""Drafts finished texts again, with any settings, without running the target for every step.

What a drafter learns from the target is known of a finished text: which of its tokens are right,
and the features along the true path. So the target reads the texts once, and then the real drafter,
whatever its settings (size of a dynamic tree, beams, draft length, choice tree), is fed these: its
steps are the steps of a real greedy run (in float32), and so are the drafted trees.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from engine import metrics
from engine.config import Sampling
from engine.drafters import methods
from engine.drafters.base import BuildContext, Drafter, Start
from engine.drafters.method import MethodConfig
from engine.drafters.texts import TargetTrace, Text
from engine.errors import ConfigError, PromptError
from engine.model.target import Target
from engine.proposal import Budget, Needs, Outcome, Proposal, TargetOutput, joined
from engine.sampling import SeededDraws
from engine.tree import Path
from engine.tuning import OnProgress, ignore

MAX_BYTES = 1 << 30
"""Most memory that the features of all texts take."""
_CHUNK = 1024
"""Rows of a text that go through the target at a time."""


def with_steps(texts: Iterable[Text]) -> list[Text]:
    """The texts that have a step.

    Raises ConfigError: none has.
    """
    usable = [text for text in texts if text.num_roots]
    if not usable:
        raise ConfigError("No text has two new tokens or more. Choose longer runs.")
    return usable


@torch.inference_mode()
def read(target: Target, text: Text, needs: Needs, *, tail: int) -> TargetTrace:
    """One forward over the whole text, and `tail` greedy tokens more (fewer at the context's end).

    Raises PromptError: longer than the target's context, empty, or of another vocabulary.
    """
    ids = [*text.prompt_ids, *text.output_ids]
    _check(target, text, ids)
    cache = target.new_cache(len(ids) + tail)
    features: list[list[Tensor | None]] = []
    try:
        for chunk in torch.tensor(ids).split(_CHUNK):
            output = target.prefill(chunk, cache, needs)
            parts = (output.hidden, output.layers)
            features.append([None if part is None else part.cpu() for part in parts])
        for _ in range(tail):
            ids.append(int(output.logits[-1].argmax()))
            if cache.length >= target.context_len:
                break
            output = target.prefill(ids[-1:], cache, Needs())
    finally:
        cache.free()
    hidden, layers = (joined(parts) for parts in zip(*features, strict=True))
    return TargetTrace(text, torch.tensor(ids), target.context_len, hidden, layers)


def _check(target: Target, text: Text, ids: list[int]) -> None:
    where = f" of {text.source}" if text.source else ""
    if not text.prompt_ids or not text.output_ids:
        raise PromptError(f"The text{where} must have a prompt and an output. Choose another run.")
    if len(ids) > target.context_len:
        raise PromptError(
            f"The text{where} has {len(ids)} tokens, but {target.name}'s context holds "
            f"{target.context_len}. Choose runs of this target."
        )
    worst = max(ids) if min(ids) >= 0 else min(ids)
    if not 0 <= worst < target.vocab_size:
        raise PromptError(
            f"The text{where} has token {worst}, but {target.name} has {target.vocab_size} tokens. "
            "Choose runs of this target."
        )


@dataclass(frozen=True, slots=True, eq=False)
class OfflineStep:
    """One step made offline.

    Attributes:
        root: which output of the text is the root.
        path: accepted nodes in path order, root excluded.
    """

    root: int
    proposal: Proposal
    path: tuple[int, ...]

    @property
    def counts(self) -> tuple[int, int]:
        """Draft tokens accepted and proposed."""
        return len(self.path), len(self.proposal.shape) - 1


@torch.inference_mode()
def run_offline(
    drafter: Drafter, trace: TargetTrace, device: torch.device
) -> Iterator[OfflineStep]:
    """The steps that the drafter makes on this text.

    Raises ConfigError: a draft went on where the text is not known; read it with a longer tail.
    """
    tokens, first = trace.tokens.tolist(), trace.first
    prompt_ids, limits = trace.text.prompt_ids, trace.text.limits
    output = _output(trace, 0, range(1, first), device)
    drafter.start(Start(prompt_ids, tokens[first], output, Sampling(), SeededDraws(0), limits))
    try:
        root = 0
        while root < trace.text.num_roots:
            at = first + root
            max_depth = trace.context_len - 1 - at
            proposal = drafter.propose(Budget(max_depth)).cut(max_depth)
            path = follow(proposal, tokens[at + 1 :])
            committed = tuple(tokens[at + 1 : at + len(path) + 2])
            if len(committed) <= len(path):
                raise ConfigError(
                    f"A draft is {proposal.shape.max_depth} tokens deep, further than the text is "
                    "known beyond its end. Read the text with a longer tail."
                )
            yield OfflineStep(root, proposal, path)
            output = _output(trace, at, path, device)
            drafter.observe(Outcome(proposal, output, (0, *path), committed))
            root += len(path) + 1
    finally:
        drafter.finish()


def follow(proposal: Proposal, true_tokens: Sequence[int]) -> tuple[int, ...]:
    """The accepted path: from the root, the child that carries the next true token."""
    tokens = proposal.tokens.tolist()
    at, path = 0, list[int]()
    for token in true_tokens:
        match = [c for c in proposal.shape.children[at] if tokens[c] == token]
        if not match:
            break
        at = match[0]
        path.append(at)
    return tuple(path)


def _output(trace: TargetTrace, at: int, path: Sequence[int], device: torch.device) -> TargetOutput:
    """Features of the text from `at` on where a forward has the root and the path; no others."""
    nodes = [0, *path]

    def spread(features: Tensor | None) -> Tensor | None:
        if features is None:
            return None
        rows_on_path = features[at : at + len(nodes)].to(device)
        rows = rows_on_path.new_zeros(max(nodes) + 1, rows_on_path.shape[1])
        rows[nodes[: len(rows_on_path)]] = rows_on_path
        return rows

    none = torch.empty(0, 0, device=device)
    return TargetOutput(none, spread(trace.hidden), spread(trace.layers))


@dataclass(slots=True)
class DraftedTrees:
    """How many trees, drafted offline or recorded, had so many nodes, levels, nodes on the widest
    level; and how many had a node at a path of ranks, or accepted it."""

    num_nodes: Counter[int] = field(default_factory=Counter)
    depths: Counter[int] = field(default_factory=Counter)
    widths: Counter[int] = field(default_factory=Counter)
    drafted: Counter[Path] = field(default_factory=Counter)
    accepted: Counter[Path] = field(default_factory=Counter)

    def add(self, parents: Sequence[int], ranks: Sequence[int], path: Sequence[int]) -> None:
        """One step: node 0 is the root, `path` the accepted nodes."""
        paths: list[Path] = [()]
        for node in range(1, len(parents)):
            paths.append((*paths[parents[node]], ranks[node]))
        levels = Counter(len(p) for p in paths[1:])
        self.num_nodes[len(parents) - 1] += 1
        self.depths[max(levels, default=0)] += 1
        self.widths[max(levels.values(), default=0)] += 1
        self.drafted.update(paths[1:])
        self.accepted.update(paths[node] for node in path)


@dataclass(frozen=True, slots=True, eq=False)
class GreedySteps:
    """The steps `(steps,)` of a greedy run that was replayed or drafted again.

    Attributes:
        roots: where they begin: a row of a table, or which output of its text.
    """

    roots: np.ndarray
    accepted_lengths: np.ndarray

    @property
    def num_steps(self) -> int:
        return len(self.roots)

    @property
    def num_accepted(self) -> int:
        return int(self.accepted_lengths.sum())

    @property
    def mat(self) -> float:
        mat = metrics.mat(self.num_accepted, self.num_steps)
        assert mat is not None
        return mat

    @property
    def position_rates(self) -> tuple[float, ...]:
        counts = metrics.at_least(Counter(self.accepted_lengths.tolist()))
        return metrics.position_rates(counts, self.num_steps)


@dataclass(frozen=True, slots=True, eq=False)
class Redraft(GreedySteps):
    """The steps of all texts with some settings: which text each belongs to, nodes it drafted."""

    texts: np.ndarray
    node_counts: np.ndarray
    trees: DraftedTrees


class Redrafter:
    """Finished texts with their features, and the drafter's weights to draft them again.

    Attributes:
        tail: tokens known beyond each text's end: the deepest draft that can be tried.
        num_left_out: texts at the end whose features would have taken too much memory.
    """

    def __init__(
        self,
        config: MethodConfig,
        context: BuildContext,
        texts: Iterable[Text],
        *,
        tail: int = 16,
        max_bytes: int = MAX_BYTES,
        on_progress: OnProgress = ignore,
    ) -> None:
        """Read the texts through the target and keep the features that the method needs.

        Raises:
            ConfigError: the method cannot draft without the target, no text has a step, or the
                features of the first take more than `max_bytes`.
            PromptError: a text is not this target's.
            SourceError, DrafterError: the drafter cannot be had.
        """
        require_offline(config)
        usable = with_steps(texts)
        self._config, self._context = config, context
        self._drafter = config.build(context)
        self._readings: list[TargetTrace] = []
        left_bytes = max_bytes
        for done, text in enumerate(usable):
            on_progress(done / len(usable))
            trace = read(context.target, text, self._drafter.needs, tail=tail)
            left_bytes -= trace.num_bytes
            if left_bytes < 0:
                break
            self._readings.append(trace)
        self.num_left_out = len(usable) - len(self._readings)
        if not self._readings:
            raise ConfigError(
                f"The features of a text must take at most {max_bytes:,} bytes, got "
                f"{trace.num_bytes:,}. Choose shorter runs."
            )
        on_progress(1.0)
        # Where a text ends with the target's context, nothing deeper can be drafted.
        self.tail = min(
            len(trace.tokens) - trace.first - len(trace.text.output_ids)
            if len(trace.tokens) <= trace.context_len
            else 1 << 30
            for trace in self._readings
        )

    def draft(self, config: MethodConfig, *, on_progress: OnProgress = ignore) -> Redraft:
        """All texts with these settings, in order.

        Raises:
            ConfigError: another method or other weights, or drafts deeper than the tail.
            TreeError, DrafterError: the settings do not fit the weights.
        """
        self._check(config)
        drafter, trees = config.build_sharing(self._drafter, self._context), DraftedTrees()
        rows: list[tuple[int, int, int, int]] = []
        try:
            for number, trace in enumerate(self._readings):
                on_progress(number / len(self._readings))
                for step in run_offline(drafter, trace, self._context.target.device):
                    shape = step.proposal.shape
                    trees.add(shape.parents, step.proposal.sibling_ranks(), step.path)
                    rows.append((number, step.root, *step.counts))
        finally:
            drafter.finish()
        on_progress(1.0)
        texts, roots, accepted, nodes = np.array(rows).T
        return Redraft(roots, accepted, texts, nodes, trees)

    def _check(self, config: MethodConfig) -> None:
        for name in ("decoding_type", "speculative_model"):
            ours, theirs = getattr(self._config, name, None), getattr(config, name, None)
            if ours != theirs:
                raise ConfigError(
                    f"{name} must stay {ours} to draft these texts again, got {theirs}. "
                    "Read the texts for the other one."
                )
        depth = config.draft_shape().depth
        if depth > self.tail:
            raise ConfigError(
                f"The draft must be at most {self.tail} tokens deep, got {depth}: the texts are "
                "not known further beyond their ends. Read them with a longer tail."
            )

    def close(self) -> None:
        """Forget texts, features and weights."""
        self._readings.clear()
        self._drafter.close()


def require_offline(config: MethodConfig) -> None:
    """Raises ConfigError: the method learns more from the target than a text's features."""
    if not config.offline:
        names = [name for name, cls in methods().items() if cls.parse({}).offline]
        raise ConfigError(
            f"decoding_type must be one of {', '.join(names)} to draft without the target, got "
            f"{config.decoding_type}. Measure other methods by running them."
        )
