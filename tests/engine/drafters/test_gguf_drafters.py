"""Drafters in GGUF files, converted by the peer, draft what their published folders do.

The recorded files are the peer's conversions of heads that the tests make anew. With LLAMA_CPP, the
folder of its source, they are converted again; to record them, run this module with it.
"""

from __future__ import annotations

import lzma
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from engine.errors import DrafterError, SourceError
from engine.model.checkpoints import read_checkpoint, tensor_names
from engine.model.sources import TargetSpec
from playground.host.local_drafters import heads_of
from tests.engine.cpu.tiny_gguf import finish, write_gguf
from tests.engine.drafters.eagle_heads import write
from tests.engine.drafters.golden import ROOT
from tests.engine.drafters.test_eagle_layouts import draft, published
from tests.models import load_tiny

RECORDED = ROOT / "gguf_drafters"
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "eagle3": {},
    "eagle3-scaled": {
        "norm_before_fc": True,
        "norm_before_residual": True,
        "rope_scaling": LLAMA3,
        "eagle_aux_hidden_state_layer_ids": [2, 3, 6],
        "target_hidden_size": 48,
    },
}


def save_head(name: str, folder: Path) -> Path:
    """A published head whose weights are multiples of 1/8, so that its file can be packed."""
    _, tensors, settings = published()
    coarse = {key: (8 * t).round() / 8 if t.ndim > 1 else t for key, t in tensors.items()}
    if VARIANTS[name].get("norm_before_fc"):
        coarse["input_norm.weight"] = 1 + torch.arange(144) / 144
        coarse["embed_tokens.weight"] = (torch.arange(240 * 48) % 7 - 3).view(240, 48) / 8.0
    head = write(folder / name, coarse, settings | VARIANTS[name])
    (head / "m.safetensors").rename(head / "model.safetensors")
    return head


def convert(name: str, folder: Path) -> bytes:
    """The peer's file of a head."""
    peer = Path(os.environ["LLAMA_CPP"])
    program = Path(__file__).with_name("run_converter.py")
    head, target, out = save_head(name, folder), ROOT / "eagle/eagle3/target", folder / "out.gguf"
    command = [sys.executable, program, head, target, out, "--outtype", "f32"]
    paths = os.pathsep.join(map(str, (peer, peer / "gguf-py")))
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": paths})
    return out.read_bytes()


def recorded(name: str, folder: Path) -> Path:
    path = folder / f"{name}.gguf"
    path.write_bytes(lzma.decompress((RECORDED / f"{name}.gguf.xz").read_bytes()))
    return path


@pytest.mark.parametrize("name", VARIANTS)
def test_a_converted_head_drafts_what_its_folder_does(name: str, tmp_path: Path) -> None:
    target, *_ = published()
    head, file = save_head(name, tmp_path), recorded(name, tmp_path)
    assert draft(target, file)[0] == draft(target, head)[0]
    expected = read_checkpoint(str(head)).tensors
    for tensor, values in read_checkpoint(str(file)).tensors.items():
        own = expected.get(tensor.replace("layers.0.", "midlayer."))
        assert own is not None and torch.equal(values, own), tensor


def test_each_setting_of_a_head_s_file_matters(tmp_path: Path) -> None:
    target, *_ = published()
    drafts = {name: draft(target, recorded(name, tmp_path))[0] for name in VARIANTS}
    assert drafts["eagle3"] != drafts["eagle3-scaled"]


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_the_recorded_files_are_the_peer_s(name: str, tmp_path: Path) -> None:
    if not os.environ.get("LLAMA_CPP"):
        pytest.skip("LLAMA_CPP does not name the folder of llama.cpp's source")
    assert convert(name, tmp_path) == recorded(name, tmp_path).read_bytes()


def test_heads_beside_a_target_s_file_are_offered_with_their_size(tmp_path: Path) -> None:
    small = write_gguf(tmp_path / "small.gguf", "Q8_0")
    assert heads_of(TargetSpec.of_path_or_hub(str(small))) == []
    head = recorded("eagle3", tmp_path)
    header(tmp_path / "dflash-2.gguf", "dflash", "selector_hidden.weight")
    assert heads_of(TargetSpec.of_path_or_hub(str(small))) == [], "for a target 64 wide"
    wide = header(tmp_path / "wide.gguf", "llama", "token_embd.weight", embedding_length=48)
    for target in (wide, tmp_path):
        (offer,) = heads_of(TargetSpec.of_path_or_hub(str(target)))
        assert offer.title == "EAGLE-3 · eagle3.gguf (0.1 MiB)"
        assert offer.config.model_dump()["speculative_model"] == str(head)


