"""Rank tables: which rank a drafter gave to the true token, for every position and draft depth.

Greedy speculative decoding never changes the text, and what a drafter offers behind the true path
does not depend on the tree around it. So one table answers what *any* choice tree would have
accepted at *any* position (`engine.tuning.replay`).

Worked example, a text with outputs a b c d (three possible roots: a, b, c), two depths:

    row  root  true tokens   ranks    the tree [0], [1], [0, 0] accepts
    0    a     b  c          0  0     b c
    1    b     c  d          1  0     c (there is no [1, 0])
    2    c     d  (tail)     5  0     nothing

Memory while measuring is bounded by one text at a time: its features, and the logits of
`drafters.texts.ROWS` positions.
"""

from __future__ import annotations

import io
import json
import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

import numpy as np
import torch

from engine.drafters import methods
from engine.drafters.base import BuildContext, Drafter
from engine.drafters.method import MethodConfig
from engine.drafters.texts import TargetTrace, Text
from engine.errors import ConfigError, one_of
from engine.proposal import Needs
from engine.tree import ChoiceTree
from engine.tuning import OnProgress, ignore, part
from engine.tuning.offline import look_up, read, with_steps

NOT_KEPT = -1
"""In `RankTable.ranks`: not among the ranks kept, or nothing can be drafted there."""
NUM_RANKS = 64
"""Ranks kept."""
LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32)
"""Draft lengths tried for drafters that look up."""
_FORMAT = 1
_DAMAGED = (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile, zlib.error)


class ChainSteps(NamedTuple):
    """Steps that a drafter really made offline, one after the other over all texts.

    Attributes:
        roots: `(steps,)` int32 rows of the table.
        accepted: `(steps,)` int16 draft tokens accepted.
        drafted: `(steps,)` int16 draft tokens proposed.
    """

    roots: np.ndarray
    accepted: np.ndarray
    drafted: np.ndarray

    @classmethod
    def of(cls, packed: np.ndarray) -> Self:
        """From one `(3, steps)` array."""
        return cls(packed[0], packed[1].astype(np.int16), packed[2].astype(np.int16))


