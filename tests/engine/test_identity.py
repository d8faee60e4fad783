"""What holds tensors is compared by identity: `==` of two tensors is a tensor, with no truth."""

from __future__ import annotations

import importlib
import pkgutil
import sys
import typing
from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Any

import numpy as np
import pytest
import torch

import engine

BULK = (torch.Tensor, np.ndarray)


def dataclasses_of_engine() -> Iterator[type]:
    for info in pkgutil.walk_packages(engine.__path__, "engine."):
        module = importlib.import_module(info.name)
        for value in vars(module).values():
            if isinstance(value, type) and value.__module__ == info.name and is_dataclass(value):
                yield value


def holds_bulk(hint: Any, seen: frozenset[type] = frozenset()) -> bool:
    """Whether a value of this type is a tensor or an array, or a dataclass that has one within."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is not None:
        return origin is np.ndarray or any(holds_bulk(each, seen) for each in arguments)
    if not isinstance(hint, type) or hint in seen:
        return False
    if is_dataclass(hint):
        return any(holds_bulk(each, seen | {hint}) for each in hints_of(hint).values())
    return issubclass(hint, BULK)


def hints_of(kind: Any) -> dict[str, Any]:
    names = {**vars(importlib.import_module("transformers")), **vars(sys.modules[kind.__module__])}
    hints = typing.get_type_hints(kind, names)
    return {name: hints[name] for name in kind.__dataclass_fields__}


HOLDERS = [kind for kind in dataclasses_of_engine() if holds_bulk(kind)]


@pytest.mark.parametrize("kind", HOLDERS, ids=lambda kind: kind.__qualname__)
def test_a_dataclass_that_holds_tensors_is_compared_by_identity(kind: Any) -> None:
    assert kind.__eq__ is object.__eq__ and kind.__hash__ is object.__hash__


def test_the_walk_sees_tensors_of_every_depth() -> None:
    names = {kind.__qualname__ for kind in HOLDERS}
    assert {"Features", "_Text", "TargetOutput", "Outcome", "RankTable"} <= names