# ---- refused by what they are


def header(path: Path, architecture: str, *tensors: str, **fields: int) -> Path:
    """A file with tensors of ones."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("Some Drafter")
    for key, value in fields.items():
        writer.add_uint32(f"{architecture}.{key}", value)
    for name in tensors:
        writer.add_tensor(name, np.ones((2, 32), dtype=np.float32))
    finish(writer)
    return path


FILES: Mapping[str, tuple[tuple[Any, ...], dict[str, int]]] = {
    r"an EAGLE-3 drafter \(Some Drafter\)": (("eagle3", "fc.weight"), {}),
    "a DFlash-2 drafter, with grouped conv": (("dflash", "selector_hidden.weight"), {}),
    "a DSpark drafter with DeepSeek V4's": (
        ("dflash", "fc.weight"),
        {"hyper_connection.count": 4},
    ),
    "a DSpark drafter": (("dflash", "fc.weight", "markov_w1.weight"), {}),
    "a DFlash drafter": (("dflash", "fc.weight"), {}),
    "an assistant of Gemma 4": (
        ("gemma4-assistant", "nextn.pre_projection.weight"),
        {"block_count": 4, "nextn_predict_layers": 4},
    ),
    "a file of multi-token prediction layers": (
        ("qwen35", "token_embd.weight", "blk.2.nextn.eh_proj.weight"),
        {"block_count": 3, "nextn_predict_layers": 1},
    ),
}


@pytest.mark.parametrize("what", FILES)
def test_a_drafter_is_refused_as_a_target_by_what_it_is(what: str, tmp_path: Path) -> None:
    args, fields = FILES[what]
    path = header(tmp_path / "some.gguf", *args, **fields)
    with pytest.raises(SourceError, match=f"some.gguf is {what}.*not a target. Choose the model"):
        load_tiny(path)


@pytest.mark.parametrize("what", [what for what in FILES if "EAGLE-3" not in what])
def test_a_drafter_that_is_not_read_is_refused_by_what_it_is(what: str, tmp_path: Path) -> None:
    args, fields = FILES[what]
    path = header(tmp_path / "some.gguf", *args, **fields)
    with pytest.raises(DrafterError, match=f"some.gguf is {what}.*, which is not read from a GGUF"):
        tensor_names(str(path))


def test_what_is_no_drafter_or_has_more_than_one_is_refused(tmp_path: Path) -> None:
    model = write_gguf(tmp_path / "model.gguf", "Q8_0")
    with pytest.raises(DrafterError, match="is a model of the architecture llama, not the weights"):
        read_checkpoint(str(model))
    path = header(tmp_path / "more.gguf", "eagle3", "fc.weight", "blk.0.attn_sinks.weight")
    with pytest.raises(
        DrafterError, match="has blk.0.attn_sinks.weight, which no such drafter has"
    ):
        read_checkpoint(str(path))
    for name in ("d2t", "blk.0.attn_q.weight"):
        path = header(tmp_path / f"{name}.gguf", "eagle3", "fc.weight", name)
        with pytest.raises(DrafterError, match=f"{name} does not fit its fields"):
            read_checkpoint(str(path))
    path = header(tmp_path / "field.gguf", "eagle3", "fc.weight", attn_residual=3)
    with pytest.raises(SourceError, match="'eagle3.attn_residual' = 3, which is not read"):
        read_checkpoint(str(path))


def record() -> None:
    """Replace the recorded files."""
    RECORDED.mkdir(exist_ok=True)
    for name in VARIANTS:
        with tempfile.TemporaryDirectory() as temp:
            packed = lzma.compress(convert(name, Path(temp)), preset=9)
        (RECORDED / f"{name}.gguf.xz").write_bytes(packed)


if __name__ == "__main__":
    record()
