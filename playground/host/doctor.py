"""Checks how well this machine is set up for decoding: `doctor`, and on the page."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.errors import first_line
from engine.kernels.cpu.compile import (
    NO_COMPILER,
    NoKernels,
    best_instructions,
    find_compiler,
    library,
)
from engine.model.placement import free_bytes
from engine.model.plan import pick_device
from engine.model.target import cpu_name
from engine.safe_text import cpu_flags
from playground.host.environment import NVIDIA_DRIVER, machine

GIB = 1 << 30
MIN_FREE_GIB = 2.0
CUDA_BUILD = (
    "this machine has an NVIDIA GPU, but torch is built without CUDA: install a CUDA build of the "
    "same torch release. On Linux that is what pip installs by itself; for Windows and for AMD "
    "(ROCm, which answers to cuda) pytorch.org names the command."
)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Facts as labels and values, and advice on what makes this machine slow."""

    facts: tuple[tuple[str, str], ...]
    advice: tuple[str, ...]

    @property
    def lines(self) -> list[str]:
        facts = [f"{label:10}{value}" for label, value in self.facts]
        return [*facts, *(f"slow: {one}" for one in self.advice or ("nothing that is known.",))]


def diagnose(cache_dir: Path, device: str = "auto") -> Diagnosis:
    """Check device, driver, torch, compiler, kernels, memory and cache; compiles the kernels.

    Raises ConfigError: there is no such device.
    """
    where, advice = pick_device(device), list[str]()
    facts = machine()
    if where.type == "cpu" and _sees_nvidia() and torch.version.cuda is None:
        advice.append(CUDA_BUILD)
    threads, cores = torch.get_num_threads(), os.cpu_count() or 1
    if where.type == "cpu" and threads < cores // 2:
        advice.append(
            f"torch uses {threads} of {cores} processors: unset OMP_NUM_THREADS, or set it to the "
            "number of cores."
        )
    kernels = _kernels(cache_dir, advice) if where.type == "cpu" else f"torch's for {where.type}"
    free = free_bytes(where) / GIB
    if free < MIN_FREE_GIB:
        advice.append(f"{free:.1f} GiB of memory are free: close other programs.")
    other = "an accelerator that this program has not been tried on"
    names = {"cpu": f"{cpu_name()}, {threads} threads", "cuda": str(facts["gpus"])}
    driver = facts["driver"] or "no CUDA device"
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA in this build"
    existing = next(one for one in (cache_dir, *cache_dir.absolute().parents) if one.exists())
    rows = (
        ("device", f"{where}: {names.get(where.type, other)}"),
        ("driver", f"{driver}" + (f", CUDA {facts['cuda']}" if facts["cuda"] else "")),
        ("torch", f"{torch.__version__}, {build}"),
        ("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        ("compiler", _compiler()),
        ("kernels", kernels),
        ("memory", f"{free:.1f} GiB free of {facts['memory_gib']} GiB"),
        ("cache", f"{cache_dir}, {shutil.disk_usage(existing).free / GIB:.0f} GiB free"),
    )
    return Diagnosis(rows, tuple(advice))


def _kernels(cache_dir: Path, advice: list[str]) -> str:
    """The instructions that the compiled kernels use, or why they are not used."""
    try:
        instructions = best_instructions(cpu_flags())
        library(cache_dir)
    except NoKernels as error:
        reason = NO_COMPILER if find_compiler() is None else str(error)
        advice.append(f"the compiled kernels are not used: {reason}.")
        return "not used; transformers' modules run the model"
    return f"compiled, {', '.join(instructions)}"


def _compiler() -> str:
    command = find_compiler()
    if command is None:
        return "none"
    try:
        run = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        return f"{' '.join(command)}: {first_line(error)}"
    return f"{' '.join(command)}: {run.stdout.partition(chr(10))[0].strip()}"


def _sees_nvidia() -> bool:
    return NVIDIA_DRIVER.exists() or shutil.which("nvidia-smi") is not None