@dataclass(frozen=True, slots=True, eq=False)
class RankTable:
    """Ranks of the true tokens, text after text.

    Attributes:
        ranks: `(positions, depths)` int16, 0 = the drafter's first choice, `NOT_KEPT` = −1.
            A position is an output token that can be the root of a step.
        num_ranks: ranks that were told apart; a true token beyond them is `NOT_KEPT`.
        texts: row at which each text starts.
        categories: one per text.
        token_ids: `(t,)` int32: of every text all outputs and the tail behind them.
        token_starts: where each text starts in `token_ids`.
        chains: for drafters that look up rather than rank (no depths then): the steps made, by
            draft length.
        about: what was measured on what; plain JSON.
    """

    ranks: np.ndarray
    num_ranks: int
    texts: tuple[int, ...]
    categories: tuple[str, ...]
    token_ids: np.ndarray
    token_starts: tuple[int, ...]
    chains: Mapping[int, ChainSteps] = field(default_factory=dict)
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
        chains = (array for steps in self.chains.values() for array in steps)
        return sum(array.nbytes for array in (self.ranks, self.token_ids, *chains))

    def span(self, text: int) -> tuple[int, int]:
        """Rows `[begin, end)` of a text."""
        return self.texts[text], (*self.texts[1:], self.num_positions)[text]

    def tokens_of(self, text: int) -> np.ndarray:
        """All outputs of a text and the tail behind them."""
        ends = (*self.token_starts[1:], len(self.token_ids))
        return self.token_ids[self.token_starts[text] : ends[text]]

    def locate(self, row: int) -> tuple[int, int]:
        """Which text a row belongs to, and which of its outputs is the root."""
        text = int(np.searchsorted(self.texts, row, side="right")) - 1
        return text, row - self.texts[text]

    def only(self, category: str | None) -> RankTable:
        """The texts of one category; None = all of them. Raises ConfigError where there is none."""
        if category is None:
            return self
        one_of("category", category, sorted(set(self.categories)))
        return self.pick([i for i, name in enumerate(self.categories) if name == category])

    def pick(self, numbers: Sequence[int]) -> RankTable:
        """These texts only, by number, in this order."""
        rows = [np.arange(*self.span(i)) for i in numbers]
        tokens = [self.tokens_of(i) for i in numbers]
        row_idx, sources = np.concatenate(rows), self.about.get("sources") or ()
        per_text = (
            {"sources": [sources[i] for i in numbers]} if len(sources) == self.num_texts else {}
        )
        return replace(
            self,
            ranks=self.ranks[row_idx],
            texts=_starts(rows),
            categories=tuple(self.categories[i] for i in numbers),
            token_ids=np.concatenate(tokens),
            token_starts=_starts(tokens),
            chains={length: _kept(steps, row_idx) for length, steps in self.chains.items()},
            about={**self.about, **per_text},
        )

    def narrowed(self, max_depth: int | None, max_width: int | None) -> RankTable:
        """Without what is deeper or of a higher rank; None = as deep or wide as it is."""
        width = min(max_width or self.num_ranks, self.num_ranks)
        ranks = self.ranks[:, :max_depth]
        return replace(self, ranks=np.where(ranks < width, ranks, NOT_KEPT), num_ranks=width)

    def to_bytes(self) -> bytes:
        """A compressed NumPy archive; `from_bytes` reads it."""
        names = ("num_ranks", "texts", "categories", "token_starts", "about")
        head = {name: getattr(self, name) for name in names}
        head |= {"format": _FORMAT, "chains": sorted(self.chains)}
        arrays = {"ranks": self.ranks, "token_ids": self.token_ids}
        for length, steps in self.chains.items():
            arrays[f"chain_{length}"] = np.stack([column.astype(np.int32) for column in steps])
        stream = io.BytesIO()
        packed = np.frombuffer(json.dumps(head).encode(), dtype=np.uint8)
        np.savez_compressed(stream, head=packed, **arrays)  # type: ignore[arg-type]
        return stream.getvalue()

    @classmethod
    def from_bytes(cls, payload: bytes) -> Self:
        """What `to_bytes` wrote.

        Raises ConfigError: it is no rank table, or one of a newer version.
        """
        try:
            if not zipfile.is_zipfile(io.BytesIO(payload)):
                raise ValueError("not an archive")
            with np.load(io.BytesIO(payload), allow_pickle=False) as stored:
                head = json.loads(stored["head"].tobytes())
                if head["format"] != _FORMAT:
                    raise ConfigError(
                        f"The rank table has format {head['format']}, this version reads {_FORMAT}."
                        " Measure it again."
                    )
                return cls(
                    stored["ranks"],
                    head["num_ranks"],
                    tuple(head["texts"]),
                    tuple(head["categories"]),
                    stored["token_ids"],
                    tuple(head["token_starts"]),
                    {n: ChainSteps.of(stored[f"chain_{n}"]) for n in head["chains"]},
                    head["about"],
                )
        except _DAMAGED as error:
            raise ConfigError("This is not a rank table. Measure it again.") from error


def _starts(parts: Sequence[Any]) -> tuple[int, ...]:
    """Where each part begins once they are joined."""
    return tuple(int(i) for i in np.cumsum([0, *(len(part) for part in parts)])[:-1])


def _kept(steps: ChainSteps, rows: np.ndarray) -> ChainSteps:
    """The steps whose root is one of these rows, numbered anew, in the order of the rows."""
    new = np.full(max(steps.roots.max(initial=0), rows.max(initial=0)) + 1, -1)
    new[rows] = np.arange(len(rows))
    inside = np.flatnonzero(new[steps.roots] >= 0)
    inside = inside[np.argsort(new[steps.roots[inside]], kind="stable")]
    roots = new[steps.roots[inside]].astype(np.int32)
    return ChainSteps(roots, steps.accepted[inside], steps.drafted[inside])


