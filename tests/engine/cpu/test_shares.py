"""A model whose matrices are packed is still the model that transformers knows."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from engine.kernels.cpu import architecture
from engine.kernels.cpu.shares import Share
from tests.engine.cpu.targets import VARIANTS, variant_model
from tests.models import VOCAB

IDS = torch.arange(24)[None] % VOCAB


@pytest.mark.parametrize("name", VARIANTS)
def test_transformers_modules_still_compute_the_same(name: str) -> None:
    model = variant_model(name)
    with torch.inference_mode():
        before = model(IDS).logits
        architecture.fuse(model)
        torch.testing.assert_close(model(IDS).logits, before, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(model(IDS[:, :7]).logits, before[:, :7], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["llama-tied", "llama-no-groups-biased", "qwen3"])
def test_a_deep_copy_is_plain_and_can_change_its_dtype(name: str) -> None:
    model = variant_model(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    architecture.fuse(model)
    plain = copy.deepcopy(model)
    assert not any(isinstance(module, Share) for module in plain.modules())
    assert type(plain.model.layers[0].self_attn.k_proj) is nn.Linear
    for state in (model.state_dict(), plain.state_dict()):
        assert state.keys() == before.keys()
        assert all(torch.equal(state[key], before[key]) for key in before)
    tied = plain.lm_head.weight is plain.model.embed_tokens.weight
    assert tied == model.config.tie_word_embeddings
    assert plain.double().dtype == torch.float64


def test_the_copy_shares_nothing_with_its_original() -> None:
    model = variant_model("llama")
    architecture.fuse(model)
    plain = copy.deepcopy(model)
    with torch.inference_mode():
        before = model(IDS).logits
        for parameter in plain.parameters():
            parameter.zero_()
        assert torch.equal(model(IDS).logits, before)


def test_weights_in_place_cannot_change_their_dtype() -> None:
    model = variant_model("llama")
    architecture.fuse(model)
    with pytest.raises(TypeError, match="Load it again"):
        model.bfloat16()


def test_gradients_reach_the_rows_before_the_output_matrix() -> None:
    model = variant_model("llama-tied")
    architecture.fuse(model)
    hidden = torch.randn(3, model.config.hidden_size, requires_grad=True)
    model.lm_head(hidden)[:, 5].sum().backward()
    expected = model.model.embed_tokens.weight[5].detach().expand(3, -1)
    torch.testing.assert_close(hidden.grad, expected)


def test_a_product_is_made_once_for_its_shares_and_not_kept() -> None:
    model = variant_model("llama")
    architecture.fuse(model)
    attention = model.model.layers[0].self_attn
    shares = [attention.q_proj, attention.k_proj, attention.v_proj]
    assert all(isinstance(share, Share) for share in shares)
    whole, calls = shares[0]._stack, []
    made = whole.projection

    class Counted:
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            calls.append(len(x))
            return made(x)

    whole.projection = Counted()
    with torch.inference_mode():
        x = torch.randn(2, 3, model.config.hidden_size)
        assert [tuple(share(x).shape) for share in shares] == [(2, 3, 32), (2, 3, 16), (2, 3, 16)]
        assert calls == [6]
        shares[0](x)
        assert calls == [6, 6], "rows that changed in between must not meet an old product"
