"""A model divided among devices, a part of every matrix on each, by transformers' `tp_plan`.

    device tensor=2    a process each, and a CUDA device each; without CUDA, two on the processor

    this process      Target ─► TensorParallelForward ─► its part ─┐ all-reduce in every layer
                                  │ a pipe: rows, what becomes of a cache
    process 1 … n-1               └─────────────────────► its part ─┘

All devices work on every row, unlike `placement`, where one works while the others wait. Embedding
and output matrix lie whole on each: drafters read them, in this process alone. (Shoeybi et al.,
Megatron-LM, arXiv:1909.08053, section 3.)
"""

from __future__ import annotations

import datetime
import itertools
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers
from torch import Tensor, distributed
from transformers.distributed.configuration_utils import DistributedConfig

from engine.errors import ConfigError, OutOfMemoryError, TargetError, first_line
from engine.model.cache import CacheCopy, TreeCache
from engine.model.forward import Forward, ModulesForward, Rows
from engine.model.kinds import attending_layers, attends, is_recurrent
from engine.model.placement import TENSOR, Share
from engine.proposal import Needs, TargetOutput

if TYPE_CHECKING:  # seconds of importing, which the page's start does without
    from transformers import PreTrainedModel

MOST_DEVICES = 64
MOST_WAIT = datetime.timedelta(minutes=30)
"""Longest that a process waits for another: one may read its weights long after the other."""
_DEVICE = re.compile(rf"{TENSOR}=(\d{{1,3}})")
WHOLE = "replicate"
Reader = Callable[[DistributedConfig], "PreTrainedModel"]
"""Reads this process's part of a model; importable, for other processes call it."""


def is_tensor_parallel(device: str) -> bool:
    """Whether a device setting divides a model."""
    return device.partition("=")[0].strip() == TENSOR


def devices_of(device: str) -> tuple[torch.device, ...]:
    """The devices of a setting: the first CUDA devices, or the processor as often.

    Raises ConfigError: it is not `tensor=N`, or there are not so many.
    """
    found = _DEVICE.fullmatch(device)
    count = int(found[1]) if found else 0
    if not 2 <= count <= MOST_DEVICES:
        raise ConfigError(
            f"device must be like tensor=2, from 2 to {MOST_DEVICES} devices, got {device!r:.40}."
        )
    if not torch.cuda.is_available():
        return (torch.device("cpu"),) * count
    if (here := torch.cuda.device_count()) < count:
        raise ConfigError(f"device is {device}, but torch sees {here} CUDA devices.")
    return tuple(torch.device("cuda", i) for i in range(count))


@dataclass(frozen=True, slots=True)
class Division:
    """How a model is divided.

    Attributes:
        plan: style by the names of modules and parameters, as transformers' `tp_plan` has it.
        shares: in the order of the devices.
    """

    devices: tuple[torch.device, ...]
    plan: Mapping[str, str]
    shares: tuple[Share, ...]


