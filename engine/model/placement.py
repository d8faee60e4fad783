"""Places a model's layers, in order and undivided, on several devices by accelerate.

    balanced                   all CUDA devices, about the same on each
    cuda:0,cuda:1=20GiB,cpu    these in this order, each up to its limit or its free memory
    cpu=2GiB,disk              the remaining layers are read from disk in every forward

One device computes while the others wait: a model that fits on one is faster there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

import psutil
import torch
import transformers
from torch import nn

from engine.errors import ConfigError, OutOfMemoryError

BALANCED, DISK = "balanced", "disk"
UNITS = {"MiB": 2**20, "GiB": 2**30}
_PART = re.compile(r"(cpu|disk|cuda:\d+)(?:=(\d+(?:\.\d+)?)(MiB|GiB))?")


@dataclass(frozen=True, slots=True)
class Placement:
    """accelerate's device map of a model's modules.

    Attributes:
        shares: per device in order, its share of the weights and its limit or free memory, if
            known: `cuda:0 1.2 of 3.0 GiB`.
    """

    device_map: Mapping[str, int | str]
    shares: tuple[str, ...]


def is_placement(device: str) -> bool:
    """Whether a device setting names several."""
    return device == BALANCED or "," in device or "=" in device


def first_device(device: str) -> str:
    """The first device of a setting, which takes the token ids."""
    first = re.split("[,=]", device)[0].strip()
    return "auto" if first == BALANCED else first


def place_layers(
    model: transformers.PreTrainedModel, device: str, dtype: torch.dtype, free: Mapping[str, int]
) -> Placement:
    """Assign a model's modules to devices; nothing is loaded.

    Args:
        model: on the `meta` device, its weights tied.
        free: free bytes of the available devices.

    Raises:
        ConfigError: a device is not available, or the setting has none of the forms above.
        OutOfMemoryError: the weights do not fit; names each device's share.
    """
    from accelerate.utils import (
        compute_module_sizes,
        get_balanced_memory,
        infer_auto_device_map,
    )

    limits = _limits(device, free)
    no_split = list(model._no_split_modules or [])
    memory = {_key(name): 1 << 62 if limit is None else limit for name, limit in limits.items()}
    if device == BALANCED:
        memory = get_balanced_memory(model, memory, no_split, dtype)
    max_memory = {**memory, DISK: 1 << 62}
    device_map: dict[str, int | str] = infer_auto_device_map(
        model, max_memory, no_split_module_classes=no_split, dtype=dtype
    )
    sizes = compute_module_sizes(model, dtype=dtype)
    num_bytes = dict.fromkeys((_key(name) for name in limits), 0)
    for module, where in device_map.items():
        num_bytes[where] = num_bytes.get(where, 0) + sizes[module]
    shares = tuple(_share(name, num_bytes[_key(name)], limits[name]) for name in limits)
    if DISK in device_map.values() and DISK not in limits:
        excess = f"{num_bytes[DISK] / 2**30:.1f} GiB too much"
        raise OutOfMemoryError(
            f"Its weights do not fit: {', '.join(shares)}, and {excess}. Add a "
            "device, such as cpu or disk, or choose a smaller dtype."
        )
    return Placement(device_map, shares)


def in_memory(module: nn.Module) -> AbstractContextManager[None]:
    """A context in which a module's own weights are in memory, wherever they were placed."""
    from accelerate.utils.modeling import align_module_device

    context: AbstractContextManager[None] = align_module_device(module)
    return context


def _share(device: str, num_bytes: int, limit_bytes: int | None) -> str:
    limit = "" if limit_bytes is None else f" of {limit_bytes / UNITS['GiB']:.1f}"
    return f"{device} {num_bytes / UNITS['GiB']:.1f}{limit} GiB"


def _key(name: str) -> int | str:
    """A device as accelerate names it: CUDA devices by index."""
    return int(name.removeprefix("cuda:")) if name.startswith("cuda:") else name


def _limits(device: str, free: Mapping[str, int]) -> dict[str, int | None]:
    """Bytes that may be used per device, in order; None = unlimited."""
    cards = [name for name in free if name.startswith("cuda:")]
    if device == BALANCED:
        if len(cards) < 2:
            raise ConfigError(
                f"device balanced needs two CUDA devices or more, and torch sees {len(cards)}. "
                "Use auto, or name devices: cuda:0=20GiB,cpu."
            )
        return {name: free[name] for name in cards}
    limits: dict[str, int | None] = {}
    for part in device.split(","):
        match = _PART.fullmatch(part.strip())
        if match is None or (name := match[1]) in limits:
            raise ConfigError(
                "device must be like cuda:0,cuda:1=20GiB,cpu, each device once, got "
                f"{device!r:.80}."
            )
        if name != DISK and name not in free:
            raise ConfigError(f"device names {name}, but there are {', '.join(free)} only.")
        limit = None if match[2] is None else int(float(match[2]) * UNITS[match[3]])
        sizes = (size for size in (limit, free.get(name)) if size is not None)
        limits[name] = min(sizes, default=None)
    if next(iter(limits)) == DISK:
        raise ConfigError(
            f"device must begin with one that computes, not disk, got {device!r:.80}."
        )
    return limits


def all_free_bytes() -> dict[str, int]:
    """Free bytes of every CUDA device and of the CPU, by name."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = [*(f"cuda:{i}" for i in range(count)), "cpu"]
    return {name: free_bytes(torch.device(name)) for name in names}


def free_bytes(device: torch.device) -> int:
    """Free bytes of a device; of one that is not CUDA's, those of the machine."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return int(psutil.virtual_memory().available)
