"""Compiles the kernels of `native.cpp` for this CPU, once, and loads them.

A compiler is optional: without one, or on other machines, torch's operators do the same work. The
library links neither torch nor Python, so compiling takes seconds.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path

from engine.errors import ConfigError, first_line
from engine.model.sources import partial_folder
from engine.safe_text import cpu_flags, disk_is_full, write_error_text

LOG = logging.getLogger(__name__)
FOLDER = Path(__file__).parent
MAIN, RARE = "native.cpp", "rare.cpp"
REGISTERS = ("registers/avx512.h", "registers/avx2.h", "registers/neon.h")
HEADERS = (
    "experts.h",
    "decoder.h",
    "attention.h",
    "rows.h",
    "products.h",
    "formats.h",
    "vectors.h",
)
SOURCES = (MAIN, RARE, *HEADERS, *REGISTERS)
FLAGS = ("-std=c++17", "-O3", "-fno-math-errno", "-ffp-contract=off", "-fPIC", "-shared")
MACHINES = (("Linux", "x86_64"), ("Linux", "aarch64"), ("Darwin", "arm64"))
REQUIRED = ("avx2", "fma", "f16c")
"""Flags in /proc/cpuinfo; the compiler's are the same without underscores."""
AVX512 = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni")
NEON, DOT_PRODUCTS = "asimd", "asimddp"
"""Every 64-bit ARM processor has the first, those from about 2018 on (all of Apple's) both."""
COMPILERS = ("g++", "clang++", "c++")
ZIG_MODULE = "ziglang"
"""A package that is a C++ compiler (the extra `compiler`)."""
TIMEOUT_S = 300
NO_COMPILER = (
    "there is no C++ compiler, and models run at a third to a tenth of their speed: install one "
    "(g++ or clang), or pip install ziglang"
)
_LOADED: list[ctypes.CDLL] = []


class NoKernels(Exception):
    """The compiled kernels cannot be used here; the message says why."""


@functools.cache
def library(cache_dir: Path, instructions: tuple[str, ...] | None = None) -> ctypes.CDLL:
    """The compiled kernels, cached in `cache_dir`.

    Args:
        instructions: the instruction sets to compile for, as named by `best_instructions`; None =
            this CPU's best.

    Raises NoKernels: unsupported CPU, no compiler, or compiling failed.
    """
    loaded = _load(cache_dir, instructions, MAIN)
    loaded.scratch_bytes.restype = loaded.packed_bytes.restype = ctypes.c_int64
    _LOADED.append(loaded)
    return loaded


@functools.cache
def full_library(cache_dir: Path, instructions: tuple[str, ...] | None = None) -> ctypes.CDLL:
    """As `library`, with matmuls in rare formats, which take some more seconds to compile."""
    loaded = library(cache_dir, instructions)
    rare = _load(cache_dir, instructions, RARE)
    loaded.set_rare_matmul(ctypes.cast(rare.rare_matmul, ctypes.c_void_p))
    loaded.rare = rare  # type: ignore[attr-defined]
    return loaded


def has_rare_formats(kernels: ctypes.CDLL) -> bool:
    """Whether these kernels are those of `full_library`."""
    return "rare" in vars(kernels)


def _load(cache_dir: Path, instructions: tuple[str, ...] | None, source: str) -> ctypes.CDLL:
    machine = platform.system(), platform.machine()
    if machine not in MACHINES:
        raise NoKernels(
            f"they are for Linux on x86-64 or ARM, and macOS on ARM, not {' on '.join(machine)}"
        )
    if instructions is None:
        instructions = best_instructions(cpu_flags())
    if not _shares_openmp():
        raise NoKernels("this torch brings no OpenMP to share threads with")
    file = _library_file(cache_dir / "native", instructions, source)
    try:
        return ctypes.CDLL(str(file))
    except OSError as error:
        raise NoKernels(f"they could not be loaded: {first_line(error)}") from error


def best_instructions(flags: Collection[str]) -> tuple[str, ...]:
    """The instruction sets among a CPU's `flags` (of /proc/cpuinfo) that the kernels use.

    Not all that it has (`-march=native`): several machines may share the cache.

    Raises NoKernels: it lacks a required one.
    """
    if NEON in flags:
        return (NEON, *(name for name in (DOT_PRODUCTS,) if name in flags))
    missing = [name for name in REQUIRED if name not in flags]
    if missing:
        raise NoKernels(f"this processor has no {missing[0]}")
    if not set(AVX512) <= set(flags):
        return (*REQUIRED, *(name for name in ("avx_vnni",) if name in flags))
    return (*REQUIRED, *AVX512, *(name for name in ("avx512_bf16",) if name in flags))


