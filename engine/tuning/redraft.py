"""Re-drafts finished texts with other settings, without running the target again.

The target reads the texts once; tokens and features are kept. After that every setting of the same
weights (size of a dynamic tree, beams, draft length, choice tree) is tried by running the real
drafter over them: accepted lengths are those of a real greedy run, and so are the drafted trees.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np

from engine.drafters.base import Workbench
from engine.drafters.method import MethodConfig
from engine.errors import ConfigError
from engine.tree import Path
from engine.tuning.measure import NO_STEP
from engine.tuning.offline import Maker, drafter_maker, run_offline
from engine.tuning.shape import draft_shape
from engine.tuning.texts import Reading, Text, read
from engine.tuning.watch import UNWATCHED, Watch


@dataclass(slots=True)
class DraftedTrees:
    """Shapes of drafted trees, counted; for steps made offline and for recorded ones alike.

    Attributes:
        num_nodes, depths, widths: how many trees had so many drafted nodes, levels, and nodes on
            their widest level.
        drafted: how many trees had a node at this path of ranks.
        accepted: how many steps accepted it.
    """

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
class Redraft:
    """The steps of all texts with some settings.

    Attributes:
        texts: `(steps,)` which text each step belongs to.
        roots: `(steps,)` which of its outputs is the root.
        accepted_lengths: `(steps,)`.
        node_counts: `(steps,)` drafted nodes.
        trees: shapes of the drafted trees.
    """

    config: MethodConfig
    texts: np.ndarray
    roots: np.ndarray
    accepted_lengths: np.ndarray
    node_counts: np.ndarray
    trees: DraftedTrees

    @property
    def num_steps(self) -> int:
        return len(self.roots)

    @property
    def num_accepted(self) -> int:
        return int(self.accepted_lengths.sum())

    @property
    def mat(self) -> float:
        """1 + accepted draft tokens / steps, before any cut by EOS or length."""
        return 1 + self.num_accepted / self.num_steps

    @property
    def position_rates(self) -> tuple[float, ...]:
        """Rate i: steps that accepted at least i draft tokens / steps."""
        at_least = np.bincount(self.accepted_lengths)[::-1].cumsum()[::-1]
        return tuple((at_least[1:] / self.num_steps).tolist())


class Redrafter:
    """Finished texts with their features, and the drafter's weights to draft them again.

    Attributes:
        tail: tokens known beyond each text's end: the deepest draft that can be tried.
    """

    def __init__(
        self, config: MethodConfig, bench: Workbench, readings: Sequence[Reading], make: Maker
    ) -> None:
        self._config = config
        self._device = bench.target.device
        self._readings = tuple(readings)
        self._make: Maker | None = make
        self.tail = min((_tail(reading) for reading in readings), default=0)

    @classmethod
    def read(
        cls,
        config: MethodConfig,
        bench: Workbench,
        texts: Iterable[Text],
        *,
        tail: int = 16,
        watch: Watch = UNWATCHED,
    ) -> Self:
        """Read the texts through the target and keep the features that the method needs.

        Raises:
            ConfigError: the method cannot draft without the target, or no text has a step.
            PromptError: a text is not this target's.
            SourceError, DrafterError: the drafter cannot be had.
            StoppedError: somebody stopped it.
        """
        make, needs = drafter_maker(config, bench)
        wanted = [text for text in texts if text.num_roots]
        if not wanted:
            raise ConfigError(NO_STEP)
        readings = []
        for done, text in enumerate(wanted):
            watch.at(done, len(wanted))
            readings.append(read(bench.target, text, needs, tail=tail))
        watch.at(1, 1)
        return cls(config, bench, readings, make)

    @property
    def num_bytes(self) -> int:
        """Memory of the kept texts and features."""
        return sum(reading.num_bytes for reading in self._readings)

    def draft(self, config: MethodConfig, *, watch: Watch = UNWATCHED) -> Redraft:
        """All texts with these settings, in order.

        Raises:
            ConfigError: another method or other weights, or drafts deeper than the tail.
            TreeError, DrafterError: the settings do not fit the weights.
            StoppedError: somebody stopped it.
        """
        assert self._make is not None
        self._check(config)
        drafter, trees = self._make(config), DraftedTrees()
        rows: list[tuple[int, int, int, int]] = []
        try:
            for number, reading in enumerate(self._readings):
                watch.at(number, len(self._readings))
                for step in run_offline(drafter, reading, self._device):
                    shape, ranks = step.proposal.shape, step.proposal.ranks
                    trees.add(shape.parents, ranks or _sibling_ranks(shape.parents), step.path)
                    rows.append((number, step.root, step.num_accepted, step.num_drafted))
        finally:
            drafter.finish()
        watch.at(1, 1)
        texts, roots, accepted, nodes = np.array(rows).T
        return Redraft(config, texts, roots, accepted, nodes, trees)

    def _check(self, config: MethodConfig) -> None:
        for name in ("decoding_type", "speculative_model"):
            ours, theirs = getattr(self._config, name, None), getattr(config, name, None)
            if ours != theirs:
                raise ConfigError(
                    f"{name} must stay {ours} to draft these texts again, got {theirs}. "
                    "Read the texts for the other one."
                )
        depth = draft_shape(config).depth
        if depth > self.tail:
            raise ConfigError(
                f"The draft must be at most {self.tail} tokens deep, got {depth}: the texts are "
                "not known further beyond their ends. Read them with a longer tail."
            )

    def close(self) -> None:
        """Forget texts, features and weights."""
        self._readings, self._make = (), None


def _tail(reading: Reading) -> int:
    """Tokens known behind the text; where its context ends, nothing deeper can be drafted."""
    end = reading.first + len(reading.text.output_ids)
    known = len(reading.tokens) - end
    return known if len(reading.tokens) <= reading.context_len else 1 << 30


def _sibling_ranks(parents: Sequence[int]) -> list[int]:
    """Order among siblings, for drafters that give no ranks."""
    seen: Counter[int] = Counter()
    ranks = []
    for parent in parents:
        ranks.append(seen[parent] if parent >= 0 else 0)
        seen[parent] += 1
    return ranks
