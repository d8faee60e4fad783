"""Codes read from a GGUF file equal what the format's own package makes of them."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from engine.errors import SourceError
from engine.kernels.cpu.gguf import BLOCK, GGUFFile

KINDS = {"Q4_0": 4, "Q4_1": 4, "Q4_K": 4, "Q8_0": 8}
ROWS, COLUMNS = 5, 512


@pytest.fixture
def matrices() -> dict[str, np.ndarray]:
    """Random bytes of every type: any byte is a valid code or scale; only floats must be finite."""
    rng = np.random.default_rng(0)
    found = {}
    for kind in (*KINDS, "Q6_K"):
        weights, size = gguf.GGML_QUANT_SIZES[getattr(gguf.GGMLQuantizationType, kind)]
        raw = rng.integers(0, 256, (ROWS, COLUMNS // weights, size), dtype=np.uint8)
        floats = rng.standard_normal((ROWS, COLUMNS // weights, 2)).astype(np.float16)
        raw[..., :4] = floats.view(np.uint8)
        found[kind] = raw.reshape(ROWS, -1)
    return found


@pytest.fixture
def file(matrices: dict[str, np.ndarray], tmp_path: Path) -> GGUFFile:
    path = tmp_path / "some.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("some")
    writer.add_token_list(["a", "", "ü" * 40])
    writer.add_array("numbers", [1, 2, 3])
    writer.add_array("nested", [["x", "yz"], ["w"]])
    writer.add_float32("theta", 0.5)
    writer.add_bool("flag", True)
    for kind, raw in matrices.items():
        writer.add_tensor(kind, raw, raw_dtype=getattr(gguf.GGMLQuantizationType, kind))
    writer.add_tensor("floats", np.ones((3, 64), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GGUFFile(path)


@pytest.mark.parametrize("kind", KINDS)
def test_values_equal_the_formats_own_package(
    kind: str, file: GGUFFile, matrices: dict[str, np.ndarray]
) -> None:
    blocks = file.matrix(kind)
    assert blocks is not None
    expected = gguf.quants.dequantize(matrices[kind], getattr(gguf.GGMLQuantizationType, kind))
    assert torch.equal(blocks.dequantize(), torch.from_numpy(expected))
    assert (
        blocks.integers.shape == (ROWS, COLUMNS)
        and int(blocks.integers.max()) == 2**blocks.bits - 1
    )
    assert blocks.bits == KINDS[kind]
    assert blocks.scale.shape == blocks.minimum.shape == (ROWS, COLUMNS // BLOCK)


@pytest.mark.parametrize("name", ["Q6_K", "floats", "nowhere"])
def test_what_is_not_a_matrix_in_codes_is_none(name: str, file: GGUFFile) -> None:
    assert file.matrix(name) is None


def test_the_header_is_read_without_its_arrays(file: GGUFFile) -> None:
    assert file.names == (*KINDS, "Q6_K", "floats")
    assert file.metadata["general.name"] == "some"
    assert file.metadata["theta"] == 0.5 and file.metadata["flag"] == 1
    assert "numbers" not in file.metadata


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda data: b"GGML" + data[4:], "does not begin with GGUF"),
        (lambda data: data[:4] + b"\x07" + data[5:], "version is not 2 or 3"),
        (lambda data: data[:60], "could not be read as a GGUF file"),
        (lambda data: b"", "could not be read"),
    ],
)
def test_a_damaged_file_is_one_sentence(file: GGUFFile, damage: object, words: str) -> None:
    assert callable(damage)
    broken = file.path.with_name("broken.gguf")
    broken.write_bytes(damage(file.path.read_bytes()))
    with pytest.raises(SourceError, match=words):
        GGUFFile(broken)
