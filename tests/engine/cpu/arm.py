"""The kernels compiled for ARM, in an emulator, called as those in this process are."""

from __future__ import annotations

import ctypes
import functools
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from engine.kernels.cpu import compile, operators

EMULATOR = "qemu-aarch64"
GCC = "aarch64-linux-gnu-g++"
CLANG = (sys.executable, "-m", compile.ZIG_MODULE, "c++", "-target", "aarch64-linux-musl")
PROCESSORS = {
    "NEON": ("cortex-a72", (compile.NEON,)),
    "NEON dot products": ("max", (compile.NEON, compile.DOT_PRODUCTS)),
}
"""Of the emulator, the first without dot products; and what of them is made use of."""
TIMEOUT_S = 900
"""The package's compiler makes its own standard library first."""
FUNCTIONS = "forward draft_chain scratch_bytes packed_bytes pack unpack linear topk".split()
FUNCTIONS += ["run_experts"]
SERVER = Path(__file__).with_name("kernel_server.cpp")


@contextmanager
def arm_kernels(folder: Path, name: str) -> Iterator[ctypes.CDLL]:
    """The kernels for one of `PROCESSORS`, compiled into `folder`.

    By GCC where it compiles for ARM, else by the compiler from the package index.
    """
    if shutil.which(EMULATOR) is None:
        pytest.skip(f"{EMULATOR} is not installed (Debian's qemu-user)")
    processor, instructions = PROCESSORS[name]
    gcc = shutil.which(GCC)
    compiler = (gcc,) if gcc else CLANG
    flags = [*compile.compiler_flags(instructions, compiler), "-static", "-pthread"]
    flags.remove("-shared")
    sources = (SERVER, compile.FOLDER / compile.MAIN, compile.FOLDER / compile.RARE)
    program = folder / "kernels"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(compile, "TIMEOUT_S", TIMEOUT_S)
        compile._compile([*compiler, *flags, "-o", str(program), *map(str, sources)])
    kernels = _RemoteKernels([EMULATOR, "-cpu", processor, str(program)])
    data_ptr = torch.Tensor.data_ptr

    def seen_data_ptr(tensor: torch.Tensor) -> int:
        address, storage = data_ptr(tensor), tensor.untyped_storage()
        kernels.storages.pop(address, None)  # the newest is the last
        is_piece = storage.nbytes() >= operators.CHUNK  # of a packed matrix: without its neighbours
        own = address, tensor.nbytes
        kernels.storages[address] = own if is_piece else (storage.data_ptr(), storage.nbytes())
        return address

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.Tensor, "data_ptr", seen_data_ptr)
        yield cast(ctypes.CDLL, kernels)
    kernels.close()


class _RemoteKernels:
    """Kernels in a process that has its own memory.

    With each call goes the memory of every tensor that one of its pointers leads into, and what
    came of it is written back.

    Attributes:
        storages: address that was asked for → address and size of the tensor's storage.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self.rare = True
        self.storages: dict[int, tuple[int, int]] = {}
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        (self._base,) = struct.unpack("<q", self._read(8))

    def __getattr__(self, name: str) -> Any:
        if name not in FUNCTIONS:
            raise AttributeError(name)
        return functools.partial(self._call, name)

    def close(self) -> None:
        with self._process:
            assert self._process.stdin is not None
            self._process.stdin.close()

    def _call(self, name: str, *arguments: Any) -> int:
        memory = _Memory(self._base, self.storages)
        if name == "pack":  # from an array of numpy's, or a tensor
            data, row_bytes, rows = (getattr(a, "value", a) for a in arguments[2:5])
            memory.add(data, row_bytes * rows, is_output=False)
        numbers = [memory.relocated(argument) for argument in arguments]
        numbers += [0] * (9 - len(numbers))
        assert self._process.stdin is not None
        header = struct.pack("<11q", FUNCTIONS.index(name), len(memory.image), *numbers)
        self._process.stdin.write(header + memory.image)
        self._process.stdin.flush()
        (result,) = struct.unpack("<q", self._read(8))
        memory.write_back(self._read(len(memory.image)))
        return int(result)

    def _read(self, count: int) -> bytes:
        assert self._process.stdout is not None
        data = self._process.stdout.read(count)
        assert len(data) == count, f"the kernels ended: {self._process.wait()}"
        return data


class _Memory:
    """Stretches of this process's memory, and where they lie behind `base` in another."""

    def __init__(self, base: int, storages: dict[int, tuple[int, int]]) -> None:
        self.image = bytearray()
        self._base = base
        self._places: dict[tuple[int, int], int] = {}
        self._outputs: list[tuple[int, int]] = []
        self._storages = storages

    def add(self, address: int, size: int, *, is_output: bool = True) -> int:
        """Its place there."""
        if (address, size) not in self._places:
            self._places[address, size] = self._append(ctypes.string_at(address, size))
            if is_output:
                self._outputs.append((address, size))
        return self._base + self._places[address, size]

    def _append(self, data: bytes) -> int:
        at = -(-len(self.image) // 64) * 64
        self.image += bytes(at - len(self.image)) + data
        return at

    def relocated(self, argument: Any, count: int = 1) -> int:
        """An argument as the other process has it.

        Args:
            count: of structs that a pointer leads to.
        """
        if isinstance(argument, int) or argument is None:
            return argument or 0
        if isinstance(argument, ctypes.c_void_p):
            return self._pointer(argument.value)
        if isinstance(argument, ctypes._Pointer):
            structs = [argument[i] for i in range(count)] if argument else []
        else:
            value = getattr(argument, "value", None)
            if value is not None:
                return int(value)
            structs = [argument._obj]
        if not structs:
            return 0
        return self._base + self._append(b"".join(self._struct(s) for s in structs))

    def _pointer(self, address: int | None) -> int:
        if not address:
            return 0
        own = [self._storages[address]] if address in self._storages else []
        for start, size in [*self._places, *(own or reversed(list(self._storages.values())))]:
            if start <= address < start + size:
                return self.add(start, size) + address - start
        raise AssertionError(f"{address:#x} is in no tensor")

    def _struct(self, value: ctypes.Structure) -> bytes:
        data = bytearray(value)
        for name, kind in value._fields_:  # type: ignore[misc]
            field, here = getattr(type(value), name), getattr(value, name)
            if kind is ctypes.c_void_p:
                new = struct.pack("<q", self._pointer(here))
            elif isinstance(here, ctypes._Pointer):
                count = value.num_layers if name == "layers" else getattr(value, "count", 1)
                new = struct.pack("<q", self.relocated(here, count))
            elif isinstance(here, ctypes.Array):
                new = b"".join(self._struct(item) for item in here)
            elif isinstance(here, ctypes.Structure):
                new = self._struct(here)
            else:
                continue
            data[field.offset : field.offset + field.size] = new
        return bytes(data)

    def write_back(self, image: bytes) -> None:
        for address, size in self._outputs:
            place = self._places[address, size]
            ctypes.memmove(address, image[place : place + size], size)
