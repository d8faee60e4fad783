"""A model over several devices: its layers in order, each whole on one of them, by accelerate.

    balanced                   all CUDA devices, about as much on each
    cuda:0,cuda:1=20GiB,cpu    these in this order, each up to its limit or what is free
    cpu=2GiB,disk              the rest is read from disk in every forward

One device works while the others wait: a model that fits on one is faster there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from engine.errors import ConfigError, OutOfMemoryError

if TYPE_CHECKING:  # seconds of importing, which the page's start does without
    from transformers import PreTrainedModel

BALANCED, DISK = "balanced", "disk"
UNITS = {"MiB": 2**20, "GiB": 2**30}
_PART = re.compile(r"(cpu|disk|cuda:\d+)(?:=(\d+(?:\.\d+)?)(MiB|GiB))?")


@dataclass(frozen=True, slots=True)
class Share:
    """What of a model's weights is to lie on a device, and the room there; bytes.

    Attributes:
        room: its limit, or what is free; None where neither is known.
    """

    device: str
    num_bytes: int
    room: int | None

    @property
    def text(self) -> str:
        room = "" if self.room is None else f" of {self.room / 2**30:.1f}"
        return f"{self.device} {self.num_bytes / 2**30:.1f}{room} GiB"


@dataclass(frozen=True, slots=True)
class Placement:
    """Where every module of a model goes; `shares` in the order of the devices."""

    device_map: Mapping[str, int | str]
    shares: tuple[Share, ...]


def is_placement(device: str) -> bool:
    """Whether a device setting names several."""
    return device == BALANCED or "," in device or "=" in device


def first_of(device: str) -> str:
    """The device of a setting where token ids go in."""
    first = re.split("[,=]", device)[0].strip()
    return "auto" if first == BALANCED else first


def placed(
    model: PreTrainedModel, device: str, dtype: torch.dtype, free: Mapping[str, int]
) -> Placement:
    """Place a model; nothing is loaded.

    Args:
        model: on the `meta` device, its weights tied.
        free: bytes of the devices that are here.

    Raises:
        ConfigError: a device is not here, or the text is none of the forms above.
        OutOfMemoryError: they have no room for its weights, naming each.
    """
    from accelerate.utils import (
        compute_module_sizes,
        get_balanced_memory,
        infer_auto_device_map,
    )

    rooms = _rooms(device, free)
    whole = list(model._no_split_modules or [])
    own = {_key(name): 1 << 62 if room is None else room for name, room in rooms.items()}
    if device == BALANCED:
        own = get_balanced_memory(model, own, whole, dtype)
    max_memory = {**own, DISK: 1 << 62}
    device_map: dict[str, int | str] = infer_auto_device_map(
        model, max_memory, no_split_module_classes=whole, dtype=dtype
    )
    sizes = compute_module_sizes(model, dtype=dtype)
    num_bytes = dict.fromkeys((_key(name) for name in rooms), 0)
    for module, where in device_map.items():
        num_bytes[where] = num_bytes.get(where, 0) + sizes[module]
    shares = tuple(Share(name, num_bytes[_key(name)], room) for name, room in rooms.items())
    if DISK in device_map.values() and DISK not in rooms:
        over = f"{num_bytes[DISK] / 2**30:.1f} GiB too much"
        raise OutOfMemoryError(
            f"Its weights do not fit: {', '.join(s.text for s in shares)}, and {over}. Add a "
            "device, such as cpu or disk, or choose a smaller dtype."
        )
    return Placement(device_map, shares)


def _key(name: str) -> int | str:
    """A device as accelerate has it: CUDA devices by number."""
    return int(name.removeprefix("cuda:")) if name.startswith("cuda:") else name


def _rooms(device: str, free: Mapping[str, int]) -> dict[str, int | None]:
    """Devices in order, and how much of each may be used."""
    cards = [name for name in free if name.startswith("cuda:")]
    if device == BALANCED:
        if len(cards) < 2:
            raise ConfigError(
                f"device balanced needs two CUDA devices or more, and torch sees {len(cards)}. "
                "Use auto, or name devices: cuda:0=20GiB,cpu."
            )
        return {name: free[name] for name in cards}
    rooms: dict[str, int | None] = {}
    for part in device.split(","):
        match = _PART.fullmatch(part.strip())
        if match is None or (name := match[1]) in rooms:
            raise ConfigError(
                "device must be like cuda:0,cuda:1=20GiB,cpu, each device once, got "
                f"{device!r:.80}."
            )
        if name != DISK and name not in free:
            raise ConfigError(f"device names {name}, but there are {', '.join(free)} only.")
        limit = None if match[2] is None else int(float(match[2]) * UNITS[match[3]])
        own = free.get(name)
        rooms[name] = min((room for room in (limit, own) if room is not None), default=None)
    if next(iter(rooms)) == DISK:
        raise ConfigError(
            f"device must begin with one that computes, not disk, got {device!r:.80}."
        )
    return rooms


def all_free_bytes() -> dict[str, int]:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    free_by_device = {f"cuda:{i}": free_bytes(torch.device("cuda", i)) for i in range(count)}
    free_by_device["cpu"] = free_bytes(torch.device("cpu"))
    return {name: 1 << 62 if free is None else free for name, free in free_by_device.items()}


def free_bytes(device: torch.device) -> int | None:
    """Free memory of a device; None where it cannot be told."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        return None
    return None
