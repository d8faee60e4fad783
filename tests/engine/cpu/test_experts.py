"""Experts in packed matrices: what transformers' modules compute, in less memory."""

from __future__ import annotations

import copy
import ctypes
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from engine.kernels.cpu.compile import full_library
from engine.kernels.cpu.experts import (
    MAX_ROWS,
    NativeExperts,
    has_plain_experts,
    is_experts,
    pack_experts,
    pack_one,
    unsupported_reason,
)
from engine.kernels.cpu.operators import GGML_FORMATS
from engine.model.forward import prepare_attention
from engine.model.gguf.file import GGML_TYPES
from engine.model.plan import plan_loading
from engine.model.reading import empty_model
from engine.model.sources import TargetSpec
from engine.model.target import Target
from tests.engine.cpu.targets import deviation, prompt_logits
from tests.engine.cpu.test_packed_model import LOAD
from tests.engine.cpu.tiny_gguf import write_gguf
from tests.engine.drafters.judges import write
from tests.engine.methods import drafter_for
from tests.models import load_tiny, save_tiny, tiny_model, tiny_tokenizer

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {},
    "qwen2_moe": {"shared_expert_intermediate_size": 64},
    "qwen3_5_moe_text": {},
    "mixtral": {},
    "olmoe": {},
    "granitemoe": {},
    "gpt_oss": {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    "lfm2_moe": {},
    "deepseek_v3": {
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 32,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "num_key_value_heads": 4,
    },
}


ALL_CHOSEN = {"num_experts_per_tok": 8, "n_group": 1}
"""Else a rounding that lets a tiny router choose another expert moves every logit."""


def model_of(family: str, **overrides: Any) -> Any:
    """A tiny model with biases that are not 0; less sharp, since depth multiplies roundings."""
    model = tiny_model(family, **{**SIZES, **FAMILIES[family], **overrides})
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, one in [*model.named_parameters(), *model.named_buffers()]:
            if "bias" in name and one.is_floating_point():
                one.add_(0.1 * torch.randn(one.shape, generator=generator))
            elif one.ndim > 1:
                one.mul_(0.4)
    return model


def prepared(model: Any) -> Any:
    prepare_attention(model)
    return model


def experts_of(model: Any) -> dict[str, Any]:
    return {name: one for name, one in model.named_modules() if is_experts(one)}


@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_sum_of_experts_equals_that_of_modules(
    family: str, bits: int, any_kernels: ctypes.CDLL
) -> None:
    plain = list(experts_of(model_of(family)).values())[-1]
    assert unsupported_reason(plain) is None
    ours = pack_one(plain, any_kernels, bits)
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(40, 64, generator=generator).bfloat16()
    chosen = torch.stack([torch.randperm(8, generator=generator)[:3] for _ in range(40)])
    weights = torch.rand(40, 3, generator=generator)
    found = ours(x, chosen, weights)
    rounded = copy.deepcopy(ours).float()
    assert type(rounded) is type(plain)
    state = {key: one.float() for key, one in ours.state_dict().items()}
    assert all(torch.equal(one, state[key]) for key, one in rounded.named_parameters())
    with torch.no_grad():
        expected = rounded(x.float(), chosen, weights)
        exact = plain(x.float(), chosen, weights)
    assert 0 < deviation(found, expected) < (0.006 if bits == 16 else 0.02)
    assert deviation(found, exact) < {16: 0.006, 8: 0.03, 4: 0.3}[bits]
    alone = [ours(x[i : i + 1], chosen[i : i + 1], weights[i : i + 1]) for i in range(40)]
    assert torch.equal(torch.cat(alone), found), "a row's bits depend on others"
    shuffled = torch.randperm(40, generator=generator)
    assert torch.equal(ours(x[shuffled], chosen[shuffled], weights[shuffled]), found[shuffled])


def test_a_long_prompt_and_rows_without_experts(kernels: ctypes.CDLL) -> None:
    ours = pack_one(experts_of(model_of("mixtral"))["model.layers.0.mlp.experts"], kernels, 16)
    x = torch.randn(MAX_ROWS + 7, 64).bfloat16()
    chosen = torch.randint(0, 8, (len(x), 1))
    chosen[3] = 8  # stands for none
    found = ours(x, chosen, torch.ones(len(x), 1))
    assert torch.equal(found[-5:], ours(x[-5:], chosen[-5:], torch.ones(5, 1)))
    assert not found[3].any() and found[2].any()


