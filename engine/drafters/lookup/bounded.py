"""A least-recently-used table of limited bytes.

Tables that a drafter fills from texts grow with every text, and some of them outlive the run.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

POOL_BYTES = 64 << 20
"""The most memory of a drafter's table."""
ENTRY_BYTES = 400
"""Memory of an entry beside its tokens."""
TUPLE_BYTES, TOKEN_BYTES = 300, 40
"""Memory of a tuple of tokens in a dictionary, and of every token in it."""

Key = TypeVar("Key")
Value = TypeVar("Value")


def tokens_bytes(tokens: tuple[int, ...]) -> int:
    return TUPLE_BYTES + TOKEN_BYTES * len(tokens)


class BoundedTable(Generic[Key, Value]):
    """A dictionary with the memory of every entry; the newest entry always stays."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._values: OrderedDict[Key, Value] = OrderedDict()
        self._sizes: dict[Key, int] = {}

    def get(self, key: Key) -> Value | None:
        """The entry, which counts as used."""
        if key not in self._values:
            return None
        self._values.move_to_end(key)
        return self._values[key]

    def put(self, key: Key, value: Value, num_bytes: int) -> None:
        """Add or replace an entry."""
        self._values[key] = value
        self.resize(key, num_bytes - self._sizes.get(key, 0))

    def resize(self, key: Key, num_bytes: int) -> None:
        """Add to an entry's memory, and drop the oldest entries beyond the limit."""
        self._values.move_to_end(key)
        self._sizes[key] = self._sizes.get(key, 0) + num_bytes
        self.num_bytes += num_bytes
        while self.num_bytes > POOL_BYTES and len(self._values) > 1:
            oldest, _ = self._values.popitem(last=False)
            self.num_bytes -= self._sizes.pop(oldest)

    def clear(self) -> None:
        self._values.clear()
        self._sizes.clear()
        self.num_bytes = 0
