"""A second device without one: tensors that say they are on `pretend:0`, with data on the CPU.

Every operation goes through `_fallback`, which refuses to mix devices, as CUDA does. torch takes
one such backend a process, for good: use it in a process of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_library: Any = None


class _Pretended(torch.Tensor):
    """Says that it is elsewhere; `_data_cpu` is what it holds."""

    _data_cpu: torch.Tensor
    # Else what is copied to the CPU would be of this class, too. torch's stub has only a method.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


def set_up() -> torch.device:
    """Register the device."""
    global _library
    _setup_privateuseone_for_python_backend("pretend")
    _library = torch.library.Library("_", "IMPL")
    _library.fallback(_fallback, "PrivateUse1")
    return torch.device("pretend", 0)


def _wrapped(data: Any) -> Any:
    if not isinstance(data, torch.Tensor):
        return data
    tensor: Any = torch._C._acc.create_empty_tensor(data.shape, data.dtype)
    tensor.__class__ = _Pretended
    tensor._data_cpu = data
    return tensor


def _bare(value: Any) -> Any:
    if isinstance(value, torch.device):
        return torch.device("cpu")
    return value._data_cpu if isinstance(value, _Pretended) else value


def _fallback(operator: Any, *args: Any, **named: Any) -> Any:
    tensors = [leaf for leaf in tree_leaves((args, named)) if isinstance(leaf, torch.Tensor)]
    here = [tensor for tensor in tensors if tensor.device.type == "cpu" and tensor.dim()]
    name = operator.name()
    if here and any(tensor.device.type == "pretend" for tensor in tensors) and "copy" not in name:
        raise RuntimeError(f"{name}: tensors on pretend:0 and cpu")
    if name == "aten::_copy_from":
        _bare(args[1]).copy_(_bare(args[0]))
        return args[1]
    result = operator(*tree_map(_bare, args), **tree_map(_bare, named))
    to = named.get("device")
    return result if to is not None and to.type == "cpu" else tree_map(_wrapped, result)
