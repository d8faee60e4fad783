"""How long a verify forward over n rows takes on this machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

from engine.errors import ConfigError
from engine.model.cache import TreeCache
from engine.model.target import Target
from engine.proposal import Needs, Proposal
from engine.tree import TreeShape
from engine.tuning.watch import UNWATCHED, Watch

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 112, 128)
BUCKETS = (256, 1024, 4096, 16384, 65536)
"""Context lengths that are told apart: a step's time grows with the rows in the cache."""


@dataclass(frozen=True, slots=True)
class LatencyCurve:
    """Median milliseconds of a verify forward at a few row counts; linear in between.

    Attributes:
        rows: ascending row counts, root included.
        verify_ms: one per row count.
        context_len: committed rows in the cache while measuring.
    """

    rows: tuple[int, ...]
    verify_ms: tuple[float, ...]
    context_len: int

    def at(self, n: int) -> float:
        """Milliseconds for n rows; beyond the last point its slope goes on."""
        return interpolate(self.rows, self.verify_ms, n)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return {
            "rows": list(self.rows),
            "verify_ms": list(self.verify_ms),
            "context_len": self.context_len,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """What `to_dict` made.

        Raises:
            ConfigError: it is no curve.
        """
        rows, ms = points(values, "verify_ms")
        try:
            return cls(rows, ms, int(values["context_len"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"A latency curve must have a context_len, got {values}.") from error


def points(values: Mapping[str, Any], name: str) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Ascending `rows` and as many milliseconds under `name`, from plain data.

    Raises:
        ConfigError: they are not there, or of different lengths.
    """
    try:
        rows = tuple(int(n) for n in values["rows"])
        ms = tuple(float(value) for value in values[name])
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"A latency curve must have rows and {name}, got {values}.") from error
    if not rows or len(rows) != len(ms) or list(rows) != sorted(set(rows)) or rows[0] < 0:
        raise ConfigError(f"A latency curve must have ascending rows and a {name} each: {values}.")
    return rows, ms


def interpolate(rows: Sequence[int], ms: Sequence[float], n: float) -> float:
    """Linear between points; before the first its value, beyond the last its slope goes on."""
    if n <= rows[0] or len(rows) == 1:
        return ms[0]
    right = next((i for i, r in enumerate(rows) if r >= n), len(rows) - 1)
    left = right - 1
    slope = (ms[right] - ms[left]) / (rows[right] - rows[left])
    return ms[left] + slope * (n - rows[left])


def bucket_of(context_len: int) -> int:
    """The bucket whose curve serves a context of this length: the nearest on a log scale.

    Example: 300 → 256, 700 → 1024.
    """
    return min(BUCKETS, key=lambda bucket: max(bucket / context_len, context_len / bucket))


def measure_curve(
    target: Target,
    *,
    rows: tuple[int, ...] = ROWS,
    context_len: int = 256,
    repeats: int = 5,
    watch: Watch = UNWATCHED,
) -> LatencyCurve:
    """Measure the curve; sizes take turns within each repeat, so drift hits all alike.

    Raises:
        StoppedError: somebody stopped it.
    """
    context_len = max(1, min(context_len, target.context_len - max(rows) - 1))
    cache = target.new_cache(context_len + max(rows))
    seconds: dict[int, list[float]] = {n: [] for n in rows}
    try:
        tokens = torch.arange(context_len) % target.vocab_size
        target.prefill(tokens.tolist(), cache, Needs())
        for repeat in range(repeats + 1):
            for i, n in enumerate(rows):
                watch.at(repeat * len(rows) + i, (repeats + 1) * len(rows))
                taken = _time_verify(target, cache, n)
                if repeat:
                    seconds[n].append(taken)
    finally:
        cache.free()
    medians = tuple(1000 * statistics.median(seconds[n]) for n in rows)
    return LatencyCurve(rows, medians, context_len)


def _time_verify(target: Target, cache: TreeCache, n: int) -> float:
    proposal = Proposal(
        torch.arange(n, device=target.device) % target.vocab_size, TreeShape.chain(n - 1)
    )
    synchronise(target.device)
    began = time.perf_counter()
    target.verify(proposal, cache, Needs()).logits.argmax(dim=-1).tolist()
    return time.perf_counter() - began


def synchronise(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
