"""The kernels for each kind of processor."""

from __future__ import annotations

import ctypes

import pytest

from engine.kernels.cpu.compile import AVX512, REQUIRED
from engine.safe_text import cpu_flags
from tests.engine.cpu.targets import kernels_or_skip
from tests.engine.drafters.judges import slow

INSTRUCTIONS = {
    "AVX2": REQUIRED,
    "AVX-VNNI": (*REQUIRED, "avx_vnni"),
    "AVX-512 VNNI": (*REQUIRED, *AVX512),
    "AVX-512 VNNI, bf16": (*REQUIRED, *AVX512, "avx512_bf16"),
}
"""Those of ARM have the bits of AVX2's: see `test_arm`."""


@pytest.fixture(scope="module", params=["AVX2", *map(slow, list(INSTRUCTIONS)[1:])])
def any_kernels(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> ctypes.CDLL:
    """Compiled for each kind of processor that this one can stand for."""
    wanted = INSTRUCTIONS[request.param]
    lacking = set(wanted) - set(cpu_flags())
    if lacking:
        pytest.skip(f"this processor has no {', '.join(sorted(lacking))}")
    return kernels_or_skip(tmp_path_factory.mktemp("kernels"), wanted)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return kernels_or_skip(tmp_path_factory.mktemp("kernels"))
