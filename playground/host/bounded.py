"""A cache with a limit in bytes, for values that are read from the log repeatedly."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class BoundedCache(Generic[Key, Value]):
    """Drops the least recently used values; a single one may exceed the limit.

    Any thread may use it; one thread at a time computes a value.

    Args:
        size_of: approximate bytes of a value.
    """

    def __init__(self, max_bytes: int, size_of: Callable[[Value], int]) -> None:
        self._max_bytes, self._size_of = max_bytes, size_of
        self._lock, self._computing = threading.Lock(), threading.Lock()
        self._values: OrderedDict[Key, tuple[Value, int]] = OrderedDict()

    def get(self, key: Key) -> Value | None:
        with self._lock:
            if key not in self._values:
                return None
            self._values.move_to_end(key)
            return self._values[key][0]

    def put(self, key: Key, value: Value) -> None:
        size = self._size_of(value)
        with self._lock:
            self._values[key] = value, size
            self._values.move_to_end(key)
            total = sum(size for _, size in self._values.values())
            while total > self._max_bytes and len(self._values) > 1:
                total -= self._values.popitem(last=False)[1][1]

    def get_or_compute(
        self,
        key: Key,
        compute: Callable[[Value | None], Value],
        *,
        is_stale: Callable[[Value], bool] = lambda value: False,
    ) -> Value:
        """The cached value; computed from the old one (or None) where it is missing or stale."""
        value = self.get(key)
        if value is None or is_stale(value):
            with self._computing:
                value = self.get(key)
                if value is None or is_stale(value):
                    value = compute(value)
                    self.put(key, value)
        return value
