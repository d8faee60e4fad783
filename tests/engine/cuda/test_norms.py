"""RMS norms that run by torch's own operator."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from engine.kernels.cuda.norms import fuse_norms
from tests.models import tiny_model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gemma3_text", "phi3", "olmo2"])
def test_fused_norms_give_the_same_logits(family: str, dtype: torch.dtype) -> None:
    model = tiny_model(family).to(dtype)
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            nn.init.uniform_(module.weight, -0.5, 1.5)
    fused, rows = copy.deepcopy(model), torch.arange(3, 12)[None]
    norms = sum(type(module).__name__.endswith("RMSNorm") for module in model.modules())
    assert fuse_norms(fused) == norms > 0
    with torch.inference_mode():
        expected, logits = (one(rows).logits.float() for one in (model, fused))
        copied = copy.deepcopy(fused).float()(rows).logits
    deviation = (logits - expected).std() / expected.std()
    assert deviation < 4 * torch.finfo(dtype).eps ** 0.5
    assert (copied - expected).std() / expected.std() < 4 * torch.finfo(dtype).eps ** 0.5


class MeanFreeRMSNorm(nn.Module):
    """Something else under such a name."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(16)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        x = x - x.mean(dim=-1, keepdim=True)
        return x * x.square().mean(dim=-1, keepdim=True).add(self.eps).rsqrt() * self.weight


def test_other_norms_are_left_alone() -> None:
    norm = MeanFreeRMSNorm()
    x = torch.randn(3, 16)
    expected = norm(x)
    assert fuse_norms(nn.Sequential(norm)) == 0
    assert torch.equal(norm(x), expected)
