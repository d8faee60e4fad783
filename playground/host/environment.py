"""The environment of a run: versions, processor, device, weights."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

from engine.model.target import Target, cpu_name
from engine.safe_text import cpu_flags

PACKAGES = (
    *("torch", "transformers", "tokenizers", "safetensors", "accelerate", "gguf", "gradio"),
    "speculative-decoding-playground",
)
WEIGHT_FILES = (".safetensors", ".bin", ".gguf", ".pt")
BLOCK_BYTES = 1 << 20
MAX_BLOCKS = 64
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
CPU_FLAGS = "avx2 avx512f avx512_vnni avx512_bf16 amx_bf16 amx_int8 asimd asimddp sve".split()


def environment(target: Target) -> dict[str, Any]:
    """All that is stored with a run about its machine and weights."""
    folder = Path(str(getattr(target.model, "name_or_path", "") or "nowhere"))
    digest = weights_digest(folder) if folder.is_dir() else None
    return {**target.environment(), "weights_digest": digest, **machine()}


def weights_digest(folder: Path) -> str | None:
    """A digest of the weight files in a folder; None if it has none.

    Of a file larger than 64 MiB only 64 blocks of 1 MiB count, spread evenly over it, and its size:
    a second or two for any model, and weights that were trained further still differ.
    """
    files = sorted(file for file in folder.iterdir() if file.suffix in WEIGHT_FILES)
    if not files:
        return None
    marks = tuple((str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in files)
    return _digest_of(marks)


@functools.lru_cache(maxsize=8)
def _digest_of(marks: tuple[tuple[str, int, int], ...]) -> str:
    """Digest of files, cached by name, size and time."""
    digest = hashlib.sha256()
    for name, size, _ in marks:
        digest.update(f"{Path(name).name}:{size};".encode())
        last = max(0, (size - 1) // BLOCK_BYTES)
        with open(name, "rb") as stream:
            for block in sorted({i * last // (MAX_BLOCKS - 1) for i in range(MAX_BLOCKS)}):
                stream.seek(block * BLOCK_BYTES)
                digest.update(stream.read(BLOCK_BYTES))
    return digest.hexdigest()


@functools.cache
def machine() -> dict[str, Any]:
    """The part that all runs of this process share: versions, processor, device, commit."""
    flags = cpu_flags()
    return {
        "versions": {name: version for name in PACKAGES if (version := _version(name))},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": cpu_name(),
        "cpu_count": os.cpu_count(),
        "cpu_flags": [flag for flag in CPU_FLAGS if flag in flags],
        "memory_gib": _memory_gib(),
        **_gpu(),
        "git_commit": _git_commit(),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _memory_gib() -> float | None:
    try:
        pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None
    return round(pages * size / 2**30, 1)


def _gpu() -> dict[str, Any]:
    """Driver, CUDA and graphics processors; all None without one."""
    import torch

    if not torch.cuda.is_available():
        return {"driver": None, "cuda": None, "gpus": None}
    devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    gpus = [
        f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, capability {gpu.major}.{gpu.minor}"
        for gpu in devices
    ]
    return {"driver": _nvidia_driver(), "cuda": torch.version.cuda, "gpus": gpus}


def _nvidia_driver() -> str | None:
    """Version of the NVIDIA kernel driver on Linux."""
    try:
        words = NVIDIA_DRIVER.read_text(encoding="utf-8").split()
    except OSError:
        return None
    return next((word for word in words if word[:1].isdigit() and "." in word), None)


def _git_commit() -> str | None:
    """Commit of the source tree that is running, with + where it has changes."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--abbrev=40"]
    command += ["--exclude=*", "--dirty=+"]
    try:
        run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=5)
    except (OSError, subprocess.SubprocessError):
        return None
    return run.stdout.strip()
