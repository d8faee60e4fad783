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
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.drafters import parse_method
from engine.drafters.heads.mtp import load_layers
from engine.errors import DrafterError, SourceError, TargetError
from engine.model.checkpoints import read_checkpoint, tensor_names
from engine.model.sources import TargetSpec
from engine.model.target import Target
from playground.host.local_drafters import heads_of
from tests.engine.cpu.tiny_gguf import finish, write_gguf
from tests.engine.drafters import judges, test_dspark
from tests.engine.drafters.eagle_heads import write
from tests.engine.drafters.golden import ROOT
from tests.engine.drafters.test_dflash import save_as_published
from tests.engine.drafters.test_eagle_layouts import published
from tests.engine.drafters.test_mtp import save_qwen
from tests.models import build_context, load_tiny, plain_greedy, save_tiny

RECORDED = ROOT / "gguf_drafters"
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SCALED: dict[str, Any] = {
    "norm_before_fc": True,
    "norm_before_residual": True,
    "rope_scaling": LLAMA3,
    "eagle_aux_hidden_state_layer_ids": [2, 3, 6],
    "target_hidden_size": 48,
}


def save_eagle3(folder: Path, **changes: Any) -> None:
    _, tensors, settings = published()
    if changes.get("norm_before_fc"):
        tensors["input_norm.weight"] = 1 + torch.arange(144) / 144
        tensors["embed_tokens.weight"] = (torch.arange(240 * 48) % 7 - 3).view(240, 48) / 8.0
    write(folder, tensors, settings | changes)
    (folder / "m.safetensors").rename(folder / "model.safetensors")


SWA: dict[str, Any] = {"use_swa": True, "swa_window_size": 4}
NESTED: dict[str, Any] = {"dflash_config": {"mask_token_id": 11, "target_layer_ids": [0, 1]} | SWA}
MIXED: dict[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 3,
    "use_sliding_window": True,
    "final_logit_softcapping": 0.5,
}
HEADS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "eagle3": ("Eagle3", save_eagle3),
    "eagle3-scaled": ("Eagle3", partial(save_eagle3, **SCALED)),
    "dflash": ("DFlash", save_as_published),
    "dflash-swa": ("DFlash", partial(save_as_published, **NESTED)),
    "dflash-mixed": ("DFlash", partial(save_as_published, **MIXED)),
    "dspark": ("DSpark", partial(test_dspark.save, architectures=["Qwen3DSparkModel"])),
}
"""By the recorded file's name: the method, and what writes a published folder."""

MTP = "qwen35-mtp"


def target_of(name: str) -> Target:
    return published()[0] if name.startswith("eagle3") else judges.target_of("llama")


def save_head(name: str, folder: Path) -> Path:
    """A published head whose weights are multiples of 1/8, so that its file can be packed."""
    head = folder / name
    HEADS[name][1](head)
    coarse(head / "model.safetensors")
    return head


def drafts(name: str, head: Path) -> list[tuple[int, ...]]:
    """Of the first steps of a text."""
    target = target_of(name)
    config = parse_method({"decoding_type": HEADS[name][0], "speculative_model": str(head)})
    drafter = config.build(build_context(target))
    return [step.tokens for step in judges.write(target, drafter, [40, 53, 98, 53, 57]).steps]


def convert(name: str, folder: Path) -> bytes:
    """The peer's file of a head, or of a target with an MTP layer."""
    target = ROOT / "eagle/eagle3/target"
    if name == MTP:
        return convert_folder(save_mtp(folder / name), folder / name, folder / "out.gguf")
    if not name.startswith("eagle3"):
        target = save_tiny(folder / "target")
    return convert_folder(save_head(name, folder), target, folder / "out.gguf")


def convert_folder(folder: Path, target: Path, out: Path) -> bytes:
    peer = Path(os.environ["LLAMA_CPP"])
    program = Path(__file__).with_name("run_converter.py")
    command = [sys.executable, *map(str, (program, folder, target, out)), "--outtype", "f32"]
    paths = os.pathsep.join(map(str, (peer, peer / "gguf-py")))
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": paths})
    return out.read_bytes()


def recorded(name: str, folder: Path) -> Path:
    path = folder / f"{name}.gguf"
    path.write_bytes(lzma.decompress((RECORDED / f"{name}.gguf.xz").read_bytes()))
    return path


