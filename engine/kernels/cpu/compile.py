"""Compiles the kernels of `native.cpp` for this processor, once, and loads them.

A compiler is no requirement: without one, or on another kind of machine, torch's operators do
the same work. The library is linked with nothing of torch or Python, so it takes seconds.
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
from engine.safe_text import cpu_flags, disk_is_full, unwritable

LOG = logging.getLogger(__name__)
FOLDER = Path(__file__).parent
MAIN, RARE = "native.cpp", "rare.cpp"
REGISTERS = ("registers/avx512.h", "registers/avx2.h", "registers/neon.h")
SOURCES = (MAIN, RARE, "attention.h", "products.h", "formats.h", "vectors.h", *REGISTERS)
FLAGS = ("-std=c++17", "-O3", "-fno-math-errno", "-ffp-contract=off", "-fPIC", "-shared")
MACHINES = (("Linux", "x86_64"), ("Linux", "aarch64"), ("Darwin", "arm64"))
NEEDED = ("avx2", "fma", "f16c")
"""Names in /proc/cpuinfo; the compiler's are the same without underscores."""
AVX512 = ("avx512f", "avx512bw", "avx512dq", "avx512vl")
NEON, DOT_PRODUCTS = "asimd", "asimddp"
"""Every 64-bit ARM processor has the first, those from about 2018 on (all of Apple's) both."""
COMPILERS = ("g++", "clang++", "c++")
MODULE = "ziglang"
"""A package that is a C++ compiler (the extra `compiler`)."""
TIMEOUT_S = 120
NO_COMPILER = (
    "there is no C++ compiler, and models run at a third to a tenth of their speed: install one "
    "(g++ or clang), or pip install ziglang"
)
_LOADED: list[ctypes.CDLL] = []


class NotNative(Exception):
    """The kernels cannot be used here; says why."""


@functools.cache
def library(cache_dir: Path, instructions: tuple[str, ...] | None = None) -> ctypes.CDLL:
    """The compiled kernels; `cache_dir` keeps them.

    Args:
        instructions: compile for these, as `best_instructions` names them; None = this
            processor's best.

    Raises NotNative: another processor, no compiler, or it failed.
    """
    loaded = _load(cache_dir, instructions, MAIN)
    try:
        loaded.scratch_bytes.restype = loaded.packed_bytes.restype = ctypes.c_int64
    except AttributeError as error:
        raise NotNative(f"they could not be loaded: {first_line(error)}") from error
    _LOADED.append(loaded)
    return loaded


@functools.cache
def whole_library(cache_dir: Path, instructions: tuple[str, ...] | None = None) -> ctypes.CDLL:
    """As `library`, with products in the formats that few models have: some seconds more."""
    loaded = library(cache_dir, instructions)
    rare = _load(cache_dir, instructions, RARE)
    loaded.use_rare(ctypes.cast(rare.rare_product, ctypes.c_void_p))
    loaded.rare = rare  # type: ignore[attr-defined]
    return loaded


def has_rare(kernels: ctypes.CDLL) -> bool:
    """Whether they are those of `whole_library`."""
    return "rare" in vars(kernels)


def _load(cache_dir: Path, instructions: tuple[str, ...] | None, source: str) -> ctypes.CDLL:
    machine = platform.system(), platform.machine()
    if machine not in MACHINES:
        raise NotNative(
            f"they are for Linux on x86-64 or ARM, and macOS on ARM, not {' on '.join(machine)}"
        )
    if instructions is None:
        instructions = best_instructions(cpu_flags())
    if not _shares_openmp():
        raise NotNative("this torch brings no OpenMP to share threads with")
    file = _compiled(cache_dir / "native", instructions, source)
    try:
        return ctypes.CDLL(str(file))
    except OSError as error:
        raise NotNative(f"they could not be loaded: {first_line(error)}") from error


def best_instructions(flags: Collection[str]) -> tuple[str, ...]:
    """What of a processor's `flags` (of /proc/cpuinfo) the kernels make use of.

    Not all that it has (`-march=native`): the library may be in a cache that machines share.

    Raises NotNative: it lacks what they need.
    """
    if NEON in flags:
        return (NEON, *(name for name in (DOT_PRODUCTS,) if name in flags))
    lacking = [name for name in NEEDED if name not in flags]
    if lacking:
        raise NotNative(f"this processor has no {lacking[0]}")
    if not set(AVX512) <= set(flags):
        return (*NEEDED, *(name for name in ("avx_vnni",) if name in flags))
    more = (name for name in ("avx512_vnni", "avx512_bf16") if name in flags)
    return (*NEEDED, *AVX512, *more)


