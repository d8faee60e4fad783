"""A cache with a limit in bytes, for values that are read from the log repeatedly."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class BoundedCache(Generic[Value]):
    """Drops the values that were computed first; a single one may exceed the limit.

    Any thread may use it; one thread at a time computes a value.

    Args:
        size_of: approximate bytes of a value.
    """

    def __init__(self, max_bytes: int, size_of: Callable[[Value], int]) -> None:
        self._max_bytes, self._size_of = max_bytes, size_of
        self._computing = threading.Lock()
        self._values: dict[str, Value] = {}

    def get_or_compute(
        self,
        key: str,
        compute: Callable[[Value | None], Value],
        *,
        is_stale: Callable[[Value], bool] = lambda value: False,
    ) -> Value:
        """The cached value; computed from the old one (or None) where it is missing or stale."""
        value = self._values.get(key)
        if value is None or is_stale(value):
            with self._computing:
                value = self._values.get(key)
                if value is None or is_stale(value):
                    value = compute(value)
                    self._values.pop(key, None)
                    self._values[key] = value
                    self._drop_oldest()
        return value

    def _drop_oldest(self) -> None:
        total = sum(map(self._size_of, self._values.values()))
        while total > self._max_bytes and len(self._values) > 1:
            total -= self._size_of(self._values.pop(next(iter(self._values))))