@pytest.mark.parametrize("name", HEADS)
def test_a_converted_head_drafts_what_its_folder_does(name: str, tmp_path: Path) -> None:
    head, file = save_head(name, tmp_path), recorded(name, tmp_path)
    assert drafts(name, file) == drafts(name, head)
    expected = load_file(head / "model.safetensors")
    for tensor, values in read_checkpoint(str(file)).tensors.items():
        own = expected.get(tensor, expected.get(tensor.replace("layers.0.", "midlayer.")))
        assert own is not None and torch.equal(values, own), tensor


def test_the_settings_in_a_head_s_file_matter(tmp_path: Path) -> None:
    of = {name: drafts(name, recorded(name, tmp_path)) for name in HEADS}
    assert of["eagle3"] != of["eagle3-scaled"]
    assert of["dflash"] != of["dflash-swa"] != of["dflash-mixed"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*HEADS, MTP])
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


def coarse(file: Path) -> None:
    """Round a checkpoint's weights to multiples of 1/8, so that its file can be packed."""
    tensors = load_file(file)
    rounded = {key: (8 * t).round() / 8 if t.ndim > 1 else t for key, t in tensors.items()}
    save_file(rounded, file, metadata={"format": "pt"})


def save_mtp(folder: Path) -> Path:
    """A target with a layer for multi-token prediction."""
    coarse(save_qwen(folder, "qwen3_5_text") / "model.safetensors")
    return folder


@torch.inference_mode()
def test_a_target_s_file_drafts_by_its_own_mtp_layer_as_its_folder_does(tmp_path: Path) -> None:
    targets = [load_tiny(save_mtp(tmp_path / "mtp")), load_tiny(recorded(MTP, tmp_path))]
    expected, layers = (load_layers(target, 1).state_dict() for target in targets)
    assert layers.keys() == expected.keys() and len(layers) > 12
    assert all(torch.allclose(layers[name], own, atol=1e-6) for name, own in expected.items())
    config = parse_method({"decoding_type": "MTP", "max_draft_len": 3})
    texts = []
    for target in targets:
        drafter = config.build(build_context(target))
        texts.append(judges.write(target, drafter, [7, 8, 9, 10] * 5, tokens=12))
    assert [step.tokens for step in texts[0].steps] == [step.tokens for step in texts[1].steps]
    assert texts[1].output == plain_greedy(targets[1], [7, 8, 9, 10] * 5, 12)


def test_a_file_without_mtp_layers_or_with_others_is_refused(tmp_path: Path) -> None:
    target = load_tiny(write_gguf(tmp_path / "model.gguf", "Q8_0"))
    with pytest.raises(DrafterError, match="has no MTP layers. Choose another method"):
        load_layers(target, 1)
    path = recorded(MTP, tmp_path)
    target = load_tiny(path)
    path.write_bytes(path.read_bytes().replace(b"blk.3.nextn.hnorm", b"blk.3.nextn.hnarm"))
    with pytest.raises(TargetError, match="other layers for multi-token.*hnarm.*hnorm"):
        load_layers(target, 1)


# ---- refused by what they are


def header(path: Path, architecture: str, *tensors: str, **fields: Any) -> Path:
    """A file with tensors of ones."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("Some Drafter")
    for key, value in fields.items():
        writer.add_uint32(f"{architecture}.{key}", value)
    for name in tensors:
        writer.add_tensor(name, np.ones((2, 32), dtype=np.float32))
    finish(writer)
    return path


READ = (r"an EAGLE-3 drafter \(Some Drafter\)", "a DSpark drafter", "a DFlash drafter")
FILES: Mapping[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
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


@pytest.mark.parametrize("what", [what for what in FILES if what not in READ])
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
    """Replace the recorded files, all or those that are named."""
    RECORDED.mkdir(exist_ok=True)
    for name in sys.argv[1:] or [*HEADS, MTP]:
        with tempfile.TemporaryDirectory() as temp:
            packed = lzma.compress(convert(name, Path(temp)), preset=9)
        (RECORDED / f"{name}.gguf.xz").write_bytes(packed)


if __name__ == "__main__":
    record()
