"""A comparison as plain JSON for the page: figures, speedups, verdicts, explanations, runs."""

from __future__ import annotations

import json
from typing import Any

from playground.experiments.bench.headline import Contender, headline
from playground.experiments.bench.speedup import speedup_of
from playground.experiments.compare.board import Board, Entry
from playground.experiments.compare.explain import explain
from playground.experiments.compare.figures import Pair, in_pairs, pool, speedup_dict
from playground.experiments.compare.verdict import Verdict, judge
from storage import RunLog


def report_text(log: RunLog, board: Board) -> str:
    """The report as JSON text."""
    return json.dumps(report(log, board))


def report(log: RunLog, board: Board) -> dict[str, Any]:
    """Everything under the panels, and which run is whose."""
    plain = board.of(board.plain)
    rows = []
    contenders = []
    for entry in board.entries:
        own = board.of(entry.name)
        is_plain = entry.name == board.plain
        pairs = [] if is_plain else in_pairs(own, plain)
        pooled = pool(own)
        verdict = _verdict(log, board, entry, pairs)
        if not is_plain:
            contenders.append(Contender(entry.name, speedup_of(pairs), verdict.trust))
        rows.append(
            {
                "name": entry.name,
                "badge": "baseline" if is_plain else "lossless" if entry.lossless else "lossy",
                "settings": entry.settings,
                "fault": board.faults.get(entry.name),
                "figures": None if pooled is None else pooled.to_dict(),
                "speedup": speedup_dict(pairs),
                "verdict": verdict.to_dict(),
                "why": _why(pairs),
            }
        )
    return {
        "id": board.id,
        "setup": board.setup,
        "headline": headline(contenders),
        "num_repeats": board.num_repeats,
        "configurations": rows,
        "prompts": [[name, begin] for name, begin in board.prompts.items()],
        "skipped": [[name, why] for name, why in board.skipped.items()],
        "runs": [[*key, run] for key, run in board.runs.items()],
    }


def _verdict(log: RunLog, board: Board, entry: Entry, pairs: list[Pair]) -> Verdict:
    if entry.name == board.plain:
        return Verdict.baseline(board.of(entry.name), greedy=board.greedy)
    audit = board.audits.get(entry.name)
    return judge(log, pairs, lossless=entry.lossless, greedy=board.greedy, audit=audit)


def _why(pairs: list[Pair]) -> dict[str, Any] | None:
    """The explanation over the requests that both sides decoded."""
    both = [(own, plain) for own, plain in pairs if own.decode_s > 0 and plain.decode_s > 0]
    ours, theirs = pool([own for own, _ in both]), pool([plain for _, plain in both])
    return None if ours is None or theirs is None else explain(ours, theirs).to_dict()
