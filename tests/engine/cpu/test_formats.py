"""Matrices as GGUF files have them: values equal those of the format's own package."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from engine.kernels.cpu.operators import (
    CHUNK,
    GGML_FORMATS,
    HUGE_PAGE,
    LINE,
    Matrix,
    aligned_zeros,
)
from engine.model.gguf.file import GGML_TYPES, RawTensor
from tests.engine.cpu.targets import deviation, in_8_bits, prompt_logits
from tests.engine.cpu.tiny_gguf import random_blocks, write_gguf
from tests.models import load_tiny, tiny_model

STATM = Path("/proc/self/statm")
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
        row_bytes = matrix.packed.nbytes / 48  # whole blocks of 16
        assert raw.data.shape[1] <= row_bytes <= 1.2 * raw.data.shape[1]


def test_a_row_that_is_not_there_is_refused(kernels: ctypes.CDLL) -> None:
    matrix = Matrix.of(kernels, torch.randn(5, 32))
    for row in (-1, 5):
        with pytest.raises(IndexError):
            matrix.rows(torch.tensor([0, row]))


def test_a_type_without_a_kernel_is_not_packed(kernels: ctypes.CDLL) -> None:
    blocks = random_blocks("TQ1_0", 16, 256)
    raw = RawTensor(int(gguf.GGMLQuantizationType.TQ1_0), (16, 256), blocks)
    assert Matrix.from_gguf(kernels, raw) is None


HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, **HEADS}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": False},
    "qwen3": {"head_dim": 128},
    "gemma2": {"sliding_window": 12, "head_dim": 64, "query_pre_attn_scalar": 64},
    "gemma3_text": {
        "sliding_window": 12,
        "head_dim": 64,
        "query_pre_attn_scalar": 64,
        "layer_types": ["sliding_attention"] * 3,
    },
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
    ours, exact = load_tiny(path, "auto"), load_tiny(path)
    assert ours.environment()["forward"].startswith("native, q"), ours.provenance
    off = deviation(prompt_logits(ours), prompt_logits(exact))
    # Random blocks of IQ4_XS have the widest range of scales, and multiply what 8 bits round off.
    assert 0 < off < (0.3 if kind == "IQ4_XS" else 0.1), f"{off:.1%}"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_says_what_the_model_that_it_was_written_from_says(
    family: str, tmp_path: Path
) -> None:
    sizes = {**WIDE, **FAMILIES[family]}
    path = write_gguf(tmp_path / "tiny.gguf", "F32", family, scale=0.3, **sizes)
    with torch.no_grad():
        model = tiny_model(family, **{"tie_word_embeddings": True, **sizes})
        for parameter in model.parameters():
            parameter.mul_(0.3 if parameter.ndim > 1 else 1.0)
        exact = model(torch.arange(40, 70)[None]).logits[0, -1:]
    off = deviation(prompt_logits(load_tiny(path)), exact)
    assert off < 0.05, f"{off:.1%}"  # its embedding is in 8 bits


# ---- memory of packed matrices


def test_allocations_are_zeroed_disjoint_and_aligned() -> None:
    pieces = [aligned_zeros(size) for size in (1, 100, LINE, CHUNK // 2, CHUNK // 2 + 1, 0, 7)]
    assert all(piece.dtype == torch.uint8 and not piece.any() for piece in pieces)
    for number, piece in enumerate(pieces, start=1):
        piece.fill_(number)
    assert all(bool((piece == number).all()) for number, piece in enumerate(pieces, start=1))
    assert all(piece.data_ptr() % LINE == 0 for piece in pieces)
    assert aligned_zeros(CHUNK).data_ptr() % HUGE_PAGE == 0


@pytest.mark.skipif(not STATM.is_file(), reason="no /proc here")
def test_freed_weights_give_their_memory_back() -> None:
    def resident() -> int:
        return int(STATM.read_text().split()[1]) * mmap.PAGESIZE

    piece = aligned_zeros(2 * CHUNK).fill_(1)
    held = resident()
    del piece
    assert resident() < held - CHUNK
