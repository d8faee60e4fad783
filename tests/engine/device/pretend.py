"""An accelerator that is pretended: tensors say `pretend:0`, their data is on the CPU.

`pretend:1` is a second one. Either may be told to be without float64, as MPS is, or to return large
blocks at an equal address, as an allocator may once their memory is free.

It refuses what CUDA refuses: tensors of two devices in one operator. It counts what the host would
wait for on CUDA: scalars that are read, copies to the host, copies from pageable memory, operators
whose output has a size that only the device knows.

torch takes one backend of this kind a process, and keeps it.
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _DummyDeviceGuard,
    _DummyPrivateUse1Hook,
    _setup_privateuseone_for_python_backend,
)

COPIES = ("aten::_to_copy", "aten::copy_", "aten::_copy_from")
INDEXES = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")
"""CUDA takes their indices on the host, too, and copies them."""
RESIZED = ("arange.start_step", "arange.start", "arange", "eye", "eye.m", "randperm", "linspace")
"""torch makes their result empty and resizes it, which a wrapper does not notice.

`copy_` is beside them because a fallback is not found while the Python key is off, as it is where
`torch.tensor` copies its data.
"""
UPLOAD = "copy from pinned memory"
FACTORIES = ("aten::empty", "aten::zeros", "aten::new_empty", "aten::new_zeros")
LARGE_BYTES = 1 << 14
READS = ("aten::_local_scalar_dense", "aten::equal", "aten::multinomial")


@dataclass
class Log:
    """What happened on the device.

    Attributes:
        waits: what the host waited for, and the line of ours that made it.
        uploads: copies from pinned memory, which nothing waits for.
        num_tensors: that operators returned.
    """

    waits: list[str] = field(default_factory=list)
    uploads: list[str] = field(default_factory=list)
    num_tensors: int = 0


@dataclass(frozen=True)
class Ability:
    """What the device can do.

    Attributes:
        float64: whether it has them.
        block: where large tensors begin; None = anywhere.
    """

    float64: bool = True
    block: Tensor | None = None


_logs: list[Log] = []
_abilities = [Ability()]


@contextmanager
def logged() -> Iterator[Log]:
    """What happens inside, on any thread."""
    log = Log()
    _logs.append(log)
    try:
        yield log
    finally:
        _logs.remove(log)


class PretendTensor(Tensor):
    """Says that it is on the device; `data_` is what it holds."""

    data_: Tensor
    # Else what is copied to the CPU would be of this class, too. torch's stub has only a method.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, data: Tensor, index: int = 0) -> PretendTensor:
        made: PretendTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            data.size(),
            strides=data.stride(),
            storage_offset=data.storage_offset(),
            dtype=data.dtype,
            device=_device(index),
        )
        made.data_ = data
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"on {self.device} {self.data_}"

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def data_ptr(self) -> int:
        return self.data_.data_ptr()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return _run(func, args, kwargs or {})


class _Module(_DummyBackendModule):
    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    # `fork_rng` asks for these once the device is registered, in any test of the process.
    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)


def _device(index: int) -> torch.device:
    _register()
    return torch.device("pretend", index)


@functools.cache
def _register() -> None:
    # torch's own objects for these, kept here: it holds pointers to them, not references.
    hook, guard = _DummyPrivateUse1Hook(), _DummyDeviceGuard()
    _setup_privateuseone_for_python_backend(
        "pretend", backend_module=_Module(), hook=hook, device_guard=guard
    )
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(lambda func, *args, **named: _run(func, args, named), "PrivateUse1")
    aten = torch.library.Library("aten", "IMPL")
    for name in (*RESIZED, "copy_"):
        aten.impl(name, functools.partial(_make, name), "PrivateUse1")
    _kept.extend([everything, aten, hook, guard])


_kept: list[Any] = []


@contextmanager
def pretend_device(*, float64: bool = True, reuses_block: bool = False) -> Iterator[torch.device]:
    """The device, as long as pinned memory is known as such.

    Args:
        float64: whether it has them; else what makes one is refused as on MPS.
        reuses_block: whether every large tensor that is made takes the memory of the one before.
    """
    block = torch.zeros(1 << 24, dtype=torch.uint8) if reuses_block else None
    pinning = Tensor.pin_memory

    def pin_memory(self: Tensor, device: Any = None) -> Tensor:
        pinned = self.clone()
        pinned.is_pinned_ = True  # type: ignore[attr-defined]
        return pinned

    Tensor.pin_memory = pin_memory  # type: ignore[method-assign, assignment]
    _abilities.append(Ability(float64, block))
    try:
        yield _device(0)
    finally:
        _abilities.pop()
        Tensor.pin_memory = pinning  # type: ignore[method-assign]


def _make(name: str, *args: Any, **named: Any) -> Tensor:
    packet, _, overload = name.partition(".")
    func = getattr(getattr(torch.ops.aten, packet), overload or "default")
    result: Tensor = _run(func, args, named)
    return result


def _leaves(value: Any) -> Iterator[Any]:
    """As torch's `tree_leaves`, in a fraction of the time."""
    if isinstance(value, list | tuple | dict):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _leaves(one)
    else:
        yield value


