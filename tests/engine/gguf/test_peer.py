"""Files that the peer's converter makes are transformers' models: its folders give equal logits.

The recorded files are small ones of `tests.engine.gguf.record`. With LLAMA_CPP, the folder of the
peer's source, the slow test converts all families anew.
"""

from __future__ import annotations

import contextlib
import json
import lzma
import os
import socket
import subprocess
import time
from pathlib import Path

import gguf
import httpx
import numpy as np
import pytest
import torch

from engine.errors import SourceError, TargetError
from engine.model.gguf.architectures import FAMILIES
from engine.model.gguf.config import can_read, read_gguf_config
from engine.model.gguf.families import NOT_READ
from engine.model.gguf.file import GGUFFile
from tests.engine.gguf.families import (
    MODELS,
    convert,
    load,
    load_folder,
    save_folder,
    some_logits,
)
from tests.engine.gguf.record import GOLDEN

LOGITS: dict[str, list[float]] = json.loads((GOLDEN / "logits.json").read_text())


def recorded(name: str, folder: Path) -> Path:
    """A recorded file, unpacked."""
    path = folder / "model.gguf"
    path.write_bytes(lzma.decompress((GOLDEN / f"{name}.gguf.xz").read_bytes()))
    return path


@pytest.mark.parametrize("name", sorted(LOGITS))
def test_a_converted_file_has_the_logits_of_its_folder(name: str, tmp_path: Path) -> None:
    logits = np.array(some_logits(load(recorded(name, tmp_path))))
    expected = np.array(LOGITS[name])
    assert np.abs(expected).max() > 0.1
    assert np.abs(logits - expected).max() < 1e-3 * np.abs(expected).max()


@pytest.mark.slow
def test_every_family_is_converted_by_the_peer_and_read(tmp_path: Path) -> None:
    peer = os.environ.get("LLAMA_CPP")
    if not peer:
        pytest.skip("LLAMA_CPP does not name the folder of llama.cpp's source")
    for name in MODELS:
        save_folder(name, tmp_path / name)
    convert(Path(peer), tmp_path, list(MODELS))
    for name in MODELS:
        expected = np.array(some_logits(load_folder(tmp_path / name)))
        logits = np.array(some_logits(load(tmp_path / f"{name}.gguf")))
        assert np.abs(logits - expected).max() < 1e-3 * np.abs(expected).max(), name


