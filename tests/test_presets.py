"""Every shipped preset loads, names what exists, and bad files are refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

import presets
from engine.drafters import methods
from engine.errors import ConfigError


def test_every_target_preset_loads_under_its_file_name() -> None:
    files = {f.stem for f in (presets.FOLDER / "targets").glob("*.yaml")}
    assert set(presets.targets()) == files
    assert next(iter(presets.targets())) == "smollm2-135m-instruct"


def test_every_method_preset_loads_and_names_a_known_target() -> None:
    files = {f.stem for f in (presets.FOLDER / "methods").glob("*.yaml")}
    assert set(presets.methods()) == files
    for preset in presets.methods().values():
        assert preset.config.decoding_type in methods()
        assert preset.target is None or preset.target in presets.targets(), preset.name


def test_every_suite_has_prompts_in_several_categories() -> None:
    for suite in presets.suites().values():
        assert len({prompt.category for prompt in suite.prompts}) >= 2


def test_unknown_key_in_a_preset_names_file_and_key(tmp_path: Path) -> None:
    values = {"name": "x", "title": "x", "config": {"decoding_type": "NGram"}, "colour": 1}
    with pytest.raises(ConfigError, match=r"colour is not a setting.*mine\.yaml"):
        presets.method_preset(values, where="mine.yaml")


def test_every_method_has_a_default_for_every_setting_and_describes_it() -> None:
    for cls in methods().values():
        cls()
        for name, field in cls.model_fields.items():
            if name != "decoding_type":
                assert field.description or name == "adaptive", f"{cls.__name__}.{name}"
