"""Every shipped choice tree loads, says where it is from, and is the tree that it claims to be."""

from __future__ import annotations

import json

import pytest
import yaml

import presets
from engine.drafters.eagle.methods import MC_SIM_7B_63
from engine.drafters.heads.medusa import MedusaConfig
from engine.errors import ConfigError
from playground.deploy.trees import parse_tree
from presets import TreePreset
from tests.engine.drafters.golden import ROOT

FOLDER = presets.FOLDER / "trees"


def test_every_tree_loads_under_its_file_name_and_is_read_as_text() -> None:
    assert set(presets.trees()) == {file.stem for file in FOLDER.glob("*.yaml")}
    for name, preset in presets.trees().items():
        assert preset.title and preset.source, name
        text = (FOLDER / f"{name}.yaml").read_text()
        assert parse_tree(text, read_yaml=yaml.safe_load) == preset.tree
    sizes = [len(preset.tree) for preset in presets.trees().values()]
    assert sizes == sorted(sizes)


def test_published_trees_are_those_of_the_reference_s_own_code() -> None:
    medusa = json.loads((ROOT / "medusa/case_a/expected.json").read_text())["trees"]
    eagle = json.loads((ROOT / "eagle/eagle1/expected.json").read_text())["trees"]
    ours = presets.trees()
    published = {
        "mc_sim_7b_63-medusa": medusa["mc_sim_7b_63"]["choices"],
        "vicuna_7b_stage1-medusa": medusa["vicuna_7b_stage1"]["choices"],
        "trtllm-documented-9": medusa["trtllm_9"]["choices"],
        "mc_sim_7b_63-eagle": eagle[0]["choices"],
    }
    for name, choices in published.items():
        assert set(ours[name].candidates) == {tuple(path) for path in choices}, name


def test_one_name_with_two_meanings_is_two_presets() -> None:
    ours = presets.trees()
    medusa, eagle = ours["mc_sim_7b_63-medusa"], ours["mc_sim_7b_63-eagle"]
    assert (len(medusa.tree), len(eagle.tree)) == (63, 25)
    assert eagle.candidates == MC_SIM_7B_63.paths
    assert ours["trtllm-documented-9"].candidates == MedusaConfig().medusa_choices


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"candidates": [[0, 0, 0], [0]]}, r"gap.*\(in mine\.yaml\)"),
        ({"colour": 1}, "colour is not a setting of TreePreset"),
        ({"name": "Not A Name"}, "name must match"),
    ],
)
def test_a_bad_file_is_refused_by_name(change: dict[str, object], message: str) -> None:
    good = {"name": "mine", "title": "Mine", "candidates": [[0], [1]]}
    assert TreePreset.parse(good, where="mine.yaml").measured is None
    with pytest.raises(ConfigError, match=message):
        TreePreset.parse({**good, **change}, where="mine.yaml")
