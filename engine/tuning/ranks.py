"""Rank tables: the rank that a drafter gave to the true token, by position and draft depth.

Greedy speculative decoding never changes the text, and what a drafter proposes after the true path
does not depend on the rest of the tree. So one table shows what *any* choice tree would have
accepted at *any* position (`engine.tuning.replay`).

Worked example, a text with outputs a b c d (three possible roots: a, b, c), two depths:

    row  root  true tokens   ranks    the tree [0], [1], [0, 0] accepts
    0    a     b  c          0  0     b c
    1    b     c  d          1  0     c (there is no [1, 0])
    2    c     d  (tail)     5  0     nothing

A lookup drafter learns nothing from the target but which tokens are right, and a finished text
tells that: its steps along the text are the steps of a real greedy run.

A measurement holds one text in memory at a time: its features, and the logits of
`drafters.texts.MAX_LOGIT_ROWS` positions.
"""

from __future__ import annotations

import io
import json
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from engine.config import Sampling
from engine.decode import PREFILL_ROWS
from engine.drafters import methods
from engine.drafters.base import BuildContext, Drafter, Start
from engine.drafters.method import MethodConfig
from engine.drafters.texts import TargetTrace, Text
from engine.errors import ConfigError, PromptError, validate_choice
from engine.feature_log import FeatureLog
from engine.model.target import Target
from engine.proposal import Budget, Needs, Outcome, TargetOutput, joined
from engine.sampling import SeededDraws
from engine.tree import ChoiceTree
from engine.tuning import OnProgress, no_progress, progress_range
from engine.tuning.survival import TrackedDraft

NO_RANK = -1
"""In `RankTable.ranks`: beyond `NUM_RANKS`, or nothing can be drafted there."""
NUM_RANKS = 64
"""Ranks that a table distinguishes."""
LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32)
"""Draft lengths tried for lookup drafters."""
_READ_ERRORS = (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile, zlib.error)


@dataclass(frozen=True, slots=True, eq=False)
class RankTable:
    """Ranks of the true tokens, text after text.

    Attributes:
        ranks: `(positions, depths)` int16, 0 = the drafter's first choice, `NO_RANK` = −1.
            A position is an output token that can be the root of a step.
        num_ranks: ranks that are distinguished; a true token beyond them is `NO_RANK`.
        texts: row at which each text starts.
        categories: one per text.
        chains: for lookup drafters, which have no ranks (`depths` is 0): by draft length, the
            steps along all texts in order. `(3, steps)` int32: the row where each begins, and the
            draft tokens that were accepted and proposed.
        about: `target`, `dtype` and the texts' `sources`; plain JSON.
    """

    ranks: np.ndarray
    num_ranks: int
    texts: tuple[int, ...]
    categories: tuple[str, ...]
    chains: Mapping[int, np.ndarray] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_positions(self) -> int:
        return len(self.ranks)

    @property
    def depths(self) -> int:
        return int(self.ranks.shape[1])

    @property
    def num_texts(self) -> int:
        return len(self.texts)

    @property
    def num_bytes(self) -> int:
        """Memory of its arrays."""
        return sum(array.nbytes for array in (self.ranks, *self.chains.values()))

    def span(self, text: int) -> tuple[int, int]:
        """Rows `[begin, end)` of a text."""
        return self.texts[text], (*self.texts[1:], self.num_positions)[text]

    def locate(self, row: int) -> tuple[int, int]:
        """The text that a row belongs to, and the index of the output that is the root."""
        text = int(np.searchsorted(self.texts, row, side="right")) - 1
        return text, row - self.texts[text]

    def only(self, category: str | None) -> RankTable:
        """The texts of one category; None = all of them. Raises ConfigError where there is none."""
        if category is None:
            return self
        validate_choice("category", category, sorted(set(self.categories)))
        return self.select([i for i, name in enumerate(self.categories) if name == category])

    def select(self, texts: Sequence[int]) -> RankTable:
        """These texts only, by index, in this order."""
        rows = [np.arange(*self.span(i)) for i in texts]
        row_idx, sources = np.concatenate(rows), self.about["sources"]
        return replace(
            self,
            ranks=self.ranks[row_idx],
            texts=_starts(rows),
            categories=tuple(self.categories[i] for i in texts),
            chains={length: _select_steps(steps, row_idx) for length, steps in self.chains.items()},
            about={**self.about, "sources": [sources[i] for i in texts]},
        )

    def limited_to(
        self, *, max_depth: int | None = None, max_width: int | None = None
    ) -> RankTable:
        """Without greater depths and further ranks; a limit is at least 1."""
        width = min(max_width or self.num_ranks, self.num_ranks)
        ranks = self.ranks[:, :max_depth]
        return replace(self, ranks=np.where(ranks < width, ranks, NO_RANK), num_ranks=width)

    def to_bytes(self) -> bytes:
        """A compressed NumPy archive; `from_bytes` reads it."""
        meta = {name: getattr(self, name) for name in ("num_ranks", "texts", "categories", "about")}
        meta["chains"] = sorted(self.chains)
        arrays = {"ranks": self.ranks}
        arrays |= {f"chain_{length}": steps for length, steps in self.chains.items()}
        stream = io.BytesIO()
        packed = np.frombuffer(json.dumps(meta).encode(), dtype=np.uint8)
        np.savez_compressed(stream, head=packed, **arrays)  # type: ignore[arg-type]
        return stream.getvalue()

    @classmethod
    def from_bytes(cls, payload: bytes) -> Self:
        """The inverse of `to_bytes`. Raises ConfigError: no rank table."""
        try:
            if not zipfile.is_zipfile(io.BytesIO(payload)):
                raise ValueError("not an archive")
            with np.load(io.BytesIO(payload), allow_pickle=False) as stored:
                meta = json.loads(stored["head"].tobytes())
                return cls(
                    stored["ranks"],
                    meta["num_ranks"],
                    tuple(meta["texts"]),
                    tuple(meta["categories"]),
                    {n: stored[f"chain_{n}"] for n in meta["chains"]},
                    meta["about"],
                )
        except _READ_ERRORS as error:
            raise ConfigError("This is not a rank table. Measure it again.") from error


