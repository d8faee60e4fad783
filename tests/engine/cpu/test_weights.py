"""Packed weights compute what plain ones compute, and the model stays what transformers knows."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from engine.drafters.autoregressive import AutoregressiveConfig
from engine.errors import ConfigError, TargetError
from engine.kernels.cpu.operators import FORMATS, NativeEmbedding, NativeLinear
from engine.model.packed import PackedLinear, can_pack, pack
from engine.model.plan import pick_dtype
from tests.engine.cpu.targets import (
    VARIANTS,
    WIDE,
    deviation,
    packed,
    plain,
    prompt_logits,
    variant_model,
)
from tests.engine.cpu.tiny_gguf import write_gguf
from tests.engine.drafters.judges import write
from tests.engine.scripted import assert_same_walk
from tests.models import build_context, load_tiny, save_tiny


def test_dtypes_that_onednn_lacks_are_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not can_pack(torch.float16) and not can_pack(torch.float64)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert not can_pack(torch.float32)


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


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(("kind", "dtype"), [("Q4_1", "q4"), ("Q4_0", "q4"), ("Q8_0", "q8")])
def test_a_gguf_file_runs_in_its_own_quantization_by_default(
    kind: str, dtype: str, tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", kind)
    exact, ours = load_tiny(path), load_tiny(path, "auto")
    assert ours.dtype_name == ours.environment()["dtype"] == dtype
    assert (ours.dtype, ours.precision.companion) == (torch.bfloat16, "q8")
    assert ours.environment()["forward"] == f"transformers' modules, {dtype}"
    found, logits = prompt_logits(ours).float(), prompt_logits(exact)
    # In bfloat16 alone it is 0.2: sums of a model this small are rounded like anything else.
    assert 0 < (found - logits).abs().max() < 0.4 * logits.std()
    drafter = AutoregressiveConfig().build(build_context(ours))
    assert len(write(ours, drafter, [1, 2, 3], tokens=8).output) == 8


@pytest.mark.usefixtures("kernels")
def test_a_gguf_file_is_in_bfloat16_where_that_is_chosen(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", **WIDE["llama"])
    exact, ours = load_tiny(path), load_tiny(path, "bfloat16")
    assert ours.environment()["forward"] == "native" and ours.dtype_name == "bfloat16"
    modules = (m for m in ours.model.modules() if isinstance(m, NativeLinear | NativeEmbedding))
    assert {module.matrix.format for module in modules} == {FORMATS[16]}
    assert 0 < deviation(prompt_logits(ours), prompt_logits(exact)) < 0.03


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(("dtype", "most"), [("q8", 0.06), ("q4", 0.4)])
def test_any_model_can_be_quantized_on_loading(dtype: str, most: float, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "tiny", "gemma2", hidden_size=64, intermediate_size=96)
    ours = load_tiny(folder, dtype)
    assert ours.environment()["forward"] == f"transformers' modules, {dtype}"
    assert 0 < deviation(prompt_logits(ours), prompt_logits(load_tiny(folder))) < most


def test_quantized_weights_need_the_kernels_and_a_cpu(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")
    with pytest.raises(TargetError, match="needs the compiled kernels, which .* switched off"):
        load_tiny(path, "q4", native_kernels=False)
    assert load_tiny(path, "auto", native_kernels=False).dtype_name != "q4"
    with pytest.raises(ConfigError, match="on the processor only"):
        pick_dtype("q4", torch.device("cuda"))
