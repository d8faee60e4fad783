"""Keeps freed memory in the process: a training step allocates the same large arrays again.

glibc gives every block above a few hundred KiB back to the system at once, and the next step pays
for fresh pages: more than for computing what goes into them.
"""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LARGEST_BLOCK = 32 << 20
"""As much as glibc allows."""
_KEPT = (1 << 31) - 1


def keep_freed_memory() -> bool:
    """From now on and for the whole process; False where the C library is not glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _LARGEST_BLOCK) and mallopt(_TRIM_THRESHOLD, _KEPT))
