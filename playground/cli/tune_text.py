"""What `app.py tune` prints: rank tables, fitted trees and latency curves as Markdown tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from engine.tuning.ranks import RankTable
from engine.tuning.replay import chain_lengths, replay_chain
from engine.tuning.step_latency import Clock
from playground.trees.fitting import Fit


def described(table: RankTable) -> Iterator[str]:
    """How often the true token had which rank; for look-up, MAT by draft length."""
    yield (
        f"{table.num_positions} positions of {table.num_texts} texts, {table.about['target']} in "
        f"{table.about['dtype']}, {table.about['decoding_type']}"
    )
    if table.chains:
        yield "| draft length | MAT |"
        yield "|---|---|"
        for length in chain_lengths(table):
            yield f"| {length} | {replay_chain(table, length).mat:.3f} |"
        return
    yield "| depth | rank 0 | ranks 0-3 | ranks 0-9 | kept |"
    yield "|---|---|---|---|---|"
    for depth, column in enumerate(table.ranks.T, start=1):
        shares = [np.mean((column >= 0) & (column < n)) for n in (1, 4, 10, table.num_ranks)]
        yield f"| {depth} | " + " | ".join(f"{share:.3f}" for share in shares) + " |"


def table_of(fits: Sequence[Fit], held_out: bool, clock: Clock | None) -> Iterator[str]:
    """A row per tree, and which is fastest where a clock is known."""
    heads = ["tree", "nodes", "depth", "MAT"]
    heads += ["held out"] if held_out else []
    heads += ["predicted tok/s", "of plain"] if clock else []
    yield "| " + " | ".join(heads) + " |"
    yield "|---" * len(heads) + "|"
    for fit in fits:
        cells = [fit.title, str(len(fit.tree)), str(fit.tree.depth), f"{fit.mat:.3f}"]
        if held_out:
            cells.append("-" if fit.held_out_mat is None else f"{fit.held_out_mat:.3f}")
        if fit.prediction is not None:
            cells += [f"{fit.prediction.tok_s:.1f}", f"{fit.prediction.speedup:.2f}"]
        yield "| " + " | ".join(cells) + " |"
    if clock is None:
        yield "No latency is known for this method; app.py tune latency measures it."
    elif fits:
        best = max(fits, key=lambda fit: fit.prediction.tok_s if fit.prediction else 0.0)
        yield f"Fastest on this machine, as predicted: {best.title}, {len(best.tree)} nodes."


def clock_lines(clock: Clock) -> Iterator[str]:
    """All curves of a clock."""
    yield f"Verify and other, at {clock.verify.context_len} tokens of context:"
    yield "| rows | verify ms | other ms |"
    yield "|---|---|---|"
    for rows, ms in zip(clock.verify.rows, clock.verify.verify_ms, strict=True):
        yield f"| {rows} | {ms:.2f} | {clock.other.at(rows):.2f} |"
    draft = clock.draft
    yield f"Draft, {draft.decoding_type}: {draft.start_ms:.2f} ms per step, and per level:"
    yield "| rows | ms |"
    yield "|---|---|"
    for rows, ms in zip(draft.rows, draft.level_ms, strict=True):
        yield f"| {rows} | {ms:.2f} |"