def _starts(parts: Sequence[Any]) -> tuple[int, ...]:
    """Where each part begins in their concatenation."""
    return tuple(int(i) for i in np.cumsum([0, *(len(part) for part in parts)])[:-1])


def _select_steps(steps: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """The steps that begin at one of these rows, renumbered, in the order of the rows."""
    new = np.full(max(steps[0].max(initial=0), rows.max(initial=0)) + 1, -1, dtype=np.int32)
    new[rows] = np.arange(len(rows))
    roots = new[steps[0]]
    inside = np.flatnonzero(roots >= 0)
    inside = inside[np.argsort(roots[inside], kind="stable")]
    return np.stack([roots[inside], *steps[1:, inside]])


def measure_ranks(
    config: MethodConfig,
    context: BuildContext,
    texts: Sequence[Text],
    *,
    depths: int = 8,
    on_progress: OnProgress = no_progress,
) -> RankTable:
    """The rank table of a method on these texts.

    It depends on the settings that change what is drafted where: weights, confidence threshold,
    lookup rules; not on tree and draft length, which replay varies. Lookup drafters have no ranks:
    they are run along the texts in this order, once per draft length (pools that outlive a text
    remember the ones before).

    Args:
        texts: of two new tokens or more each.
        depths: how deep to rank, or the longest draft to try.

    Raises:
        ConfigError: the method has no ranks.
        PromptError: a text is of another target.
        SourceError, DrafterError: the drafter cannot be loaded.
    """
    if not config.offline:
        titles = [kind.title for kind in methods().values() if kind.parse({}).offline]
        raise ConfigError(
            f"{config.title} has no rank table: it does not rank tokens per depth. "
            f"Choose one of {', '.join(titles)}."
        )
    drafter = None if config.looks_up else config.with_tree(ChoiceTree.chain(1)).build(context)
    needs = Needs() if drafter is None else drafter.needs
    ranks, traces = list[Tensor](), list[TargetTrace]()
    for done, text in enumerate(texts):
        on_progress((0.5 if config.looks_up else 1.0) * done / len(texts))
        trace = trace_text(context.target, text, needs, tail=depths)
        ranks.append(_ranks_of(drafter, trace, depths))
        # Drop the features: only tokens are needed from here on.
        traces.append(TargetTrace(text, trace.tokens, trace.context_len))
    chains: dict[int, np.ndarray] = {}
    if config.looks_up:
        second_half = progress_range(on_progress, 0.5, 1.0)
        chains = _measure_chains(config, context, traces, depths, second_half)
    on_progress(1.0)
    return RankTable(
        ranks=torch.cat(ranks).to(torch.int16).numpy(),
        num_ranks=1 if drafter is None else NUM_RANKS,
        texts=_starts(ranks),
        categories=tuple(text.category for text in texts),
        chains=chains,
        about={
            "target": context.target.name,
            "dtype": context.target.dtype_name,
            "sources": [text.source for text in texts],
        },
    )


def _ranks_of(drafter: Drafter | None, trace: TargetTrace, depths: int) -> Tensor:
    """Ranks of the true tokens `(roots, depths)`; without columns for None, a lookup drafter."""
    if drafter is None:
        return torch.empty(trace.text.num_roots, 0)
    with torch.inference_mode():
        ranks = drafter.ranks(trace, depths)
    is_known = (trace.true_tokens(ranks.shape[1]) >= 0) & (ranks < NUM_RANKS)
    return torch.where(is_known, ranks, NO_RANK)


def _measure_chains(
    config: MethodConfig,
    context: BuildContext,
    traces: Sequence[TargetTrace],
    longest: int,
    on_progress: OnProgress,
) -> dict[int, np.ndarray]:
    """Steps by draft length, each with a new drafter that reads the texts in order."""
    lengths = [n for n in LENGTHS if n < longest] + [longest]
    steps_by_length: dict[int, np.ndarray] = {}
    for i, length in enumerate(lengths):
        drafter = config.with_chain(length).build(context)
        rows: list[tuple[int, ...]] = []
        begin = 0
        for done, trace in enumerate(traces):
            on_progress((i + done / len(traces)) / len(lengths))
            for root, *counts in draft_along(drafter, trace):
                rows.append((begin + root, *counts))
            begin += trace.text.num_roots
        del drafter  # before the next one is built
        steps_by_length[length] = np.array(rows, dtype=np.int32).T
    return steps_by_length


@torch.inference_mode()
def trace_text(target: Target, text: Text, needs: Needs, *, tail: int) -> TargetTrace:
    """The target's features along a text and `tail` more greedy tokens, context permitting.

    Raises PromptError: longer than the target's context, or of another vocabulary.
    """
    ids = [*text.prompt_ids, *text.output_ids]
    named = f"The text of {text.source}" if text.source else "The text"
    if len(ids) > target.context_len or min(ids) < 0 or max(ids) >= target.vocab_size:
        raise PromptError(
            f"{named} has {len(ids)} tokens between {min(ids)} and {max(ids)}, but {target.name}'s "
            f"context holds {target.context_len} and its vocabulary {target.vocab_size}. Choose "
            "runs of this target."
        )
    features: list[list[Tensor | None]] = []
    text_len = len(text.prompt_ids) + text.limits.max_new_tokens
    with target.new_cache(len(ids) + tail, text_len=text_len) as cache:
        for chunk in torch.tensor(ids).split(PREFILL_ROWS):
            output = target.prefill(chunk, cache, needs)
            parts = (output.hidden, output.layers)
            features.append([None if part is None else part.cpu() for part in parts])
        for _ in range(tail):
            ids.append(int(output.logits[-1].argmax()))
            if cache.length >= target.context_len:
                break
            output = target.prefill(ids[-1:], cache, Needs())
    hidden, layers = (joined(parts) for parts in zip(*features, strict=True))
    return TargetTrace(text, torch.tensor(ids), target.context_len, hidden, layers)


@torch.inference_mode()
def draft_along(drafter: Drafter, trace: TargetTrace) -> Iterator[tuple[int, int, int]]:
    """A lookup drafter's steps along a text: index of the root, tokens accepted, tokens drafted.

    It drafts no deeper than the tail reaches.
    """
    tokens, first, output = trace.tokens.tolist(), trace.first, TargetOutput(torch.empty(0, 0))
    text, root = trace.text, 0
    log = FeatureLog(text.prompt_ids, Needs(), output.logits.device)
    session = drafter.open(Start(log, Sampling(), SeededDraws(0), text.limits))
    log.begin(tokens[first])
    try:
        while root < text.num_roots:
            at = first + root
            max_depth = trace.context_len - 1 - at
            proposal = session.propose(Budget(max_depth)).cut(max_depth)
            draft = TrackedDraft(proposal)
            draft.follow(tokens[at + 1 :])
            path = draft.path
            yield root, len(path) - 1, len(proposal.shape) - 1
            committed = tuple(tokens[at + 1 : at + 1 + len(path)])
            log.commit(Outcome(proposal, output, tuple(path), committed))
            root += len(path)
    finally:
        session.close()
