"""Packed weights compute what plain ones compute, and the model stays what transformers knows."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from engine.drafters.autoregressive import AutoregressiveConfig
from engine.errors import ConfigError, TargetError
from engine.kernels.cpu.compile import NoKernels, library
from engine.model.loading import load_target, pick_dtype
from engine.model.packed import OneDNNLinear, PackedLinear, can_pack, pack
from engine.model.sources import TargetSpec
from engine.model.target import Target
from engine.proposal import Needs
from tests.engine.cpu.targets import VARIANTS, packed, plain, variant_model
from tests.engine.cpu.tiny_gguf import write_gguf
from tests.engine.drafters.judges import write
from tests.engine.scripted import assert_same_walk
from tests.models import build_context, save_tiny, tiny_model

SHAPES = [(48, 32), (7, 5), (96, 100), (1, 1), (130, 64)]


def linear_of(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    plain = nn.Linear(weight.shape[1], len(weight), bias=bias is not None, device="meta")
    plain.weight = nn.Parameter(weight)
    if bias is not None:
        plain.bias = nn.Parameter(bias)
    return plain


def load(path: Path, dtype: str, cache_dir: Path, **settings: str) -> Target:
    spec = TargetSpec.model_validate({"name": "tiny", "path": str(path), **settings})
    return load_target(spec, dtype=dtype, device="cpu", cache_dir=cache_dir / "cache")


# ---- products


@pytest.mark.parametrize("rows", [1, 2, 5, 40])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_equal_the_definition(
    dtype: torch.dtype, shape: tuple[int, int], rows: int
) -> None:
    if not can_pack(dtype):
        pytest.skip(f"oneDNN has no products in {dtype} on this processor")
    torch.manual_seed(rows)
    out, size = shape
    weight, bias = torch.randn(out, size).to(dtype), torch.randn(out).to(dtype)
    x = torch.randn(2, rows, size).to(dtype)
    exact = linear(x.double(), weight.double(), bias.double())
    near: dict[str, Any]
    near = {"rtol": 1e-5, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 0.01, "atol": 0.1}
    with torch.inference_mode():
        module = OneDNNLinear(linear_of(weight, bias))
        torch.testing.assert_close(module(x).double(), exact, **near)
        assert torch.equal(module.weight, weight)


def test_what_onednn_lacks_is_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not can_pack(torch.float16) and not can_pack(torch.float64)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert not can_pack(torch.float32)
    model = tiny_model("llama")
    pack(model)
    assert not any(isinstance(module, PackedLinear) for module in model.modules())


# ---- whole models


@pytest.mark.parametrize("name", VARIANTS)
def test_prompts_and_trees_equal_those_of_plain_weights(name: str) -> None:
    model = variant_model(name)
    theirs, ours = plain(copy.deepcopy(model)), packed(model)
    assert any(isinstance(module, PackedLinear) for module in model.modules())
    assert_same_walk(ours, theirs, (3, 20, 1, 12, 7, 16), prompts=(17, 1, 5))


@pytest.mark.parametrize("name", ["llama-tied", "llama-no-groups-biased", "qwen3"])
def test_a_deep_copy_is_plain_and_can_change_its_dtype(name: str) -> None:
    model = variant_model(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    pack(model)
    plain = copy.deepcopy(model)
    assert not any(isinstance(module, PackedLinear) for module in plain.modules())
    assert type(plain.model.layers[0].self_attn.k_proj) is nn.Linear
    for state in (model.state_dict(), plain.state_dict()):
        assert state.keys() == before.keys()
        assert all(torch.equal(state[key], before[key]) for key in before)
    tied = plain.lm_head.weight is plain.model.embed_tokens.weight
    assert tied == model.config.tie_word_embeddings
    assert plain.double().dtype == torch.float64


def test_weights_in_place_cannot_change_their_dtype() -> None:
    model = variant_model("llama")
    pack(model)
    with pytest.raises(TypeError, match="Load it again"):
        model.bfloat16()


def test_gradients_reach_the_rows_before_the_output_matrix() -> None:
    model = variant_model("llama-tied")
    pack(model)
    hidden = torch.randn(3, model.config.hidden_size, requires_grad=True)
    model.lm_head(hidden)[:, 5].sum().backward()
    expected = model.model.embed_tokens.weight[5].detach().expand(3, -1)
    torch.testing.assert_close(hidden.grad, expected)


# ---- dtypes


@pytest.mark.parametrize(("kind", "dtype"), [("Q4_1", "q4"), ("Q4_0", "q4"), ("Q8_0", "q8")])
def test_a_gguf_file_is_multiplied_in_its_own_codes_by_default(
    kind: str, dtype: str, tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", kind)
    exact, ours = load(path, "float32", tmp_path), coded(path, "auto", tmp_path)
    assert ours.dtype_name == ours.environment()["dtype"] == dtype
    assert (ours.dtype, ours.companion_dtype) == (torch.bfloat16, "q8")
    assert ours.environment()["forward"] == f"transformers' modules, {dtype}"
    prompt = list(range(40, 60))
    logits = {}
    for target in (exact, ours):
        cache = target.new_cache(32)
        target.prefill(prompt[:-1], cache, Needs())
        logits[target] = target.prefill(prompt[-1:], cache, Needs()).logits.float()
    spread = logits[exact].std()
    # In bfloat16 alone it is 0.2: sums of a model this small are rounded like anything else.
    assert 0 < (logits[ours] - logits[exact]).abs().max() < 0.4 * spread
    drafter = AutoregressiveConfig().build(build_context(ours))
    assert len(write(ours, drafter, prompt, tokens=8).output) == 8


@pytest.mark.parametrize("dtype", ["q8", "q4"])
def test_any_model_can_be_given_codes_on_loading(dtype: str, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "tiny", "gemma2", hidden_size=64, intermediate_size=96)
    exact, ours = load(folder, "float32", tmp_path), coded(folder, dtype, tmp_path)
    assert ours.environment()["forward"] == f"transformers' modules, {dtype}"
    prompt = list(range(40, 60))
    found = [t.prefill(prompt, t.new_cache(32), Needs()).logits.float() for t in (exact, ours)]
    off = (found[0] - found[1]).std() / found[0].std()
    assert 0 < off < (0.06 if dtype == "q8" else 0.4)


def test_fewer_bits_than_the_files_are_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", "Q8_0")
    with pytest.raises(ConfigError, match="file holds its matrices in 8 bits. Choose q8"):
        coded(path, "q4", tmp_path)


def test_codes_need_the_kernels(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")
    with pytest.raises(TargetError, match="needs the compiled kernels, which .* switched off"):
        load(path, "q4", tmp_path, native_kernels="off")
    assert load(path, "auto", tmp_path, native_kernels="off").dtype_name != "q4"


def test_codes_run_on_the_processor_only() -> None:
    with pytest.raises(ConfigError, match="on the processor only"):
        pick_dtype("q4", torch.device("cuda"))


def coded(path: Path, dtype: str, cache_dir: Path) -> Target:
    try:
        library(cache_dir / "cache")
    except NoKernels as error:
        pytest.skip(f"no compiled kernels here: {error}")
    return load(path, dtype, cache_dir)
