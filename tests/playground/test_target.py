"""Targets that the page opens by their place: who may, what is said of them before they load."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

import presets
from engine.errors import ConfigError, PlaygroundError, SourceError
from engine.model.facts import facts_of
from engine.model.sources import TargetSpec
from playground.host.catalog import Catalog
from playground.host.reach import catalog_within
from playground.web.target import drafters_of
from tests.playground.tiny import save_tiny_llama


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = save_tiny_llama(tmp_path / "model")
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n# Tiny\nlicense: other\n")
    return folder


def facts(folder: Path) -> Any:
    spec = TargetSpec.of_path_or_hub(str(folder))
    return facts_of(spec, dtype="float32", device="cpu", cache_dir=folder.parent / "cache")


def test_facts_are_those_of_the_loaded_model(folder: Path) -> None:
    found, model = facts(folder), AutoModelForCausalLM.from_pretrained(folder)
    assert found.num_parameters == model.num_parameters()
    assert found.num_bytes == 4 * found.num_parameters
    assert found.context_len == model.config.max_position_embeddings
    assert (found.architecture, found.licence, found.fault) == (
        "LlamaForCausalLM",
        "apache-2.0",
        None,
    )


def test_what_cannot_load_says_why_before(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 500}))
    assert "a complete checkpoint" in (facts(folder).fault or "")
    (folder / "config.json").write_text(json.dumps({"model_type": "rwkv", "hidden_size": 64}))
    assert "rolled back" in (facts(folder).fault or "")
    (folder / "config.json").write_text(json.dumps({"model_type": "t5"}))
    with pytest.raises(PlaygroundError, match="causal language model"):
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
