"""Matrices as GGUF files have them: values equal those of the format's own package."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from engine.kernels.cpu.gguf import GGML_TYPES, RawTensor
from engine.kernels.cpu.operators import GGML_FORMATS, Matrix
from engine.model.loading import load_target
from engine.model.sources import TargetSpec
from engine.proposal import Needs
from tests.engine.cpu.test_native import any_kernels, in_8_bits
from tests.engine.cpu.tiny_gguf import random_blocks, write_gguf
from tests.models import tiny_model

__all__ = ["any_kernels"]
KINDS = [GGML_TYPES[kind].name for kind in GGML_FORMATS if GGML_TYPES[kind].bits < 16]
ROWS, COLUMNS = 37, 512


def raw_of(kind: str) -> tuple[RawTensor, torch.Tensor]:
    """Random blocks, and their values."""
    blocks = random_blocks(kind, ROWS, COLUMNS)
    number = gguf.GGMLQuantizationType[kind]
    values = torch.from_numpy(gguf.quants.dequantize(blocks, number))
    return RawTensor(int(number), (ROWS, COLUMNS), blocks), values


@pytest.mark.parametrize("kind", KINDS)
def test_values_and_products_of_every_type(kind: str, any_kernels: ctypes.CDLL) -> None:
    raw, values = raw_of(kind)
    assert values.isfinite().all()
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(1))
    for rows in (None, order):
        expected = values if rows is None else values[rows]
        matrix = Matrix.from_gguf(any_kernels, raw, order=rows)
        assert matrix is not None
        assert torch.equal(matrix.rows(), expected.bfloat16())
        assert torch.equal(matrix.rows(torch.tensor([5, 36])), expected[[5, 36]].bfloat16())
        x = torch.randn(49, COLUMNS, generator=torch.Generator().manual_seed(2)).bfloat16()
        exact = in_8_bits(x) @ expected.double().t()
        found = matrix.product(x)
        torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-4)
        for n in (1, 3, 7, 16):
            assert torch.equal(matrix.product(x[:n]), found[:n]), "a row's bits depend on others"


@pytest.mark.parametrize("kind", KINDS)
def test_a_type_is_held_in_about_its_own_width(kind: str, kernels: ctypes.CDLL) -> None:
    raw, _ = raw_of(kind)
    raw = RawTensor(raw.type_id, (32, COLUMNS), raw.data[:32])
    matrix = Matrix.from_gguf(kernels, raw)
    assert matrix is not None
    assert raw.data.nbytes <= matrix.packed.nbytes <= 1.2 * raw.data.nbytes


def test_a_row_that_is_not_there_is_refused(kernels: ctypes.CDLL) -> None:
    matrix = Matrix.of(kernels, torch.randn(5, 32))
    for row in (-1, 5):
        with pytest.raises(IndexError):
            matrix.rows(torch.tensor([0, row]))


def test_a_type_without_a_format_is_none(kernels: ctypes.CDLL) -> None:
    blocks = random_blocks("MXFP4", 16, 64)
    raw = RawTensor(int(gguf.GGMLQuantizationType.MXFP4), (16, 64), blocks)
    assert Matrix.from_gguf(kernels, raw) is None


HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, **HEADS}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": False},
    "qwen3": {"head_dim": 128},
    "gemma2": {"sliding_window": 12, "head_dim": 64},
    "gemma3_text": {"sliding_window": 12, "head_dim": 64, "layer_types": ["sliding_attention"] * 3},
    "phi3": {},
    "mistral": {"sliding_window": None},
    "smollm3": {"num_hidden_layers": 4},
    "olmo2": {"tie_word_embeddings": False},
    "granite": {
        "attention_multiplier": 0.2,
        "embedding_multiplier": 1.5,
        "residual_multiplier": 0.8,
        "logits_scaling": 2.0,
    },
}


CASES = [
    (family, kind)
    for i, family in enumerate(FAMILIES)
    for j, kind in enumerate(KINDS)
    if i == 0 or (i + j) % 3 == 0
]
"""Llama in every type; every other family in a third of them, and every type in three families."""


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(("family", "kind"), CASES)
def test_every_family_in_every_type(family: str, kind: str, tmp_path: Path) -> None:
    """Loaded natively; its logits are those of transformers' own reading of the file."""
    sizes = {**WIDE, **FAMILIES[family]}
    # As sharp as they come, models this wide are chaotic: one rounding moves every logit.
    path = write_gguf(tmp_path / "tiny.gguf", kind, family, scale=0.3, **sizes)
    spec = TargetSpec(name="tiny", path=str(path))
    ours = load_target(spec, device="cpu", cache_dir=tmp_path)
    exact = load_target(spec, dtype="float32", device="cpu", cache_dir=tmp_path)
    assert ours.environment()["forward"].startswith("native, q"), ours.provenance
    prompt = list(range(40, 70))
    found = [t.prefill(prompt, t.new_cache(32), Needs()).logits for t in (exact, ours)]
    off = (found[0] - found[1]).std() / found[0].std()
    # Random blocks of IQ4_XS have the widest range of scales, and multiply what 8 bits round off.
    assert 0 < off < (0.3 if kind == "IQ4_XS" else 0.1), f"{off:.1%}"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_says_what_the_model_that_it_was_written_from_says(
    family: str, tmp_path: Path
) -> None:
    sizes = {**WIDE, **FAMILIES[family]}
    path = write_gguf(tmp_path / "tiny.gguf", "F32", family, scale=0.3, **sizes)
    spec = TargetSpec(name="tiny", path=str(path))
    target = load_target(spec, dtype="float32", device="cpu", cache_dir=tmp_path)
    prompt = list(range(40, 70))
    found = target.prefill(prompt, target.new_cache(32), Needs()).logits
    with torch.no_grad():
        model = tiny_model(family, **{"tie_word_embeddings": True, **sizes})
        for parameter in model.parameters():
            parameter.mul_(0.3 if parameter.ndim > 1 else 1.0)
        exact = model(torch.tensor([prompt])).logits[0, -1:]
    off = (found - exact).std() / exact.std()
    assert off < 0.05, f"{off:.1%}"  # its embedding is in 8 bits
