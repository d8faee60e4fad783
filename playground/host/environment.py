"""The environment of a run: versions, processor, device, weights."""

from __future__ import annotations

import functools
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
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
CPU_FLAGS = "avx2 avx512f avx512_vnni avx512_bf16 amx_bf16 amx_int8 asimd asimddp sve".split()


def environment(target: Target) -> dict[str, Any]:
    """All that is stored with a run about its machine and weights."""
    return {**target.environment(), **machine()}


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
    """Commit of the source tree that is running, with + where it has changes.

    None where it is installed: the repository that has the virtual environment is not its own.
    """
    folder, name = os.path.split(__file__)
    run = functools.partial(subprocess.check_output, cwd=folder, text=True, timeout=5)
    try:
        run(["git", "ls-files", "--error-unmatch", name], stderr=subprocess.DEVNULL)
        return run("git describe --always --abbrev=40 --exclude=* --dirty=+".split()).strip()
    except (OSError, subprocess.SubprocessError):
        return None