def compiler_flags(instructions: Sequence[str], compiler: Sequence[str]) -> tuple[str, ...]:
    """The compiler's flags for these instruction sets, as named by `best_instructions`."""
    if NEON not in instructions:
        options = (f"-m{name.replace('_', '')}" for name in instructions)
        return (*FLAGS, "-mtune=native", *options)
    has_dots = DOT_PRODUCTS in instructions
    if ZIG_MODULE in compiler:  # zig does not take -march
        flags = (*FLAGS, f"-mcpu={'generic+dotprod' if has_dots else 'generic'}")
    else:
        flags = (*FLAGS, f"-march={'armv8.2-a+dotprod' if has_dots else 'armv8-a'}")
    # Elsewhere undefined symbols are resolved on loading by default.
    return (*flags, "-Wl,-undefined,dynamic_lookup") if platform.system() == "Darwin" else flags


def find_compiler() -> tuple[str, ...] | None:
    """The command of a C++ compiler; None = there is none."""
    for name in COMPILERS:
        if path := shutil.which(name):
            return (path,)
    if importlib.util.find_spec(ZIG_MODULE) is not None:
        return sys.executable, "-m", ZIG_MODULE, "c++"
    return None


def loaded_library() -> ctypes.CDLL | None:
    """The kernels, if this process has loaded them."""
    return _LOADED[-1] if _LOADED else None


def _shares_openmp() -> bool:
    """Whether torch has loaded an OpenMP library with GNU's entry points, for the kernels to use.

    Two OpenMP libraries in a process have two thread pools, which spin against each other.
    """
    try:
        if platform.system() == "Darwin":  # LLVM's OpenMP has them, too
            torch = importlib.util.find_spec("torch")
            folder = Path(torch.origin if torch and torch.origin else "").parent / "lib"
            ctypes.CDLL(str(folder / "libomp.dylib"), mode=ctypes.RTLD_GLOBAL)
            return True
        maps = Path("/proc/self/maps").read_text(encoding="utf-8")
        if any(line.rstrip().endswith("/libgomp.so.1") for line in maps.splitlines()):
            ctypes.CDLL("libgomp.so.1", mode=ctypes.RTLD_GLOBAL)
            return True
    except OSError:
        pass
    return False


def _library_file(folder: Path, instructions: Sequence[str], source: str) -> Path:
    """The library's file, compiled unless an intact one is cached.

    Its name ends with its digest: loading a truncated file would crash the process.
    """
    compiler = find_compiler()
    if compiler is None:
        raise NoKernels(NO_COMPILER)
    flags = compiler_flags(instructions, compiler)
    sources = [(FOLDER / name).read_bytes() for name in SOURCES]
    command = (source, *compiler, *flags)
    key = hashlib.sha256(b"\0".join([*sources, *map(str.encode, command)]))
    try:
        for file in folder.glob(f"{key.hexdigest()[:24]}-*.so"):
            _check_ownership(folder, file)
            if file.stem.endswith(_digest(file)):
                return file
            LOG.warning("%s is damaged; the kernels are compiled again.", file)
            file.unlink()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        _check_ownership(folder)
        with partial_folder(folder) as temp:
            library_file = temp / "library.so"
            _compile([*compiler, *flags, "-o", str(library_file), str(FOLDER / source)])
            library_file.chmod(0o700)
            file = folder / f"{key.hexdigest()[:24]}-{_digest(library_file)}.so"
            os.replace(library_file, file)
    except OSError as error:
        raise NoKernels(write_error_text(folder, error)) from error
    except ConfigError as error:
        raise NoKernels(first_line(error)) from error
    return file


def _compile(command: Sequence[str]) -> None:
    """Raises NoKernels: the compiler failed, or timed out; its output has any encoding."""
    try:
        process = subprocess.run(command, check=False, capture_output=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise NoKernels(f"{command[0]} took more than {TIMEOUT_S} s") from error
    if process.returncode:
        message = process.stderr.decode(errors="replace").strip() or "no message"
        fault = ValueError(message)
        if disk_is_full(fault):
            raise NoKernels(write_error_text(tempfile.gettempdir(), fault))
        raise NoKernels(f"{command[0]} failed: {first_line(fault)}")


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:32]


def _check_ownership(*places: Path) -> None:
    """Raises NoKernels: others may write there, and so inject code."""
    for place in places:
        status = place.stat()
        if status.st_uid not in (0, os.getuid()) or status.st_mode & 0o022:
            raise NoKernels(f"others may write to {place}; remove it, or give another cache folder")
