"""The header of a GGUF file, and its tensors, as the format's own package reads them."""

from __future__ import annotations

import os
from pathlib import Path

import gguf
import numpy as np
import pytest

from engine.errors import SourceError
from engine.model.gguf.file import GGUFFile
from tests.engine.cpu.tiny_gguf import finish, random_blocks

KINDS = ("Q4_0", "Q4_K", "Q8_0", "Q6_K")
ROWS, COLUMNS = 5, 512


@pytest.fixture
def matrices() -> dict[str, np.ndarray]:
    return {kind: random_blocks(kind, ROWS, COLUMNS) for kind in KINDS}


@pytest.fixture
def file(matrices: dict[str, np.ndarray], tmp_path: Path) -> GGUFFile:
    path = tmp_path / "some.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("some")
    writer.add_token_list(["a", "", "ü" * 40])
    writer.add_array("numbers", [1, 2, 3])
    writer.add_float32("theta", 0.5)
    writer.add_bool("flag", True)
    for kind, raw in matrices.items():
        writer.add_tensor(kind, raw, raw_dtype=getattr(gguf.GGMLQuantizationType, kind))
    writer.add_tensor("floats", np.ones((3, 64), dtype=np.float32))
    finish(writer)
    return GGUFFile(path)


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_equal_those_written_to_the_file(
    kind: str, file: GGUFFile, matrices: dict[str, np.ndarray]
) -> None:
    raw = file.tensor(kind)
    assert raw.shape == (ROWS, COLUMNS)
    assert np.array_equal(raw.data, matrices[kind])
    expected = gguf.quants.dequantize(matrices[kind], gguf.GGMLQuantizationType[kind])
    assert np.array_equal(file.floats(kind), expected)


def test_a_file_that_is_shortened_after_its_header_was_read_is_refused(file: GGUFFile) -> None:
    os.truncate(file.path, file.num_bytes - 1)
    assert file.floats("Q6_K").shape == (ROWS, COLUMNS)
    with pytest.raises(SourceError, match="some.gguf was shortened while it was loaded. Load it"):
        file.tensor("floats")
    assert file.array("tokenizer.ggml.tokens") == ["a", "", "ü" * 40], "the header is kept"


def test_a_file_that_is_replaced_after_its_header_was_read_is_read_to_its_end(
    file: GGUFFile, matrices: dict[str, np.ndarray]
) -> None:
    other = file.path.with_suffix(".new")
    other.write_bytes(bytes(file.num_bytes))
    other.replace(file.path)
    assert np.array_equal(file.tensor("Q6_K").data, matrices["Q6_K"])


@pytest.mark.parametrize(
    ("most", "fault"), [(99, "its header has over 0 MiB"), (1 << 20, "it ends in the middle")]
)
def test_a_header_is_read_up_to_a_limit(
    most: int, fault: str, file: GGUFFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.model.gguf.file.MAX_HEADER_BYTES", most)
    if fault.startswith("it ends"):
        os.truncate(file.path, 200)
    with pytest.raises(SourceError, match=f"could not be read as a GGUF file: {fault}"):
        GGUFFile(file.path)


def test_the_header_has_every_field_and_tensor(file: GGUFFile) -> None:
    assert tuple(file.entries) == (*KINDS, "floats")
    assert file.metadata["general.name"] == "some"
    assert file.metadata["theta"] == 0.5 and file.metadata["flag"] is True
    assert "numbers" not in file.metadata and file.array("numbers") == [1, 2, 3]
    assert file.array("tokenizer.ggml.tokens") == ["a", "", "ü" * 40]
    assert file.array("nowhere") == []
    assert file.bits == 4 and file.matrix_types == (*KINDS, "F32")
    assert file.weights_by_type[gguf.GGMLQuantizationType.Q6_K] == ROWS * COLUMNS


@pytest.mark.parametrize("first", ["part0", None])
def test_a_model_in_several_files_is_one(first: str | None, tmp_path: Path) -> None:
    """The first of them may have the header only."""
    paths = [tmp_path / f"m-{i + 1:05}-of-00002.gguf" for i in range(2)]
    parts = list(filter(None, (first, "part1")))
    for path, name in zip(paths, (first, "part1"), strict=True):
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_uint16("split.count", 2)
        if name:
            writer.add_tensor(name, np.full((2, 32), parts.index(name), dtype=np.float32))
        finish(writer)
    whole = GGUFFile(paths[0])
    assert [*whole.entries] == parts and whole.floats("part1").min() == len(parts) - 1
    with pytest.raises(SourceError, match="Give the first, whose name ends with -00001-of-00002"):
        GGUFFile(paths[1])
    paths[1].unlink()
    with pytest.raises(SourceError, match="m-00002-of-00002"):
        GGUFFile(paths[0])
    if first is None:
        paths[1].write_bytes(paths[0].read_bytes())
        with pytest.raises(SourceError, match="it has no tensors"):
            GGUFFile(paths[0])
