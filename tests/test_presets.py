"""Every shipped preset loads, names what exists, and bad files are refused by name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

import presets
from engine.drafters import methods
from engine.errors import ConfigError
from engine.model.sources import TargetSpec
from presets.reading import read_yaml


def test_every_preset_loads_under_its_file_name_and_names_what_exists() -> None:
    for kind in ("targets", "methods"):
        files = {file.stem for file in (presets.FOLDER / kind).glob("*.yaml")}
        assert set(getattr(presets, kind)()) == files
    assert next(iter(presets.targets())) == "smollm2-135m-instruct"
    for preset in presets.methods().values():
        assert preset.config.decoding_type in methods()
        assert preset.target is None or preset.target in presets.targets(), preset.name
    for suite in presets.suites().values():
        assert len({prompt.category for prompt in suite.prompts}) >= 2


def test_pyyaml_and_the_playground_read_every_preset_alike() -> None:
    for file in presets.FOLDER.rglob("*.yaml"):
        assert repr(yaml.safe_load(file.read_text("utf-8"))) == repr(read_yaml(file)), file


def test_a_preset_that_says_how_many_nodes_it_has_is_right() -> None:
    said = 0
    for preset in presets.methods().values():
        for nodes in re.findall(
            r"(\d+)(?:-node| drafted nodes)", preset.title + preset.description
        ):
            assert preset.config.draft_shape().num_nodes == int(nodes), preset.name
            said += 1
    assert said >= 8


def test_a_draft_model_named_as_a_corpus_is_the_model() -> None:
    """A corpus is named as the model that wrote it; the model can still draft for a larger one."""
    (corpus,) = (folder.name for folder in (presets.FOLDER / "corpora").iterdir())
    assert corpus in presets.targets()
    assert presets.locate(corpus) == corpus
    assert Path(presets.locate(corpus, "corpora"), "corpus.json").is_file()
    assert presets.resolve(presets.locate(corpus)) is presets.targets()[corpus]


def test_unknown_key_in_a_preset_names_file_and_key(tmp_path: Path) -> None:
    values = {"name": "x", "title": "x", "config": {"decoding_type": "NGram"}, "colour": 1}
    with pytest.raises(ConfigError, match=r"colour is not a setting.*mine\.yaml"):
        presets.method_preset(values, where="mine.yaml")


@pytest.mark.parametrize(
    "title",
    [
        "Qwen2.5 Coder 0.5B Instruct AWQ (qwen2.5-coder-0.5b-instruct-q4_k_m)",
        "Qwen2.5 Coder 0.5B Instruct",
        "qwen2.5-coder-0.5b-instruct",
    ],
)
def test_a_preset_s_drafters_are_offered_for_its_model_in_a_file(title: str) -> None:
    spec = TargetSpec(name="mine", path="mine.gguf", title=title)
    assert presets.same_model(spec) == {"mine", "qwen2.5-coder-0.5b-instruct"}
    other = spec.replace(title="Qwen2.5 Coder 1.5B Instruct (file)")
    assert presets.same_model(other) == {"mine"}
