"""From the values in a file's tensors to those of a model's parameters.

A rule takes the model's config and the arrays of a parameter's tensors, in torch's order of
dimensions. One that only moves rows also moves the rows of quantized tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class ValueRule:
    """A conversion of values.

    Attributes:
        convert: (config, arrays) → the parameter's values.
        moves_rows: whether it only moves or joins rows.
    """

    convert: Callable[..., Array]
    moves_rows: bool = False


def head_size(config: Any) -> int:
    """Rows of a head's query."""
    return int(getattr(config, "head_dim", 0) or config.hidden_size // config.num_attention_heads)


def _separate_halves(config: Any, rows: Array) -> Array:
    """A head's rows 0, 2, 4, … before its rows 1, 3, 5, …: the file has them by pairs."""
    pairs = rows.reshape(-1, head_size(config) // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _by_head(config: Any, rows: Array) -> Array:
    """All queries, all keys, all values → query, key and value of each head."""
    parts = rows.reshape(3, config.num_attention_heads, -1, *rows.shape[1:])
    return parts.swapaxes(0, 1).reshape(rows.shape)


def _by_key_group(config: Any, rows: Array) -> Array:
    """All queries, all keys, all values → the queries, the key and the value of each key head."""
    groups, heads = config.num_kv_heads, config.num_attention_heads
    parts = np.split(rows.reshape(heads + 2 * groups, -1, *rows.shape[1:]), (heads, heads + groups))
    grouped = [part.reshape(groups, -1, *part.shape[1:]) for part in parts]
    return np.concatenate(grouped, axis=1).reshape(rows.shape)


def _interleave_last(config: Any, gate: Array, up: Array) -> Array:
    """Experts' `(experts, out, in)` → `(experts, in, 2 * out)`, or biases without `in`."""
    joined = np.stack([gate, up], axis=2).reshape(len(gate), -1, *gate.shape[2:])
    return joined.swapaxes(1, -1) if gate.ndim == 3 else joined


def _latent_keys_values(config: Any, keys: Array, values: Array) -> Array:
    """Keys `(heads, rank, size)` and values `(heads, size, rank)` → rows per head."""
    return np.concatenate([keys.swapaxes(1, 2), values], axis=1).reshape(-1, keys.shape[1])


def _grouped(config: Any, rows: Array, *, size: int | None = None, first: int = 0) -> Array:
    """Value heads in the order of their key heads; a file repeats all key heads in turn.

    Args:
        size: rows per head; None = a value head's.
        first: rows before them.
    """
    count, keys = config.linear_num_value_heads, config.linear_num_key_heads
    heads = rows[first:].reshape(count // keys, keys, size or config.linear_value_head_dim, -1)
    values = heads.swapaxes(0, 1).reshape(rows[first:].shape)
    return np.concatenate([rows[:first], values])


def _grouped_behind_keys(config: Any, rows: Array) -> Array:
    """Queries, keys, then value heads as in `_grouped`."""
    first = 2 * config.linear_num_key_heads * config.linear_key_head_dim
    return _grouped(config, rows, first=first)


def _by_key_head(config: Any, joined: Array, gate: Array) -> Array:
    """All queries, keys, values and gates → those of each key head."""
    heads, size = config.linear_num_key_heads, config.linear_key_head_dim
    parts = (*np.split(joined, (heads * size, 2 * heads * size)), gate)
    per_head = [part.reshape(heads, -1, *part.shape[1:]) for part in parts]
    return np.concatenate(per_head, axis=1).reshape(-1, *joined.shape[1:])


def rows_between(begin: int, end: int) -> ValueRule:
    """Some rows of a tensor that joins several parameters."""
    return ValueRule(lambda config, rows: rows[begin:end], moves_rows=True)


def then(first: ValueRule, second: ValueRule | None) -> ValueRule:
    """One rule after another."""
    if second is None:
        return first
    return ValueRule(
        lambda config, *arrays: second.convert(config, first.convert(config, *arrays)),
        first.moves_rows and second.moves_rows,
    )


INTERLEAVED = ValueRule(_separate_halves, moves_rows=True)
BY_HEAD = ValueRule(_by_head, moves_rows=True)
BY_KEY_GROUP = ValueRule(_by_key_group, moves_rows=True)
JOINED_ROWS = ValueRule(lambda config, *rows: np.concatenate(rows), moves_rows=True)
JOINED_EXPERTS = ValueRule(lambda config, *stacks: np.concatenate(stacks, axis=1))
INTERLEAVED_EXPERTS = ValueRule(_interleave_last)
SWAPPED = ValueRule(lambda config, x: x.swapaxes(-1, -2) if x.ndim > 1 else x)
MINUS_ONE = ValueRule(lambda config, values: values - 1)
LOG_OF_NEGATIVE = ValueRule(lambda config, values: np.log(-values))
FLAT = ValueRule(lambda config, values: values.reshape(-1))
GROUPED = ValueRule(_grouped, moves_rows=True)
GROUPED_SINGLE = ValueRule(partial(_grouped, size=1), moves_rows=True)
GROUPED_COLUMNS = ValueRule(lambda config, values: _grouped(config, values.T).T)
GROUPED_BEHIND_KEYS = ValueRule(_grouped_behind_keys, moves_rows=True)
BY_KEY_HEAD = ValueRule(_by_key_head, moves_rows=True)
LATENT = ValueRule(_latent_keys_values)