def divided(config: Any, device: str, dtype: torch.dtype, free: Mapping[str, int]) -> Division:
    """Divide a model; nothing is loaded.

    Args:
        free: bytes of the devices that are here.

    Raises:
        ConfigError: the device setting is not `tensor=N`, or there are not so many devices.
        TargetError: transformers has no plan for the model, or its heads cannot be shared evenly.
        OutOfMemoryError: a device has no room for its part.
    """
    devices, text = devices_of(device), config.get_text_config()
    count = len(devices)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    plan = dict(model.tp_plan or {})
    if not any("layers" in key for key in plan) or is_recurrent(text) or not attends(text):
        raise TargetError(
            f"transformers has no plan for dividing {config.model_type} models among devices with "
            "their caches. Use balanced."
        )
    heads = int(text.num_attention_heads)
    kv_heads = int(getattr(text, "num_key_value_heads", None) or heads)
    if heads % count or kv_heads % count:
        raise TargetError(
            f"The model has {heads} attention heads and {kv_heads} of keys and values, which "
            f"{count} devices cannot share evenly. Choose a number that divides both."
        )
    plan |= dict.fromkeys(_kept_whole(model), WHOLE)
    num_bytes = sum(
        p.numel() * dtype.itemsize // (count if _is_divided(key, plan) else 1)
        for key, p in model.named_parameters()
    )
    shares = tuple(
        Share(str(each), num_bytes, free[str(each)])
        if each.type == "cuda"
        else Share(f"cpu ({i} of {count})", num_bytes, free["cpu"] // count)
        for i, each in enumerate(devices, 1)
    )
    if any(share.room is not None and num_bytes > share.room for share in shares):
        raise OutOfMemoryError(
            f"Its weights do not fit: {', '.join(s.text for s in shares)}. Choose more devices or "
            "a smaller dtype."
        )
    return Division(devices, plan, shares)


def _kept_whole(model: PreTrainedModel) -> list[str]:
    """Names of the embedding and of the output matrix."""
    whole = (model.get_input_embeddings(), model.get_output_embeddings())
    return [name for name, module in model.named_modules() if any(module is w for w in whole)]


def _is_divided(parameter: str, plan: Mapping[str, str]) -> bool:
    """Whether a parameter is: by its own name's rule, or its module's."""
    key = re.sub(r"\.\d+(?=\.|$)", ".*", parameter)
    module, _, kind = key.rpartition(".")
    style = plan.get(key, plan.get(module, ""))
    return "colwise" in style or ("rowwise" in style and kind != "bias")


# ---- the processes


@dataclass(frozen=True, slots=True)
class _Place:
    """Where one of the processes stands; `meeting` is a file over which they find each other."""

    rank: int
    devices: tuple[torch.device, ...]
    meeting: str
    config: DistributedConfig

    def part(self, read: Reader) -> PreTrainedModel:
        """Meet the others and read a part of the model; each waits until all are here."""
        device = self.devices[self.rank]
        on_gpu = device.type == "cuda"
        if on_gpu:
            torch.cuda.set_device(device)
        elif sys.platform == "linux":
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # all are on this machine
        distributed.init_process_group(
            "nccl" if on_gpu else "gloo",
            init_method=Path(self.meeting).as_uri(),
            rank=self.rank,
            world_size=len(self.devices),
            timeout=MOST_WAIT,
            device_id=device if on_gpu else None,
        )
        return read(self.config)


class Group:
    """The other processes, from the side of this one.

    Attributes:
        devices: of all, this process's first.
        fault: why it can do no more; None while it can.
    """

    def __init__(self, division: Division, read: Reader) -> None:
        """Start them; they begin to read their parts.

        Raises TargetError: another divided model is loaded.
        """
        if distributed.is_initialized():
            raise TargetError("Only one model can be divided at a time. Unload the other first.")
        self.devices, self._read = division.devices, read
        self._lock = threading.RLock()
        self.fault: str | None = None
        self._forgotten: list[int] = []
        self._numbers = itertools.count()
        self._folder = tempfile.mkdtemp(prefix="tensor-parallel-")
        self._threads = threads = torch.get_num_threads()
        if self.devices[0].type == "cpu":
            threads = max(1, threads // len(self.devices))
        torch.set_num_threads(threads)
        context = multiprocessing.get_context("spawn")
        config = DistributedConfig(tp_size=len(self.devices), tp_plan=dict(division.plan))
        meeting = str(Path(self._folder) / "meeting")
        places = [_Place(i, self.devices, meeting, config) for i in range(len(self.devices))]
        self._place, *others = places
        self._others: list[tuple[Connection, Any]] = []
        for place in others:
            mine, theirs = context.Pipe()
            about = (place, threads, read, theirs)
            process = context.Process(target=_follow, args=about, daemon=True)
            process.start()
            theirs.close()
            self._others.append((mine, process))

    def part(self) -> PreTrainedModel:
        """This process's part of the model, read while the others read theirs."""
        try:
            for pipe, _ in self._others:
                pipe.recv()  # that it has started: who meets the others waits for all
            return self._place.part(self._read)
        except BaseException as error:
            why = self._last_words()
            self.close()
            if why is None and not isinstance(error, EOFError):
                raise
            why = why or "its process ended"
            raise TargetError(f"A part of the model could not be read: {why}.") from error

    def number(self) -> int:
        """A new name for something that the others keep."""
        return next(self._numbers)

    def forget(self, number: int) -> None:
        """Nothing asks for this again; told with the next order."""
        self._forgotten.append(number)

    def tell(self, name: str, number: int, *about: Any) -> None:
        """Order something of the others.

        Raises TargetError: one of them has ended.
        """
        with self._lock:
            if self.fault is not None:
                raise TargetError(f"{self.fault} Load the target again.")
            forgotten, self._forgotten = self._forgotten, []
            try:
                for pipe, _ in self._others:
                    pipe.send((forgotten, name, number, about))
            except OSError as error:
                raise self._failed(error) from error

    def together(self, act: Callable[[], TargetOutput], number: int, *about: Any) -> TargetOutput:
        """Have all run these rows; `act` is this process's part.

        Raises TargetError: as `tell`. After an error here the others wait for this process within
        a layer, so that the group is of no more use.
        """
        with self._lock:
            self.tell("run", number, *about)
            try:
                return act()
            except BaseException as error:
                raise self._failed(error) from error

    def _failed(self, error: BaseException) -> TargetError:
        why = self._last_words() or first_line(error)
        self.fault = f"A part of the divided model has failed: {why.rstrip('.')}."
        self.close()
        return TargetError(f"{self.fault} Load the target again.")

    def _last_words(self) -> str | None:
        """Why another process has ended, as far as one of them could say."""
        for pipe, _ in self._others:
            with suppress(EOFError, OSError):
                if pipe.poll(1.0):
                    return str(pipe.recv())
        return None

    def close(self) -> None:
        """End the processes."""
        with self._lock:
            others, self._others = self._others, []
            for pipe, _ in others:
                pipe.close()
            for _, process in others:
                process.join(1.0)
                if process.is_alive():  # it waits for one that is gone
                    process.kill()
                    process.join()
            self.fault = self.fault or "The divided model was unloaded."
            if others and distributed.is_initialized():
                distributed.destroy_process_group()
                torch.set_num_threads(self._threads)
            shutil.rmtree(self._folder, ignore_errors=True)


def _follow(place: _Place, threads: int, read: Reader, orders: Connection) -> None:
    """Another process: reads its part and does as it is told, until the pipe is closed."""
    os.environ["LOCAL_RANK"] = str(place.rank)  # where transformers looks for the device
    torch.set_num_threads(threads)
    try:
        orders.send("started")
        follower = _Follower(place.part(read), place.devices[place.rank])
        with torch.inference_mode():
            while True:
                follower.obey(*orders.recv())
    except (EOFError, KeyboardInterrupt):
        pass
    except BaseException as error:
        with suppress(OSError):
            orders.send(first_line(error))
    os._exit(0)  # a process of a group waits for the others at its end


class _Follower:
    """A part of the model, and of its caches and their copies by number."""

    def __init__(self, model: PreTrainedModel, device: torch.device) -> None:
        self._forward, self._device = ModulesForward(model), device
        self._kept: dict[int, Any] = {}

    def obey(self, forgotten: Sequence[int], name: str, number: int, about: Sequence[Any]) -> None:
        """An order: its own methods by name, or a cache's."""
        for each in forgotten:
            self._kept.pop(each, None)
        own: dict[str, Callable[..., None]]
        own = {"new": self._new, "run": self._run, "copy": self._copy, "paste": self._paste}
        if name in own:
            own[name](number, *about)
        else:
            getattr(self._kept[number], name)(*about)

    def _new(self, number: int, layers: int, capacity: int) -> None:
        self._kept[number] = TreeCache(layers, capacity=capacity)

    def _run(self, number: int, *rows: np.ndarray[Any, Any] | None) -> None:
        given = (None if each is None else torch.from_numpy(each) for each in rows)
        here = (None if each is None else each.to(self._device) for each in given)
        self._forward(Rows(*here), self._kept[number], Needs(), last_only=True)  # type: ignore[arg-type]

    def _copy(self, number: int, copy: int) -> None:
        self._kept[copy] = self._kept[number].copy()

    def _paste(self, number: int, copy: int, length: int) -> None:
        self._kept[number].paste(self._kept[copy], length)


# ---- what the target sees


class TensorParallelForward(Forward):
    """A divided model; this process's part is one of transformers' own modules."""

    def __init__(self, group: Group) -> None:
        """Read this process's part; raises TargetError if any part cannot be read."""
        self._group, self.model = group, group.part()
        self._part = ModulesForward(self.model)
        self._layers = len(attending_layers(self.model.config.get_text_config()))
        self.devices = group.devices
        self.name = f"transformers' modules, tensor parallel over {len(self.devices)}"

    def __call__(
        self, rows: Rows, cache: TreeCache, needs: Needs, *, last_only: bool
    ) -> TargetOutput:
        if needs.shared:
            raise ConfigError(
                "This drafter reads the target's keys and values, of which every device of a "
                "divided model has a part only. Load the target on one device, or with balanced."
            )
        assert isinstance(cache, TensorParallelCache)
        arrays = (None if each is None else each.numpy(force=True) for each in rows)
        act = partial(self._part, rows, cache, needs, last_only=last_only)
        return self._group.together(act, cache.number, *arrays)

    @property
    def fault(self) -> str | None:  # type: ignore[override]
        return self._group.fault

    def output(self, hidden: Tensor) -> Tensor:
        return self._part.output(hidden)

    def new_cache(self, rows: int) -> TensorParallelCache:
        return TensorParallelCache(self._group, self._layers, max(64, rows))

    def close(self) -> None:
        self._part.close()
        self._group.close()


@dataclass(frozen=True)
class _Copy(CacheCopy):
    """This process's part of a copy; the others keep theirs under the number."""

    number: int


class TensorParallelCache(TreeCache):
    """This process's part of a cache, after which the others keep theirs."""

    def __init__(self, group: Group, layers: int, capacity: int) -> None:
        super().__init__(layers, capacity=capacity)
        self._group, self.number = group, group.number()
        group.tell("new", self.number, layers, capacity)
        weakref.finalize(self, group.forget, self.number)

    def reserve(self, rows: int) -> None:
        if self.length + rows > self.capacity:
            self._group.tell("reserve", self.number, rows)
            super().reserve(rows)

    def commit(self, path: tuple[int, ...]) -> None:
        self._group.tell("commit", self.number, path)
        super().commit(path)

    def extend(self, count: int) -> None:
        self._group.tell("extend", self.number, count)
        super().extend(count)

    def truncate(self, length: int) -> None:
        self._group.tell("truncate", self.number, length)
        super().truncate(length)

    def free(self) -> None:
        self._group.tell("free", self.number)
        super().free()

    def copy(self) -> _Copy:
        part, number = super().copy(), self._group.number()
        self._group.tell("copy", self.number, number)
        copied = {field.name: getattr(part, field.name) for field in fields(part)}
        copy = _Copy(**copied, number=number)
        weakref.finalize(copy, self._group.forget, number)
        return copy

    def paste(self, copy: CacheCopy, length: int) -> None:
        assert isinstance(copy, _Copy)
        super().paste(copy, length)
        self._group.tell("paste", self.number, copy.number, length)
