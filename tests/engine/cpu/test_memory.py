"""Memory of packed matrices: zero, apart, in huge pages, and freed with them."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from engine.kernels.cpu.operators import CHUNK, HUGE_PAGE, LINE, aligned_zeros

STATM = Path("/proc/self/statm")


def test_pieces_are_zero_and_apart() -> None:
    pieces = [aligned_zeros(size) for size in (1, 100, LINE, CHUNK // 2, CHUNK // 2 + 1, 0, 7)]
    assert all(piece.dtype == torch.uint8 and not piece.any() for piece in pieces)
    for number, piece in enumerate(pieces, start=1):
        piece.fill_(number)
    assert all(bool((piece == number).all()) for number, piece in enumerate(pieces, start=1))
    assert all(piece.data_ptr() % LINE == 0 for piece in pieces)


def test_a_large_piece_begins_with_a_huge_page() -> None:
    assert aligned_zeros(CHUNK).data_ptr() % HUGE_PAGE == 0


@pytest.mark.skipif(not STATM.is_file(), reason="no /proc here")
def test_memory_is_given_back() -> None:
    def resident() -> int:
        return int(STATM.read_text().split()[1]) * mmap.PAGESIZE

    piece = aligned_zeros(2 * CHUNK).fill_(1)
    held = resident()
    del piece
    assert resident() < held - CHUNK
