"""Packed products equal plain ones, and give the plain matrix back."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear

from engine.kernels.cpu.projections import PackedProjection, PlainProjection, Projection, can_pack

SHAPES = [(48, 32), (7, 5), (96, 100), (1, 1), (130, 64)]
KINDS = [
    pytest.param(kind, dtype, id=f"{kind.__name__}-{dtype}")
    for kind in (PlainProjection, PackedProjection)
    for dtype in (torch.float32, torch.bfloat16)
]


@pytest.mark.parametrize("rows", [1, 2, 5, 40])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("kind", "dtype"), KINDS)
def test_products_equal_the_definition(
    kind: type[PackedProjection], dtype: torch.dtype, shape: tuple[int, int], rows: int
) -> None:
    if kind is PackedProjection and not can_pack(dtype):
        pytest.skip(f"no packed products for {dtype} on this processor")
    torch.manual_seed(rows)
    out, size = shape
    weight, bias = torch.randn(out, size).to(dtype), torch.randn(out).to(dtype)
    x, residual = torch.randn(rows, size).to(dtype), torch.randn(rows, out).to(dtype)
    exact = linear(x.double(), weight.double(), bias.double())
    near = {"rtol": 1e-5, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 0.01, "atol": 0.1}
    with torch.inference_mode():
        projection: Projection = kind(weight, bias)
        torch.testing.assert_close(projection(x).double(), exact, **near)
        torch.testing.assert_close(
            projection.plus(x, residual).double(), exact + residual.double(), **near
        )
        assert torch.equal(projection.weight(), weight)


def test_a_dtype_without_packed_products_is_not_packed() -> None:
    assert not can_pack(torch.float16)
    assert not can_pack(torch.float64)


def test_products_that_do_not_agree_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PackedProjection, "plus", lambda self, x, residual: residual)
    assert not can_pack(torch.float32)


def test_without_the_kernels_nothing_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert not can_pack(torch.float32)
