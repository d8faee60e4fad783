"""Texts written on a device, and what each of their steps did there."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.nn.functional import grouped_mm

from engine.config import Limits, Sampling
from engine.decode import decode
from engine.drafters.base import Drafter
from engine.model.target import Target
from engine.steps import End, Step
from tests.engine.device import pretend
from tests.engine.device.pretend import Log

PROMPT = (7, 8, 9, 7, 8, 9, 7, 8)


@dataclass(frozen=True)
class Run:
    output: tuple[int, ...]
    logs: list[Log]
    """Of every step."""
    num_accepted: int

    @property
    def tensors(self) -> list[int]:
        return [log.num_tensors for log in self.logs]


@contextmanager
def logged(device: torch.device) -> Iterator[Log]:
    """What happens inside: on CUDA only what the host waits for, as torch tells it."""
    if device.type != "cuda":
        with pretend.logged() as log:
            yield log
        return
    log = Log()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield log
        finally:
            torch.cuda.set_sync_debug_mode("default")
    # torch multiplies grouped matrices of float32 in a loop on the host, of bfloat16 in a kernel.
    lines, first = inspect.getsourcelines(grouped_mm)
    exempt = {(inspect.getsourcefile(grouped_mm), first + i) for i in range(len(lines))}
    log.waits += [
        f"{w.filename}:{w.lineno}"
        for w in caught
        if "synchroniz" in str(w.message) and (w.filename, w.lineno) not in exempt
    ]


def run(
    target: Target,
    drafter: Drafter,
    sampling: Sampling | None = None,
    *,
    prompt: Sequence[int] = PROMPT,
    tokens: int = 12,
    prefix_caching: bool = False,
) -> Run:
    """One text, its end ignored unless a grammar ends it."""
    sampling = sampling or Sampling()
    limits = Limits(max_new_tokens=tokens, ignore_eos=not sampling.constrained)
    records = decode(
        target, drafter, prompt, sampling=sampling, limits=limits, prefix_caching=prefix_caching
    )
    logs, accepted = list[Log](), 0
    while True:
        with logged(target.device) as log:
            record = next(records)
        if isinstance(record, Step):
            logs.append(log)
            accepted += record.num_accepted
        if isinstance(record, End):
            # What comes after the end keeps the prefix.
            assert next(records, None) is None
            return Run(record.output_ids, logs, accepted)


def assert_waits(logs: Sequence[Log], first: int = 1, later: int = 1) -> None:
    """No step waits more often than this; names the lines that did."""
    for number, log in enumerate(logs):
        most = later if number else max(first, later)
        assert len(log.waits) <= most, f"step {number}: {log.waits}"
