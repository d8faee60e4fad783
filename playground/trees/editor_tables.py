"""Rank tables for the Tree page: packed for the page's own replay, and example steps in words."""

from __future__ import annotations

import base64
import threading
from typing import Any

import numpy as np

from engine.errors import ConfigError
from engine.tuning.ranks import RankTable
from storage import RunLog

MAX_PACKED_BYTES = 64_000_000
BEFORE = 14
"""Tokens shown before an example's root."""
MOST_TEXTS = 16
"""Texts whose tokens are remembered."""


def pack(table: RankTable) -> dict[str, Any]:
    """The table as the page's `unpackTable` reads it; plain JSON.

    Ranks go up by one, so that 0 means "not among the ranks kept": `(positions, depths)` integers
    of `width` bytes, little-endian, in base64.

    Raises:
        ConfigError: too large to send.
    """
    width = 1 if table.num_ranks <= 254 else 2
    if table.ranks.size * width > MAX_PACKED_BYTES:
        raise ConfigError(
            f"The rank table has {table.num_positions} positions and is too large for the page. "
            "Measure it over fewer texts."
        )
    shifted = (table.ranks + 1).astype("<u1" if width == 1 else "<u2")
    return {
        "depths": table.depths,
        "num_ranks": table.num_ranks,
        "starts": list(table.texts),
        "positions": table.num_positions,
        "categories": list(table.categories),
        "width": width,
        "ranks": base64.b64encode(shifted.tobytes()).decode(),
        "chains": _chains(table),
    }


def _chains(table: RankTable) -> list[dict[str, Any]]:
    """Steps made offline by a drafter that looks up: counts of accepted and drafted lengths."""
    text_of = np.searchsorted(np.array(table.texts), np.arange(table.num_positions), "right") - 1
    names = np.array(table.categories, dtype=object)
    rows = []
    for length, steps in sorted(table.chains.items()):
        categories = names[text_of[steps.roots]]
        for name in dict.fromkeys(table.categories):
            mine = categories == name
            rows.append(
                {
                    "length": length,
                    "category": name,
                    "ends": np.bincount(steps.accepted[mine], minlength=1).tolist(),
                    "drafted": np.bincount(steps.drafted[mine], minlength=1).tolist(),
                }
            )
    return rows


def words_of(table: RankTable) -> str:
    """The table in one line."""
    about = table.about
    ranks = f"{table.depths} depths, {table.num_ranks} ranks" if table.depths else "look-up chains"
    made = " · ".join(str(about[key]) for key in ("target", "dtype") if about.get(key))
    texts = "one text" if table.num_texts == 1 else f"{table.num_texts} texts"
    parts = (f"{table.num_positions:,} positions of {texts}", ranks, made)
    return " · ".join(part for part in parts if part)


class Examples:
    """Reads steps out of the log's texts."""

    def __init__(self, log: RunLog) -> None:
        self._log = log
        self._pieces: dict[str, tuple[str, ...]] = {}
        self._lock = threading.Lock()

    def known_for(self, table: RankTable) -> bool:
        """Whether the log has the texts that the table was measured on."""
        sources = table.about.get("sources") or ()
        return any(isinstance(name, str) and self._log.get(name) for name in sources[:1])

    def example(self, table: RankTable, row: int, depth: int) -> dict[str, Any] | None:
        """The step at a row in words: text up to its root, and the tokens down to a depth.

        None where the log has no such text, or the step goes beyond what was written down.
        """
        text, at = table.locate(row)
        sources = table.about.get("sources") or ()
        run_id = sources[text] if text < len(sources) else None
        pieces = self._of(run_id) if isinstance(run_id, str) else ()
        if at + depth >= len(pieces):
            return None
        before = "".join(pieces[max(0, at - BEFORE) : at + 1])
        return {"before": before, "tokens": list(pieces[at + 1 : at + depth + 1]), "run": run_id}

    def _of(self, run_id: str) -> tuple[str, ...]:
        """Every output token of a run as text."""
        with self._lock:
            if run_id not in self._pieces:
                if len(self._pieces) >= MOST_TEXTS:
                    self._pieces.clear()
                detail = self._log.get(run_id)
                pieces = [] if detail is None else [detail.first_text]
                for step in () if detail is None else self._log.steps(run_id):
                    pieces += step.committed_texts
                self._pieces[run_id] = tuple(pieces)
            return self._pieces[run_id]