def _mapped(change: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _mapped(change, one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([_mapped(change, one) for one in value])
    return change(value)


def _bare(value: Any) -> Any:
    if isinstance(value, torch.device):
        return torch.device("cpu")
    return value.data_ if isinstance(value, PretendTensor) else value


def _run(func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    if func._can_decompose() and any(isinstance(x, PretendTensor) for x in _leaves(args)):
        return func.decompose(*args, **named)
    name = func._schema.name
    tensors = [leaf for leaf in _leaves((args, named)) if isinstance(leaf, Tensor)]
    theirs = [x for x in tensors if isinstance(x, PretendTensor)]
    host = [x for x in tensors if not isinstance(x, PretendTensor)]
    _refuse(func, name, args, named, theirs, host)
    to = named.get("device")
    leaves = to is not None and torch.device(to).type == "cpu"
    waits = _waits(func, name, args, named, leaves=leaves)
    index = theirs[-1].device.index if theirs else 0
    index = index if to is None else torch.device(to).index or 0
    bare, options = _mapped(_bare, args), _mapped(_bare, named)
    if name == "aten::histc" and not bare[0].is_floating_point():  # CUDA alone counts integers
        result = func(bare[0].double(), *bare[1:], **options).to(bare[0].dtype)
    else:
        result = func(*bare, **options)
    if name in FACTORIES and not leaves:
        result = _placed(result)
    uploads = [wait for wait in waits if wait.startswith(UPLOAD)]
    for log in _logs:
        log.num_tensors += sum(isinstance(x, Tensor) for x in _leaves(result))
        log.waits += [wait for wait in waits if wait not in uploads]
        log.uploads += uploads
    if leaves:
        return result
    known = {id(x.data_): x for x in theirs} | {id(x): x for x in host}
    # A view of a weight is no inference tensor, wherever it is made.
    inference = torch.is_inference_mode_enabled() and not (
        func.is_view and not theirs[0].is_inference()
    )
    with torch.inference_mode(inference):
        return _mapped(functools.partial(_wrapped, known, index), result)


def _placed(made: Tensor) -> Tensor:
    """A new tensor where the device's allocator puts it."""
    block = _abilities[-1].block
    if block is None or made.nbytes < LARGE_BYTES:
        return made
    return block[: made.nbytes].view(made.dtype).view(made.shape).copy_(made)


def _wrapped(known: dict[int, Tensor], index: int, value: Any) -> Any:
    """What an operator returned, as tensors of the device; what was given is given back."""
    if not isinstance(value, Tensor):
        return value
    if value.dtype == torch.float64 and not _abilities[-1].float64:
        raise TypeError("Cannot convert a pretend Tensor to float64: it has none.")
    if id(value) not in known:
        return PretendTensor(value, index)
    same = known[id(value)]
    if same.shape != value.shape:
        raise NotImplementedError("an operator resized a tensor of the pretended device")
    return same


def _refuse(
    func: Any,
    name: str,
    args: tuple[Any, ...],
    named: dict[str, Any],
    theirs: list[PretendTensor],
    host: list[Tensor],
) -> None:
    """RuntimeError where CUDA raises it."""
    generator = named.get("generator")
    if generator is not None and generator.device.type == "cpu":
        raise RuntimeError(f"{name}: expected a pretend generator, found cpu")
    places = sorted({str(x.device) for x in theirs})
    if len(places) > 1 and name not in COPIES:
        raise RuntimeError(f"{name}: expected all tensors on one device, found {places}")
    if not theirs or not host or name in COPIES:
        return
    scalars = all(x.dim() == 0 for x in host)
    if scalars and (torch.Tag.pointwise in func.tags or "fill_" in name or name in INDEXES):
        return
    if name in INDEXES and isinstance(args[0], PretendTensor):
        if "put" not in name or isinstance(args[2], PretendTensor) or args[2].dim() == 0:
            return
    raise RuntimeError(f"{name}: expected all tensors on one device, found pretend:0 and cpu")


def _waits(
    func: Any, name: str, args: tuple[Any, ...], named: dict[str, Any], *, leaves: bool
) -> list[str]:
    """What the host waits for in this operator."""
    kinds: list[str] = []
    if name in READS or torch.Tag.dynamic_output_shape in func.tags and name not in INDEXES:
        kinds.append(name)
    if name in COPIES:
        source = args[0] if name != "aten::copy_" else args[1]
        into = args[0] if name == "aten::copy_" else args[1] if name == "aten::_copy_from" else None
        outwards = leaves or (into is not None and not isinstance(into, PretendTensor))
        if isinstance(source, PretendTensor):
            kinds += ["copy to the host"] if outwards else []
        elif not outwards and source.numel():
            pinned = getattr(source, "is_pinned_", False)
            kinds.append(UPLOAD if pinned else "copy from pageable memory")
    if name in INDEXES:
        for index in args[1]:
            if index is not None and index.dtype in (torch.bool, torch.uint8):
                kinds.append("index by a mask")
            if index is not None and not isinstance(index, PretendTensor):
                kinds.append("index on the host")
    return [f"{kind} in {_our_line()}" for kind in kinds]


def _our_line() -> str:
    """The line of the engine that runs."""
    for frame in reversed(traceback.extract_stack()):
        folder, _, file = frame.filename.rpartition("/engine/")
        if file and not folder.endswith("/tests"):
            return f"{file}:{frame.lineno}"
    return "a test"