def measure_ranks(
    config: MethodConfig,
    context: BuildContext,
    texts: Iterable[Text],
    *,
    depths: int = 8,
    on_progress: OnProgress = ignore,
) -> RankTable:
    """The rank table of a method on these texts.

    The method's settings matter as far as they change what is drafted where: weights, confidence
    threshold, lookup rules. Its tree and draft length do not; they are what the table is asked.
    Drafters that look up have no ranks: they are run offline, once per draft length, over the texts
    in this order (pools that outlive a text remember the ones before).

    Args:
        depths: how deep to rank, or the longest draft to try.

    Raises:
        ConfigError: the method has no ranks, or no text has a step.
        PromptError: a text is not this target's.
        SourceError, DrafterError: the drafter cannot be had.
    """
    if depths < 1:
        raise ConfigError(f"depths must be at least 1, got {depths}. Set it higher.")
    usable = with_steps(texts)
    _check_ranks(config)
    drafter = None if config.looks_up else config.with_tree(ChoiceTree.chain(1)).build(context)
    num_ranks = 1 if drafter is None else min(NUM_RANKS, drafter.num_ranks or NUM_RANKS)
    needs = Needs() if drafter is None else drafter.needs
    parts, traces = list[torch.Tensor](), list[TargetTrace]()
    for done, text in enumerate(usable):
        on_progress((0.5 if config.looks_up else 1.0) * done / len(usable))
        trace = read(context.target, text, needs, tail=depths)
        parts.append(_kept_ranks(drafter, trace, depths, num_ranks))
        # Only tokens are needed from here on.
        traces.append(TargetTrace(text, trace.tokens, trace.context_len))
    outputs = [trace.tokens[trace.first :].to(torch.int32).numpy() for trace in traces]
    table = RankTable(
        ranks=torch.cat(parts).to(torch.int16).numpy(),
        num_ranks=num_ranks,
        texts=_starts(parts),
        categories=tuple(text.category for text in usable),
        token_ids=np.concatenate(outputs),
        token_starts=_starts(outputs),
        about={
            "decoding_type": config.decoding_type,
            "method": config.model_dump(mode="json"),
            "target": context.target.name,
            "dtype": context.target.dtype_name,
            "sources": [text.source for text in usable],
        },
    )
    if config.looks_up:
        chains = _looked_up(config, context, traces, depths, part(on_progress, 0.5, 1.0))
        table = replace(table, chains=chains)
    on_progress(1.0)
    return table


def _check_ranks(config: MethodConfig) -> None:
    if config.offline:
        return
    titles = [cls.title for cls in methods().values() if cls.parse({}).offline]
    raise ConfigError(
        f"{config.title} has no rank table: it does not rank tokens per depth. "
        f"Choose one of {', '.join(titles)}."
    )


@torch.inference_mode()
def _kept_ranks(
    drafter: Drafter | None, trace: TargetTrace, depths: int, num_ranks: int
) -> torch.Tensor:
    """Ranks to keep, `NOT_KEPT` elsewhere."""
    if drafter is None:
        return torch.empty(trace.text.num_roots, 0)
    ranks = drafter.ranks(trace, depths)
    is_known = (trace.true_tokens(ranks.shape[1]) >= 0) & (ranks < num_ranks)
    return torch.where(is_known, ranks, NOT_KEPT)


def _looked_up(
    config: MethodConfig,
    context: BuildContext,
    traces: Sequence[TargetTrace],
    longest: int,
    on_progress: OnProgress,
) -> dict[int, ChainSteps]:
    """Steps by draft length, each with a drafter of its own that sees the texts in order."""
    lengths = [n for n in LENGTHS if n < longest] + [longest]
    steps_by_length: dict[int, ChainSteps] = {}
    for i, length in enumerate(lengths):
        drafter = config.with_chain(length).build(context)
        rows: list[tuple[int, ...]] = []
        begin = 0
        for done, trace in enumerate(traces):
            on_progress((i + done / len(traces)) / len(lengths))
            for root, *counts in look_up(drafter, trace):
                rows.append((begin + root, *counts))
            begin += trace.text.num_roots
        drafter.close()
        steps_by_length[length] = ChainSteps.of(np.array(rows, dtype=np.int32).T)
    return steps_by_length
