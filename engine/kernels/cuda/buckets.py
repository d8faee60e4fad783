"""Sizes that are recorded: a forward runs in the smallest one that holds it."""

from __future__ import annotations

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Rows of a recorded forward; larger ones are no verify forwards, or compute-bound anyway."""
SMALLEST_CONTEXT = 256
PIECE = 128
"""Every context is a multiple of this many rows."""


def row_bucket(rows: int) -> int | None:
    """The smallest bucket for this many rows; None if there is none.

    Example: 5 → 6, 60 → 64, 200 → None.
    """
    return next((bucket for bucket in ROWS if bucket >= rows), None)


def context_bucket(rows: int) -> int:
    """The smallest bucket for this many rows of context, new ones included.

    Powers of two and the halves between them: 256, 384, 512, 768, 1024, 1536, …

    Example: 300 → 384, 400 → 512.
    """
    bucket = SMALLEST_CONTEXT
    while bucket < rows:
        bucket *= 2
    between = bucket * 3 // 4
    return between if bucket > SMALLEST_CONTEXT and between >= rows else bucket


def num_pieces(context: int, most: int = 16) -> int:
    """Into how many pieces the attention over a context is split, see `attention.py`.

    Example: 256 → 2, 768 → 6, 4096 → 16.
    """
    pieces = context // PIECE
    while pieces > most or context % (pieces * 8):
        pieces -= 1
    return pieces
