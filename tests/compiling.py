"""The kernels are compiled once for all tests: fifteen seconds for each kind of processor."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from filelock import FileLock

from engine.kernels.cpu import compile
from tests.engine.cpu.arm import CLANG, GCC, SERVER


@pytest.fixture(scope="session", autouse=True)
def compiled_once(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[None]:
    """What the compiler made of the same sources with the same flags is taken again.

    Kept in pytest's cache, for all workers and the next time.
    """
    run = compile._compile
    compilers = {shutil.which("g++"), shutil.which(GCC), CLANG[0]}
    cache = getattr(request.config, "cache", None)
    kept: Path = cache.mkdir("kernels") if cache else tmp_path_factory.mktemp("compiled")
    sources = [(compile.FOLDER / name).read_bytes() for name in compile.SOURCES]
    sources.append(SERVER.read_bytes())

    def compile_once(command: Sequence[str]) -> None:
        if command[0] not in compilers:  # a test's own
            run(command)
            return
        at = command.index("-o") + 1
        made, rest = Path(command[at]), [*command[:at], *command[at + 1 :]]
        key = hashlib.sha256(b"\0".join([*sources, *map(str.encode, rest)]))
        copy = kept / key.hexdigest()
        with FileLock(f"{copy}.lock"):
            if not copy.exists():
                run(command)
                shutil.copy(made, part := copy.with_suffix(".part"))
                os.replace(part, copy)
        shutil.copy(copy, made)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(compile, "_compile", compile_once)
        yield