def compiler_flags(instructions: Sequence[str], compiler: Sequence[str]) -> tuple[str, ...]:
    """What the kernels are compiled with for these, as `best_instructions` names them."""
    if NEON not in instructions:
        named = (f"-m{name.replace('_', '')}" for name in instructions)
        return (*FLAGS, "-mtune=native", *named)
    has_dots = DOT_PRODUCTS in instructions
    if MODULE in compiler:  # which knows no names of architectures
        flags = (*FLAGS, f"-mcpu={'generic+dotprod' if has_dots else 'generic'}")
    else:
        flags = (*FLAGS, f"-march={'armv8.2-a+dotprod' if has_dots else 'armv8-a'}")
    # Elsewhere a library may lack what the process that loads it brings.
    return (*flags, "-Wl,-undefined,dynamic_lookup") if platform.system() == "Darwin" else flags


def find_compiler() -> tuple[str, ...] | None:
    """How a C++ compiler is called here; None = there is none."""
    for name in COMPILERS:
        if path := shutil.which(name):
            return (path,)
    if importlib.util.find_spec(MODULE) is not None:
        return sys.executable, "-m", MODULE, "c++"
    return None


def loaded_library() -> ctypes.CDLL | None:
    """The kernels, if this process runs a model by them."""
    return _LOADED[-1] if _LOADED else None


def _shares_openmp() -> bool:
    """Whether torch has loaded an OpenMP that has GNU's entry points; the kernels find it then.

    Two OpenMP libraries in a process have two pools of threads, which spin against each other.
    """
    try:
        if platform.system() == "Darwin":  # LLVM's, which has them too
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


def _compiled(folder: Path, instructions: Sequence[str], source: str) -> Path:
    """The library's file, compiled if it is not there whole.

    Its name ends with its digest: a file that was cut off would end the process that loads it.
    """
    compiler = find_compiler()
    if compiler is None:
        raise NotNative(NO_COMPILER)
    flags = compiler_flags(instructions, compiler)
    sources = [(FOLDER / name).read_bytes() for name in SOURCES]
    named = (source, *compiler, *flags)
    key = hashlib.sha256(b"\0".join([*sources, *map(str.encode, named)]))
    try:
        for file in folder.glob(f"{key.hexdigest()[:24]}-*.so"):
            _check_own(folder, file)
            if file.stem.endswith(_digest(file)):
                return file
            LOG.warning("%s is damaged; the kernels are compiled again.", file)
            file.unlink()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        _check_own(folder)
        with partial_folder(folder) as temp:
            library_file = temp / "made.so"
            _compile([*compiler, *flags, "-o", str(library_file), str(FOLDER / source)])
            library_file.chmod(0o700)
            file = folder / f"{key.hexdigest()[:24]}-{_digest(library_file)}.so"
            os.replace(library_file, file)
    except OSError as error:
        raise NotNative(unwritable(folder, error)) from error
    except ConfigError as error:
        raise NotNative(first_line(error)) from error
    return file


def _compile(command: Sequence[str]) -> None:
    """Raises NotNative: the compiler failed, or took too long. What it says may be in any code."""
    try:
        process = subprocess.run(command, check=False, capture_output=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise NotNative(f"{command[0]} took more than {TIMEOUT_S} s") from error
    if process.returncode:
        message = process.stderr.decode(errors="replace").strip() or "no message"
        fault = ValueError(message)
        if disk_is_full(fault):
            raise NotNative(unwritable(tempfile.gettempdir(), fault))
        raise NotNative(f"{command[0]} failed: {first_line(fault)}")


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:32]


def _check_own(*places: Path) -> None:
    """Raises NotNative: others may write there, and so have their code run here."""
    for place in places:
        about = place.stat()
        if about.st_uid not in (0, os.getuid()) or about.st_mode & 0o022:
            raise NotNative(f"others may write to {place}; remove it, or give another cache folder")
