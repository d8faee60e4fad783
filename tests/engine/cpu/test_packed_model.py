"""Checkpoints in safetensors are packed tensor by tensor: the same model, in less memory."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig

from engine.kernels.cpu.compile import library
from engine.kernels.cpu.experts import NativeExperts
from engine.kernels.cpu.native import NativeForward
from engine.kernels.cpu.operators import NativeEmbedding, NativeLinear, pack_native
from engine.kernels.cpu.packed_model import SafetensorsTensors, UnmappedTensor, load_packed
from engine.model.reading import empty_model
from engine.model.target import Target
from tests.engine.cpu.targets import prompt_logits
from tests.models import load_tiny, save_tiny, tiny_model

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
FAMILIES = ("llama", "qwen3", "gemma2", "olmo2")
LARGE = LlamaConfig(
    hidden_size=1024,
    intermediate_size=4096,
    num_hidden_layers=12,
    num_attention_heads=16,
    num_key_value_heads=8,
    vocab_size=32_000,
    tie_word_embeddings=False,
)
LOAD = """
import json, sys
from pathlib import Path
from tests.engine.cpu.test_packed_model import num_bytes
from tests.models import load_tiny

def status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key))

small, large, dtype = sys.argv[1:]
load_tiny(Path(small), dtype)
before = status("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
target = load_tiny(Path(large), dtype)
taken = {"model": num_bytes(target), "peak": status("VmHWM") - before}
print(json.dumps(taken | {"forward": target.environment()["forward"]}))
"""


def num_bytes(target: Target) -> int:
    """Bytes of its weights; a shared matrix counts once."""
    native = NativeLinear | NativeEmbedding
    packed = (module for module in target.model.modules() if isinstance(module, native))
    matrices = {id(module.matrix): module.matrix for module in packed}
    for module in target.model.modules():
        if isinstance(module, NativeExperts):
            matrices |= {id(one): one for one in module.matrices}
    plain: int = target.model.get_memory_footprint()
    return plain + sum(matrix.packed.nbytes for matrix in matrices.values())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_is_packed_as_its_float_model_would_be(
    family: str, tied: bool, tmp_path: Path, kernels: ctypes.CDLL
) -> None:
    sizes = {**SIZES, "tie_word_embeddings": tied}
    folder = tmp_path / "model"
    tiny_model(family, **sizes).to(torch.bfloat16).save_pretrained(folder, max_shard_size="50KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    ours = load_tiny(folder, "bfloat16")
    assert isinstance(ours.embedding, NativeEmbedding), "was read by way of floats"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    pack_native(model, kernels, 16)
    whole = Target(model, None, name="whole", forward=NativeForward(model))
    assert torch.equal(prompt_logits(ours), prompt_logits(whole))
    assert num_bytes(ours) <= num_bytes(whole)


def test_the_folders_generation_settings_are_the_models(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model", **SIZES)
    GenerationConfig(eos_token_id=[7, 9]).save_pretrained(folder)
    assert {7, 9} <= load_tiny(folder, "bfloat16").eos_ids


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", ["model.layers.0.self_attn.rotary_emb.inv_freq", "extra.weight"])
def test_tensors_without_a_counterpart_are_loaded_as_floats(name: str, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model", **SIZES)
    exact = prompt_logits(load_tiny(folder, "bfloat16"))
    file = folder / "model.safetensors"
    save_file({**load_file(file), name: torch.ones(4)}, file, metadata={"format": "pt"})
    target = load_tiny(folder, "bfloat16")
    assert not isinstance(target.embedding, NativeEmbedding)
    assert torch.equal(prompt_logits(target), exact) and target.environment()["forward"] == "native"


def test_a_tensor_of_another_shape_is_refused(tmp_path: Path, kernels: ctypes.CDLL) -> None:
    folder = save_tiny(tmp_path / "model", **SIZES)
    config = tiny_model("llama", **{**SIZES, "intermediate_size": 128}).config
    empty = empty_model(config, None, "tiny", dtype=torch.bfloat16)
    tensors = SafetensorsTensors(empty, [str(folder / "model.safetensors")], kernels, 16)
    with pytest.raises(UnmappedTensor, match="gate_proj.weight is .*, but by its config"):
        load_packed(empty, tensors, lambda share: None)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """500 MB of weights."""
    folder = tmp_path_factory.mktemp("large") / "model"
    LARGE.save_pretrained(folder)
    tensors = {
        name: torch.full(one.shape, 1.0, dtype=torch.bfloat16)
        if one.ndim == 1
        else 0.02 * torch.randn(one.shape, dtype=torch.bfloat16)
        for name, one in empty_model(LARGE, None, "large").named_parameters()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.slow
@pytest.mark.usefixtures("kernels")
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("dtype", ["bfloat16", "q8", "q4"])
def test_loading_takes_no_more_than_the_packed_model_and_a_layer(dtype: str, large: Path) -> None:
    library(large.parent / "cache")
    small = save_tiny(large.parent / "small", **SIZES)
    command = [sys.executable, "-c", LOAD, str(small), str(large), dtype]
    run = subprocess.run(command, check=True, capture_output=True, text=True)
    taken = json.loads(run.stdout.splitlines()[-1])
    assert taken["forward"].startswith("native")
    table = 2 * LARGE.vocab_size * LARGE.hidden_size  # larger than a layer
    assert taken["peak"] < taken["model"] + table + 30e6, taken
