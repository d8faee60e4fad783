"""Targets with random weights: made once, from a seed; every method that ships one runs on it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

import presets
from engine.drafters.base import BuildContext
from engine.model.loading import load_target
from engine.model.random_weights import NOTE
from engine.model.sources import locate
from engine.model.target import Target
from tests.engine.drafters.judges import write
from tests.models import build_context, plain_greedy, tiny_target

RANDOM = {name: spec for name, spec in presets.targets().items() if spec.random}
UNTRAINED = {name: one for name, one in presets.methods().items() if one.target in RANDOM}


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Target]:
    cache = tmp_path_factory.mktemp("cache")
    return {
        n: load_target(s, dtype="float32", device="cpu", cache_dir=cache) for n, s in RANDOM.items()
    }


def test_a_method_without_a_trained_drafter_ships_a_random_one() -> None:
    kinds = {preset.config.decoding_type for preset in UNTRAINED.values()}
    assert kinds == {"DFlash", "DSpark", "P_EAGLE", "MTP", "MTP_Assistant"}
    assert all(preset.untrained for preset in UNTRAINED.values())


@pytest.mark.parametrize("name", UNTRAINED)
def test_a_random_drafter_drafts_for_its_target(targets: dict[str, Target], name: str) -> None:
    preset = UNTRAINED[name]
    target = targets[preset.target or ""]
    drafter = preset.config.build(BuildContext(target, presets.resolve, lambda spec: target))
    accepted = 0
    for asked in ("Hello there, how are you?", "Say it again."):
        prompt = target.encode_chat([{"role": "user", "content": asked}])
        text = write(target, drafter, prompt, tokens=64)
        assert text.output == plain_greedy(target, prompt, 64)
        accepted += text.num_accepted
    assert accepted > 3 and target.notes == (NOTE,)
    assert target.tokenizer is not None
    assert str(target.tokenizer.decode(text.output)).isascii()


def test_random_weights_are_made_once_and_depend_on_the_seed(tmp_path: Path) -> None:
    spec = RANDOM["tiny-random-gemma-4"]
    assert spec.random is not None
    first = Path(locate(spec, tmp_path).location)
    made_at = (first / "model.safetensors").stat().st_mtime_ns
    assert Path(locate(spec, tmp_path).location) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == made_at
    elsewhere = Path(locate(spec, tmp_path / "other").location)
    another = Path(locate(spec.replace(random=spec.random.replace(seed=1)), tmp_path).location)
    for file in ("model.safetensors", "assistant/model.safetensors"):
        own, same, other = (load_file(folder / file) for folder in (first, elsewhere, another))
        assert all(own[name].equal(same[name]) for name in own)
        assert not own["lm_head.weight"].equal(other["lm_head.weight"])
    assert sorted(one.name for one in (tmp_path / "random").iterdir()) == sorted(
        [first.name, another.name]
    )


@pytest.mark.parametrize("name_or_path", ["", "somebody/a-model"])
def test_weights_are_not_looked_for_in_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name_or_path: str
) -> None:
    (tmp_path / name_or_path / "head").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    target = tiny_target()
    monkeypatch.setattr(target.model.config, "_name_or_path", name_or_path)
    context = replace(build_context(target), locate=lambda name, kind="drafters": f"located {name}")
    assert context.weights("head", "a head") == "located head"
