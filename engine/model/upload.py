"""Small tensors to the device without waiting for it."""

from __future__ import annotations

from torch import Tensor, device


def upload(values: Tensor, where: device) -> Tensor:
    """A copy on the device; an ordinary copy from the host would wait until all before it is done.

    Args:
        values: on the host; not to be changed afterwards.
    """
    if where.type != "cuda":
        return values.to(where)
    return values.pin_memory().to(where, non_blocking=True)
