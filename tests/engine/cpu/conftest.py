"""The kernels are compiled once for all tests: fifteen seconds for each kind of processor."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from engine.kernels.cpu import compile
from engine.kernels.cpu.compile import NotNative, library


@pytest.fixture(scope="session", autouse=True)
def compiled_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What the compiler made of the same sources with the same flags is taken again."""
    base = tmp_path_factory.getbasetemp()
    # Workers of one session have a folder each, side by side.
    kept = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "compiled"
    kept.mkdir(exist_ok=True)
    run = compile._compile

    def compile_once(command: Sequence[str]) -> None:
        at = command.index("-o") + 1
        made, rest = Path(command[at]), [*command[:at], *command[at + 1 :]]
        copy = kept / hashlib.sha256("\0".join(rest).encode()).hexdigest()
        if copy.exists():
            shutil.copy(copy, made)
            return
        run(command)
        if made.exists():
            shutil.copy(made, part := copy.with_suffix(f".{os.getpid()}"))
            os.replace(part, copy)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(compile, "_compile", compile_once)
        yield


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    try:
        return library(tmp_path_factory.mktemp("kernels"))
    except NotNative as error:
        pytest.skip(f"no compiled kernels here: {error}")