def test_widths_and_activations_without_a_kernel_stay_floats() -> None:
    narrow = model_of("qwen3_moe", moe_intermediate_size=16)
    assert has_plain_experts(narrow)
    odd = model_of("qwen3_moe", hidden_act="relu")
    (reason,) = {unsupported_reason(one) for one in experts_of(odd).values()}
    assert reason == "the activation of Qwen3MoeExperts is not one of the kernels'"
    assert has_plain_experts(tiny_model("llama4_text")) and not has_plain_experts(tiny_model())


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", ["q8", "q4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_folders_experts_are_packed_one_by_one(
    family: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.model.loading._read_floats", None)
    folder = tmp_path / "model"
    model = model_of(family, **ALL_CHOSEN).to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="50KB")
    tiny_tokenizer().save_pretrained(folder)
    ours = load_tiny(folder, dtype)
    experts = [m for m in ours.model.modules() if isinstance(m, NativeExperts)]
    assert len(experts) == len(experts_of(model)) > 0
    assert ours.environment()["forward"] == f"transformers' modules, {dtype}"
    exact = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rounded = copy.deepcopy(ours.model).float()
    found, truth, same_weights = (
        prompt_logits(one if isinstance(one, Target) else Target(one, None, name="exact")).float()
        for one in (ours, prepared(exact), prepared(rounded))
    )
    bound = 3 if family == "granitemoe" else 1  # bfloat16 alone is five times as far off there
    assert 0 < deviation(found, same_weights) < 0.05 * bound
    assert deviation(found, truth) < {"q8": 0.06, "q4": 0.6}[dtype] * bound
    stored = dict(exact.named_buffers())
    for name, buffer in ours.model.named_buffers():
        torch.testing.assert_close(buffer.float(), stored[name].float(), rtol=0.01, atol=0.01)


@pytest.fixture(scope="module")
def routed(tmp_path_factory: pytest.TempPathFactory, kernels: ctypes.CDLL) -> Target:
    """Float32 with packed experts: only these could tell rows apart."""
    model = prepared(model_of("qwen3_moe"))
    pack_experts(model, kernels, 8)
    assert any(isinstance(one, NativeExperts) for one in model.modules())
    return Target(model, tiny_tokenizer(), name="routed")


@pytest.mark.parametrize("method", ["ngram", "suffix", "recycling"])
def test_drafting_writes_the_text_of_plain_decoding(method: str, routed: Target) -> None:
    prompt = [5, 6, 7, 8, 9] * 4
    plain = write(routed, drafter_for(routed, "plain"), prompt, tokens=32)
    drafted = write(routed, drafter_for(routed, method), prompt, tokens=32)
    assert drafted.output == plain.output and drafted.num_accepted > 0


LARGE = Qwen3MoeConfig(  # type: ignore[call-arg]
    hidden_size=1024,
    moe_intermediate_size=512,
    num_experts=32,
    num_hidden_layers=6,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=128,
    vocab_size=8_000,
    tie_word_embeddings=False,
)
"""300 million weights, of which one layer's experts are 50."""


@pytest.mark.slow
@pytest.mark.usefixtures("kernels")
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("dtype", ["q8", "q4"])
def test_loading_takes_no_more_than_the_packed_model_and_an_expert(
    dtype: str, tmp_path: Path
) -> None:
    full_library(tmp_path / "cache")
    small = save_tiny(tmp_path / "small", "qwen3_moe", **SIZES)
    LARGE.save_pretrained(tmp_path / "large")
    tensors = {
        name: 0.02 * torch.randn(one.shape, dtype=torch.bfloat16)
        for name, one in empty_model(LARGE, None, "large").named_parameters()
    }
    save_file(tensors, tmp_path / "large" / "model.safetensors", metadata={"format": "pt"})
    command = [sys.executable, "-c", LOAD, str(small), str(tmp_path / "large"), dtype]
    run = subprocess.run(command, check=True, capture_output=True, text=True)
    taken = json.loads(run.stdout.splitlines()[-1])
    table = 2 * LARGE.vocab_size * LARGE.hidden_size
    assert taken["peak"] < taken["model"] + table + 40e6, taken
    spec = TargetSpec(name="large", path=str(tmp_path / "large"))
    plan = plan_loading(spec, dtype=dtype, device="cpu", cache_dir=tmp_path / "cache")
    assert plan.num_bytes == pytest.approx(taken["model"], rel=0.02)


KINDS = [GGML_TYPES[kind].name for kind in GGML_FORMATS if GGML_TYPES[kind].bits < 16]
WIDE: dict[str, Any] = {"hidden_size": 256, "moe_intermediate_size": 768, "num_hidden_layers": 2}
WIDE |= {"num_experts": 4, "num_experts_per_tok": 4}


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("kind", KINDS)
def test_a_gguf_files_experts_keep_their_type(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", kind, "qwen3_moe", scale=0.3, **WIDE)
    with monkeypatch.context() as patched:
        patched.setattr("engine.model.loading._read_floats", None)
        ours = load_tiny(path, "auto")
    own = GGML_FORMATS[next(i for i, one in GGML_TYPES.items() if one.name == kind)]
    experts = [m for m in ours.model.modules() if isinstance(m, NativeExperts)]
    assert len(experts) == 2 and {m.format for one in experts for m in one.matrices} == {own}
    exact = load_tiny(path, "float32")
    assert 0 < deviation(prompt_logits(ours).float(), prompt_logits(exact)) < 0.08
