"""Memory for packed matrices, in pages of 2 MiB where the system has them.

A plain step reads all weights once. In pages of 4 KiB every 64th line of them waits for the page
table, also where it was to be fetched ahead of its use.
"""

from __future__ import annotations

import mmap
import threading
from contextlib import suppress

import torch
from torch import Tensor

HUGE_PAGE = 2 << 20
CHUNK = 32 * HUGE_PAGE
"""Matrices of up to half of it share one; it is freed with the last of them."""
LINE = 64

_lock = threading.Lock()
_left = torch.empty(0, dtype=torch.uint8)


def zeros(num_bytes: int) -> Tensor:
    """`(num_bytes,)` uint8, which begins with a line of the cache."""
    global _left
    size = -(-num_bytes // LINE) * LINE
    if size > CHUNK // 2:
        return _mapped(size)[:num_bytes]
    with _lock:
        if size > len(_left):
            _left = _mapped(CHUNK)
        room, _left = _left[:num_bytes], _left[size:]
    return room


def _mapped(size: int) -> Tensor:
    """Zeros that begin with a huge page."""
    memory = mmap.mmap(-1, size + HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    begin = -whole.data_ptr() % HUGE_PAGE
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # this kernel has none
            memory.madvise(mmap.MADV_HUGEPAGE)
    return whole[begin : begin + size]