def _server_logprobs(peer: Path, path: Path, ids: list[int]) -> dict[int, float]:
    """The peer's log-probabilities of the likeliest tokens after a prompt."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = str(peer / "build/bin/llama-server")
    options = ["-m", str(path), "--port", str(port), "-c", "256", "--parallel", "1", "--no-warmup"]
    server = subprocess.Popen(
        [program, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        url = f"http://127.0.0.1:{port}"
        for _ in range(200):
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{url}/health").status_code == 200:
                    break
            if server.poll() is not None:
                raise ChildProcessError(f"the peer does not load {path.name}")
            time.sleep(0.1)
        request = {"prompt": ids, "n_predict": 1, "n_probs": 5, "temperature": -1}
        answer = httpx.post(f"{url}/completion", json=request, timeout=60).json()
        (step,) = answer["completion_probabilities"]
        return {entry["id"]: entry["logprob"] for entry in step["top_logprobs"]}
    finally:
        server.kill()
        server.wait()


DIFFERING = {
    "llama+yarn": "the peer does not read yarn_attn_factor",
    "deepseek_v3": "the converter writes no gating function, and the peer takes softmax",
    "deepseek_v3+yarn": "the converter writes no gating function, and the peer takes softmax",
    "gpt_oss": "the peer rounds YaRN's range to whole frequencies",
    **dict.fromkeys(("bloom", "exaone4", "glm4", "lfm2", "mamba"), "not explained yet"),
}
"""Where the peer's server has other probabilities than transformers, and why."""


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(LOGITS))
def test_the_peers_server_gives_the_same_probabilities(name: str, tmp_path: Path) -> None:
    peer = os.environ.get("LLAMA_CPP")
    if not peer:
        pytest.skip("LLAMA_CPP does not name the folder of llama.cpp's source, built")
    if name in DIFFERING:
        pytest.skip(f"the peer differs: {DIFFERING[name]}")
    path = _rewrite(recorded(name, tmp_path))
    ids = torch.randint(0, 250, (48,), generator=torch.Generator().manual_seed(3)).tolist()
    try:
        theirs = _server_logprobs(Path(peer), path, ids)
    except ChildProcessError as error:
        pytest.skip(str(error))
    with torch.no_grad():
        ours = load(path)(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
    for token_id, logprob in theirs.items():
        assert abs(float(ours[token_id]) - logprob) < 0.02, (token_id, theirs)


def _rewrite(path: Path, **fields: float | str | bool) -> Path:
    """A file's copy with further fields of its architecture, and those of its tensors."""
    file, out = GGUFFile(path), path.with_name("more.gguf")
    writer = gguf.GGUFWriter(out, file.architecture)
    for name in file.field_names:
        key = name.removeprefix(f"{file.architecture}.")
        if name == "general.architecture" or key in fields:
            continue
        value = file.metadata.get(name, file.array(name))
        if isinstance(value, list):
            writer.add_array(name, value)
        else:
            _add(writer, name, value)
    if "tokenizer.ggml.merges" not in file.field_names:
        writer.add_token_merges(["e t"])  # the peer refuses a vocabulary without any
    for key, value in fields.items():
        _add(writer, f"{file.architecture}.{key}", value)
    for name in file.entries:
        writer.add_tensor(name, file.floats(name))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def _add(writer: gguf.GGUFWriter, name: str, value: float | str | bool) -> None:
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
    add = kinds.get(type(value), writer.add_string)
    add(name, value)  # type: ignore[arg-type]


KEYS = sorted(
    key.removeprefix("{arch}.")
    for group in vars(gguf.Keys).values()
    if isinstance(group, type)
    for key in vars(group).values()
    if isinstance(key, str) and key.startswith("{arch}.") and key.count("{") == 1
)
"""Every field of a model that the `gguf` package names."""


def test_no_field_is_ignored_in_silence(tmp_path: Path) -> None:
    """A field that changes nothing is on a list of the table; any other changes or refuses."""
    path = recorded("llama", tmp_path)
    plain, ignored = read_gguf_config(GGUFFile(path)).to_dict(), set()
    for key in KEYS:
        for value in (7, 0.7, "unknown"):
            try:
                config = read_gguf_config(GGUFFile(_rewrite(path, **{key: value}))).to_dict()
            except (SourceError, TargetError, ValueError, TypeError):
                break
            if config != plain:
                break
        else:
            ignored.add(key)
    unused = {"tensor_data_layout", "rope.scaling.finetuned"}
    assert ignored == unused | {"rope.scaling.original_context_length"}


def test_a_tensor_without_a_place_is_refused_by_its_name(tmp_path: Path) -> None:
    path = _rewrite(recorded("llama", tmp_path))
    raw = path.read_bytes().replace(b"blk.0.ffn_norm.weight", b"blk.0.ffn_nrom.weight")
    path.write_bytes(raw)
    with pytest.raises(TargetError, match=r"lacks a tensor for .* and has blk.0.ffn_nrom.weight"):
        load(path)


def test_every_architecture_of_the_format_is_read_or_refused_with_a_reason(tmp_path: Path) -> None:
    names = set(gguf.MODEL_ARCH_NAMES.values())
    assert names == (FAMILIES.keys() & names) | NOT_READ.keys()
    assert not FAMILIES.keys() & NOT_READ.keys()
    assert not any(can_read(name) for name in NOT_READ)
    page = (Path(__file__).parents[3] / "docs/models.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in page for name in (*FAMILIES, *NOT_READ))
    assert all(reason in page for reason in NOT_READ.values())
    path = tmp_path / "bert.gguf"
    writer = gguf.GGUFWriter(path, "bert")
    writer.add_tensor("token_embd.weight", np.zeros((2, 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(SourceError, match="has the architecture bert, which is not read: it is an"):
        read_gguf_config(GGUFFile(path))
