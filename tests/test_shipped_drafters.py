"""The shipped drafters: small, documented, named by presets, and at home on the embedded model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import presets
from engine.config import Limits
from engine.decode import decode
from engine.drafters.base import BuildContext
from engine.metrics import Tally
from engine.model.loading import load_target
from engine.model.sources import TargetSpec
from engine.model.target import Target
from engine.steps import End
from engine.tuning.controller import build_drafter
from playground.host import paths

EMBEDDED = "smollm2-135m-instruct"
FOLDERS = sorted((presets.FOLDER / "drafters").iterdir())
NAMES = [name for name, p in presets.methods().items() if p.target == EMBEDDED]

QUESTIONS = (
    "What are school uniforms?",
    "How many legs do three spiders and two cats have together?",
    "Write a short letter that thanks a neighbour for her help.",
)


@pytest.fixture(scope="module")
def embedded() -> Iterator[Target]:
    target = load_target(
        presets.resolve(EMBEDDED), dtype="float32", device="cpu", cache_dir=paths.cache_dir()
    )
    yield target
    target.close()


def test_all_weights_together_stay_small() -> None:
    files = [f for folder in FOLDERS for f in folder.rglob("*") if f.is_file()]
    assert sum(f.stat().st_size for f in files if f.suffix == ".safetensors") <= 60_000_000


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_every_drafter_has_a_card_and_a_preset(folder: Path) -> None:
    card = json.loads((folder / "card.json").read_text())
    assert card["target"] == EMBEDDED and card["steps"] > 0 and card["dtype"] == "bfloat16"
    assert card["held_out"]["overall"]["num_tokens"] > 0 and card["rank_rates"]
    configs = [preset.config for preset in presets.methods().values()]
    assert folder.name in {getattr(config, "speculative_model", None) for config in configs}


def test_a_shipped_drafter_is_found_by_its_name_and_other_texts_stay() -> None:
    for folder in FOLDERS:
        assert presets.locate(folder.name) == str(folder)
    for other in ("", "drafters", "yuhuili/EAGLE-Vicuna-7B-v1.3", "../drafters", str(FOLDERS[0])):
        assert presets.locate(other) == other


@pytest.mark.network
@pytest.mark.parametrize("name", NAMES)
def test_every_shipped_drafter_drafts_for_the_embedded_model(name: str, embedded: Target) -> None:
    def load(spec: TargetSpec) -> Target:
        return load_target(spec, dtype="float32", device="cpu", cache_dir=paths.cache_dir())

    bench = BuildContext(embedded, presets.resolve, load, locate=presets.locate)
    texts, tallies = [], []
    # Else they would draft as much as pays while this machine is busy with other tests.
    own = presets.methods()[name].config.model_copy(update={"drafting": "as set"})
    for config in (presets.methods()["plain"].config, own):
        drafter, tally = build_drafter(config, bench), Tally()
        text: list[int] = []
        for question in QUESTIONS:
            prompt_ids = embedded.encode_chat([{"role": "user", "content": question}])
            for record in decode(embedded, drafter, prompt_ids, limits=Limits(max_new_tokens=48)):
                tally.add(record)
            assert isinstance(record, End)
            text += record.output_ids
        drafter.close()
        texts.append(text)
        tallies.append(tally.metrics)
    assert texts[0] == texts[1]
    # On one question of 48 tokens a method that reaches 1.35 on hundreds was seen at 1.24.
    assert tallies[1].mat is not None and tallies[1].mat > 1.25
