"""The kernels on ARM compute, bit by bit, what they compute on x86-64 with AVX2."""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Iterator

import pytest
import torch

from engine.kernels.cpu import operators
from engine.kernels.cpu.compile import REQUIRED
from engine.kernels.cpu.experts import pack_one
from engine.kernels.cpu.operators import Matrix, topk
from engine.model.target import Target
from engine.proposal import TargetOutput
from engine.safe_text import cpu_flags
from tests.engine.cpu.arm import PROCESSORS, arm_kernels
from tests.engine.cpu.targets import WIDE, kernels_or_skip, native, wide_model
from tests.engine.cpu.test_experts import experts_of, model_of
from tests.engine.cpu.test_formats import COLUMNS, KINDS, raw_of
from tests.engine.scripted import walk

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=PROCESSORS)
def arm(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ctypes.CDLL]:
    with arm_kernels(tmp_path_factory.mktemp("arm"), request.param) as kernels:
        yield kernels


@pytest.fixture(scope="module")
def avx2(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if not set(REQUIRED) <= set(cpu_flags()):
        pytest.skip("this processor has no AVX2 to compare with")
    return kernels_or_skip(tmp_path_factory.mktemp("kernels"), REQUIRED)


@pytest.mark.parametrize("kind", [*KINDS, "BF16"])
def test_products_of_every_type_equal_those_of_avx2(
    kind: str, arm: ctypes.CDLL, avx2: ctypes.CDLL
) -> None:
    raw, _ = raw_of(kind)
    x = torch.randn(49, COLUMNS, generator=torch.Generator().manual_seed(2)).bfloat16()
    x[2, 5], x[3, 5], x[4, :32] = torch.nan, torch.inf, 1e-37
    theirs, ours = (Matrix.from_gguf(kernels, raw) for kernels in (avx2, arm))
    assert theirs is not None and ours is not None
    assert torch.equal(ours.packed, theirs.packed)
    for n in (1, 2, 4, 8, 16, 49):
        products = ours.product(x[:n]), theirs.product(x[:n])
        torch.testing.assert_close(*products, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_sums_of_experts_equal_those_of_avx2(
    family: str, arm: ctypes.CDLL, avx2: ctypes.CDLL
) -> None:
    plain = list(experts_of(model_of(family)).values())[-1]
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(9, 64, generator=generator).bfloat16()
    chosen = torch.stack([torch.randperm(8, generator=generator)[:3] for _ in range(9)])
    weights = torch.rand(9, 3, generator=generator)
    for bits in (16, 8, 4):
        theirs, ours = (pack_one(plain, kernels, bits) for kernels in (avx2, arm))
        assert torch.equal(ours(x, chosen, weights), theirs(x, chosen, weights))


def forwards(target: Target) -> Iterator[TargetOutput]:
    """A prompt, steps of one row, and trees of 2 to 16 rows."""
    return walk(target, target.new_cache(4), (1, 1, 2, 4, 8, 16), prompts=[37])


CASES = [(name, (16, 8, 4)[i % 3]) for i, name in enumerate(WIDE)]


@pytest.mark.parametrize(("name", "bits"), [*CASES, ("llama", 8), ("llama", 4)])
def test_prompts_and_trees_equal_those_of_avx2(
    name: str, bits: int, arm: ctypes.CDLL, avx2: ctypes.CDLL
) -> None:
    model = wide_model(name)
    theirs, ours = (native(copy.deepcopy(model), kernels, bits) for kernels in (avx2, arm))
    for expected, output in zip(forwards(theirs), forwards(ours), strict=True):
        for part in ("logits", "hidden", "layers", "best"):
            assert torch.equal(getattr(output, part), getattr(expected, part))
        assert output.logsumexp is not None
        torch.testing.assert_close(output.logsumexp, expected.logsumexp)


def test_the_most_probable_tokens_are_those_of_torch(
    arm: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operators, "loaded_library", lambda: arm)
    logits = torch.randn(5, 77, generator=torch.Generator().manual_seed(1))
    ranked, expected = topk(logits, 9), logits.topk(9)
    assert torch.equal(ranked.ids, expected.indices)
    assert torch.equal(ranked.logits, expected.values)
    assert ranked.logsumexp is not None
    torch.testing.assert_close(ranked.logsumexp, logits.logsumexp(-1, keepdim=True))
