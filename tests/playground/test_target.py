"""Targets that the page opens by their place, and the drafters for them on the same machine."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

import presets
from engine.errors import ConfigError, SourceError, TargetError
from engine.model.facts import TargetFacts, chat_template_of, facts_of
from engine.model.sources import TargetSpec
from playground.experiments.fastest import methods_to_try
from playground.host.catalog import Catalog, catalog_within
from playground.host.local_drafters import draft_models_of, num_bytes
from playground.host.menu import LOCAL, MethodMenu
from playground.web.target import drafters_of, rows_of
from storage import RunLog
from tests.engine.cpu.tiny_gguf import finish, write_gguf
from tests.playground.tiny import save_tiny_llama


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = save_tiny_llama(tmp_path / "model")
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n# Tiny\nlicense: other\n")
    return folder


def facts(place: Path, dtype: str = "float32") -> TargetFacts:
    spec = presets.resolve(str(place))
    return facts_of(spec, dtype=dtype, device="cpu", cache_dir=place.parent / "cache")


def test_facts_are_those_of_the_loaded_model(folder: Path) -> None:
    found, model = facts(folder), AutoModelForCausalLM.from_pretrained(folder)
    assert found.num_parameters == model.num_parameters()
    assert found.num_bytes == 4 * found.num_parameters
    assert found.context_len == model.config.max_position_embeddings
    assert (found.architecture, found.fault) == ("LlamaForCausalLM", None)
    assert found.licence == "apache-2.0"


def test_what_cannot_load_says_why_before(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 500}))
    with pytest.raises(TargetError, match="a complete checkpoint"):
        facts(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "rwkv", "hidden_size": 64}))
    with pytest.raises(TargetError, match="rolled back"):
        facts(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "t5"}))
    with pytest.raises(TargetError, match="causal language model"):
        facts(folder)


@pytest.mark.parametrize(
    "place", [None, 4, "", "  ", "x" * 2000, "a\0b", "/etc/nothing", "~no-such-user/x"]
)
def test_what_is_no_place_is_one_sentence(place: object) -> None:
    catalog = dataclasses.replace(Catalog.shipped(), may_open=True)
    with pytest.raises((ConfigError, SourceError)):
        catalog.open(place)


def test_only_a_server_that_may_opens_further_targets(folder: Path) -> None:
    closed = catalog_within(Catalog.shipped(), (), ())
    with pytest.raises(ConfigError, match="--target"):
        closed.open(str(folder))
    catalog = catalog_within(Catalog.shipped(), (), (), may_open=True)
    spec = catalog.open(f" {folder} ")
    assert catalog.target(str(folder)) is spec
    assert (spec.title, spec.name) in catalog.target_choices()
    assert str(folder) not in closed.targets, "nor is it on offer anywhere else"
    with pytest.raises(SourceError, match="not among the allowed paths"):
        catalog.resolve(str(folder))


def test_heads_in_an_opened_folder_are_offered_and_may_be_named(folder: Path) -> None:
    shipped = presets.FOLDER / "drafters"
    kinds = {"medusa": "Medusa", "eagle": "Eagle", "eagle3": "Eagle3", "redrafter": "ReDrafter"}
    for name in (*kinds, "draft"):
        (folder / name).symlink_to(shipped / f"{name}-smollm2-135m")
    for kind, own in (("DFlash", "hidden_norm.weight"), ("P_EAGLE", "mask_hidden")):
        (folder / kind).mkdir()
        names = ("fc.weight", "layers.0.self_attn.q_proj.weight", own)
        tensors = {name: torch.zeros(1) for name in names}
        save_file(tensors, folder / kind / "model.safetensors")
    kinds |= {"DFlash": "DFlash", "P_EAGLE": "P_EAGLE"}
    (folder / "notes").mkdir()
    catalog = catalog_within(Catalog.shipped(), (), (), may_open=True)
    before = catalog.method_choices(str(folder))
    spec = catalog.open(str(folder))
    titles = [title for title, _ in catalog.method_choices(spec.name)]
    offered = {Path(key).name: key for _, key in catalog.method_choices(spec.name) if "/" in key}
    assert len(titles) == len(before) + len(kinds) and offered.keys() == kinds.keys()
    for name, key in offered.items():
        assert catalog.method(key).config.decoding_type == kinds[name]
        assert catalog.locate(key) == key
    assert "Medusa · medusa" in drafters_of(catalog, spec)
    assert not [p for p in presets.methods().values() if p.target == spec.name]
    with pytest.raises(SourceError, match="not among the allowed paths"):
        catalog.locate(str(folder / "notes"))


@pytest.mark.parametrize(
    ("name", "file", "title"),
    [
        ("Tiny Llama", "tiny-llama.gguf", "tiny-llama"),
        ("Tiny Llama", "tiny-llama-q4_k_m.gguf", "Tiny Llama (tiny-llama-q4_k_m)"),
        ("Tiny Llama", "model.gguf", "Tiny Llama (folder/model)"),
        ("", "ggml-model-q4_0.gguf", "folder/ggml-model-q4_0"),
    ],
)
def test_a_gguf_file_is_titled_by_its_name_and_its_file(
    name: str, file: str, title: str, tmp_path: Path
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    path = write_gguf(folder / file, about={"general.name": name})
    assert presets.resolve(str(path)).title == title
    assert presets.resolve(str(folder)).title == title, "a folder with one file is that file"


def test_targets_of_one_title_are_told_apart(tmp_path: Path) -> None:
    catalog = dataclasses.replace(Catalog.shipped(), may_open=True)
    for place in ("a/x", "b/x", "b/y"):
        (tmp_path / place).mkdir(parents=True)
        catalog.open(str(write_gguf(tmp_path / place / "some.gguf")))
    labels = [label for label, name in catalog.target_choices() if name.startswith(str(tmp_path))]
    assert len(set(labels)) == 3 and labels[2] == "some, y"
    assert [label.startswith("some, x, /") for label in labels] == [True, True, False]


@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_the_card_of_a_gguf_file_says_what_its_header_says(dtype: str, tmp_path: Path) -> None:
    about = {"general.name": "Tiny", "general.license": "mit", "tokenizer.chat_template": "{}"}
    path = write_gguf(tmp_path / "file.gguf", "Q4_1", about=about)
    spec, found = presets.resolve(str(path)), facts(path, dtype)
    rows = dict(rows_of(Catalog.shipped(), spec, found))
    assert (rows["model"], rows["licence"]) == ("Tiny (file)", "mit")
    assert "Q4_1" in rows["quantization"]
    assert "any small model can draft for it (by text" in rows["drafters"]
    if dtype == "float32":
        assert found.num_bytes == 4 * found.num_parameters and "as float32" in rows["memory"]
    elif "speed" not in rows:  # the kernels can be compiled here
        assert found.num_bytes == path.stat().st_size and "loaded as q4" in rows["memory"]
    assert chat_template_of(spec) == "{}"
    assert chat_template_of(presets.resolve(str(write_gguf(tmp_path / "base.gguf")))) == ""
    assert chat_template_of(TargetSpec(name="hub", hub="owner/model")) is None


def test_a_quantized_file_keeps_its_bits_whatever_is_asked(tmp_path: Path) -> None:
    four, eight = (write_gguf(tmp_path / f"{kind}.gguf", kind) for kind in ("Q4_1", "Q8_0"))
    assert (facts(four, "q8").dtype, facts(four, "q8").fault) == ("q4", None)
    with pytest.raises(ConfigError, match=r"in 8 bits\. Choose q8, or auto\."):
        facts(eight, "q4")


def test_what_the_kernels_do_not_run_is_said_before_it_loads(tmp_path: Path) -> None:
    found = facts(write_gguf(tmp_path / "file.gguf", family="starcoder2"), "auto")
    assert found.fault is None and found.slow and "Starcoder2" in found.slow


# ---- smaller models on the machine draft, of whatever vocabulary


def gguf(file: Path, mib: int, **about: str) -> Path:
    """A model of this size, as its header has it."""
    write_gguf(file, about=about)
    with file.open("r+b") as stream:
        stream.truncate(mib << 20)
    return file


def models(tmp_path: Path) -> tuple[Path, Path]:
    """A target, and a draft model in the same folder that is small enough."""
    gguf(tmp_path / "half-and-more.gguf", 501)
    small = gguf(tmp_path / "small.gguf", 90)
    return gguf(tmp_path / "target.gguf", 1000), small


def test_models_of_half_the_size_draft_by_text(tmp_path: Path) -> None:
    target, small = models(tmp_path)
    spec = TargetSpec.of_path_or_hub(str(target))
    others = Catalog.shipped().targets
    found = draft_models_of(spec, others.values())
    drafters = [preset.config.model_dump()["speculative_model"] for preset in found]
    assert drafters == [str(small), "smollm2-135m-instruct"]
    assert {preset.config.model_dump()["vocabulary"] for preset in found} == {"text"}
    tiny = TargetSpec.of_path_or_hub(str(small))
    assert draft_models_of(tiny, others.values()) == []


def test_only_whole_models_that_load_are_offered(tmp_path: Path) -> None:
    target, small = models(tmp_path)
    write_gguf(tmp_path / "adapter.gguf", about={"general.type": "adapter"})
    (tmp_path / "damaged.gguf").write_bytes(b"GGUF")
    projector = GGUFWriter(tmp_path / "mmproj-model.gguf", "clip")
    projector.add_tensor("v.patch_embd.weight", np.zeros((4, 4), np.float32))
    finish(projector)
    for model, mib in (("fits", 100), ("large", 300)):
        for part in (1, 2):
            file = tmp_path / f"{model}-{part:05}-of-00002.gguf"
            writer = GGUFWriter(file, "llama")
            for field, number in (("count", 2), ("no", part - 1)):
                writer.add_uint16(f"split.{field}", number)
            writer.add_tensor(f"blk.{part}.weight", np.zeros((4, 4), np.float32))
            finish(writer)
            with file.open("r+b") as stream:
                stream.truncate(mib << 20)
    found = draft_models_of(TargetSpec.of_path_or_hub(str(target)), ())
    names = [Path(one.config.model_dump()["speculative_model"]).name for one in found]
    assert names == [small.name, "fits-00001-of-00002.gguf"]
    split = TargetSpec.of_path_or_hub(str(tmp_path / "large-00001-of-00002.gguf"))
    assert num_bytes(split) == 600 << 20


def test_they_are_in_the_menu_and_tried_by_find_the_fastest(tmp_path: Path, log: RunLog) -> None:
    target, small = models(tmp_path)
    catalog = catalog_within(Catalog.shipped(), [str(target)], ())
    assert catalog.resolve(str(small)).path == str(small)
    labels = [label for label, _ in MethodMenu(catalog, log).choices(str(target))]
    mine = [label for label in labels if label.endswith(LOCAL)]
    assert len(mine) == 2 and "by text" in mine[0]

    for num in (2, 1):
        tried = methods_to_try(catalog, str(target)).values()
        assert sum(key.startswith("local ") for key in tried) == num
        small.unlink(missing_ok=True)
