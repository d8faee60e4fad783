"""The likeliest tokens of rows of logits: by the compiled kernels where there are any."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.cpu.compile import loaded_library

MOST = 64
"""More than so many are sorted faster by torch."""


@dataclass(frozen=True, slots=True)
class Ranked:
    """The best k of each row, best first.

    Attributes:
        logits: `(n, k)` float32.
        ids: `(n, k)` int64.
        log_totals: `(n, 1)` float32, logsumexp of all of the row's logits; None if not asked for.
    """

    logits: Tensor
    ids: Tensor
    log_totals: Tensor | None

    @property
    def log_probs(self) -> Tensor:
        """`(n, k)` natural log-probabilities."""
        assert self.log_totals is not None
        return self.logits - self.log_totals


def likeliest(logits: Tensor, k: int, *, totals: bool = True) -> Ranked:
    """The k likeliest tokens of each row of `logits` `(n, vocab)`.

    Args:
        totals: whether `log_totals` are wanted.
    """
    kernels = loaded_library()
    logits = logits.float()
    fits = logits.device.type == "cpu" and logits.stride(-1) == 1
    if kernels is None or not fits or not 0 < k <= min(MOST, logits.shape[-1]):
        best, ids = logits.topk(k, dim=-1)
        return Ranked(best, ids, logits.logsumexp(dim=-1, keepdim=True) if totals else None)
    n, vocab = logits.shape
    best, log_totals = torch.empty(n, k), torch.empty(n, 1) if totals else None
    ids = torch.empty(n, k, dtype=torch.int64)
    kernels.likeliest(
        ctypes.c_void_p(logits.data_ptr()),
        ctypes.c_int64(logits.stride(0)),
        n,
        vocab,
        k,
        ctypes.c_void_p(best.data_ptr()),
        ctypes.c_void_p(ids.data_ptr()),
        None if log_totals is None else ctypes.c_void_p(log_totals.data_ptr()),
        torch.get_num_threads(),
    )
    return Ranked(best, ids, log_totals)
