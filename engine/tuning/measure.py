"""Measures rank tables: reads finished texts through the target and ranks their tokens, in batches.

Memory is bounded by one text at a time: its features, and the logits of `rankers.ROWS` positions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from engine.drafters.base import Workbench
from engine.drafters.method import MethodConfig
from engine.drafters.ngram import NGramConfig
from engine.drafters.suffix import SuffixConfig
from engine.errors import ConfigError
from engine.proposal import Needs
from engine.tuning.offline import drafter_maker, run_offline
from engine.tuning.rankers import Ranker, make_ranker
from engine.tuning.ranks import NOT_KEPT, ChainSteps, RankTable
from engine.tuning.texts import Reading, Text, read
from engine.tuning.watch import UNWATCHED, Watch

NUM_RANKS = 64
"""Ranks kept."""
LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32)
"""Draft lengths tried for drafters that look up."""
NO_STEP = "No text has two new tokens or more. Choose longer runs."


def measure_ranks(
    config: MethodConfig,
    bench: Workbench,
    texts: Iterable[Text],
    *,
    depths: int = 8,
    watch: Watch = UNWATCHED,
) -> RankTable:
    """The rank table of a method on these texts.

    The method's settings matter as far as they change what is drafted where: weights, confidence
    threshold, look-up rules. Its tree and draft length do not; they are what the table is asked.
    Drafters that look up (NGram, Suffix) have no ranks: they are run offline, once per draft
    length, over the texts in this order (pools that outlive a text remember the ones before).

    Args:
        depths: how deep to rank, or the longest draft to try.

    Raises:
        ConfigError: the method has no ranks, or no text has a step.
        PromptError: a text is not this target's.
        SourceError, DrafterError: the drafter cannot be had.
        StoppedError: somebody stopped it.
    """
    if depths < 1:
        raise ConfigError(f"depths must be at least 1, got {depths}. Set it higher.")
    wanted = [text for text in texts if text.num_roots]
    if not wanted:
        raise ConfigError(NO_STEP)
    look_up = isinstance(config, NGramConfig | SuffixConfig)
    ranker = None if look_up else make_ranker(config, bench, depths)
    needs = Needs() if ranker is None else ranker.needs
    parts, readings = list[torch.Tensor](), list[Reading]()
    texts_watch = watch.part(0.0, 0.5 if look_up else 1.0)
    for done, text in enumerate(wanted):
        texts_watch.at(done, len(wanted))
        reading = read(bench.target, text, needs, tail=depths)
        parts.append(_ranks(ranker, reading) if ranker else torch.empty(text.num_roots, 0))
        # Only tokens are needed from here on.
        readings.append(Reading(text, reading.tokens, reading.context_len))
    table = _table(parts, readings, _kept(ranker), _about(config, bench, wanted))
    if look_up:
        chains = look_up_chains(config, bench, readings, depths, watch.part(0.5, 1.0))
        table = replace(table, chains=chains)
    watch.at(1, 1)
    return table


@torch.inference_mode()
def _ranks(ranker: Ranker, reading: Reading) -> torch.Tensor:
    """Ranks to keep, `NOT_KEPT` elsewhere."""
    found = ranker.ranks(reading)
    known = (reading.true_tokens(ranker.depths) >= 0) & (found < _kept(ranker))
    return torch.where(known, found, NOT_KEPT)


def _kept(ranker: Ranker | None) -> int:
    if ranker is None:
        return 1
    return NUM_RANKS if ranker.num_ranks is None else min(NUM_RANKS, ranker.num_ranks)


def look_up_chains(
    config: MethodConfig, bench: Workbench, readings: Sequence[Reading], longest: int, watch: Watch
) -> dict[int, ChainSteps]:
    """Steps by draft length, each with a drafter of its own that sees the texts in order."""
    make, _ = drafter_maker(config, bench)
    lengths = [n for n in LENGTHS if n < longest] + [longest]
    found: dict[int, ChainSteps] = {}
    for i, length in enumerate(lengths):
        drafter = make(config.replace(max_draft_len=length))
        rows: list[tuple[int, int, int]] = []
        begin = 0
        for done, reading in enumerate(readings):
            watch.at(i * len(readings) + done, len(lengths) * len(readings))
            for step in run_offline(drafter, reading, bench.target.device):
                rows.append((begin + step.root, step.num_accepted, step.num_drafted))
            begin += reading.text.num_roots
        drafter.close()
        roots, accepted, drafted = np.array(rows).T
        found[length] = ChainSteps(
            roots.astype(np.int32), accepted.astype(np.int16), drafted.astype(np.int16)
        )
    return found


def _table(
    parts: Sequence[torch.Tensor], readings: Sequence[Reading], kept: int, about: dict[str, Any]
) -> RankTable:
    outputs = [reading.tokens[reading.first :].to(torch.int32).numpy() for reading in readings]
    return RankTable(
        ranks=torch.cat(list(parts)).to(torch.int16).numpy(),
        num_ranks=kept,
        texts=_starts(parts),
        categories=tuple(reading.text.category for reading in readings),
        token_ids=np.concatenate(outputs),
        token_starts=_starts(outputs),
        about=about,
    )


def _starts(parts: Sequence[Any]) -> tuple[int, ...]:
    return tuple(int(i) for i in np.cumsum([0, *(len(part) for part in parts)])[:-1])


def _about(config: MethodConfig, bench: Workbench, texts: Sequence[Text]) -> dict[str, Any]:
    target = bench.target
    return {
        "decoding_type": config.decoding_type,
        "method": config.model_dump(mode="json"),
        "target": target.name,
        "dtype": target.dtype_name,
        "sources": [text.source for text in texts],
    }
