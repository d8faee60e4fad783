"""What is known of a method before a text: what as set would cost, and shipped priors."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

import presets
from engine.drafters import parse_method
from engine.proposal import Proposal
from engine.tree import TreeShape
from engine.tuning.experience import Experience, ExperienceStore, Prior, drafter_digest
from engine.tuning.latency import LatencyCurve
from engine.tuning.survival import Survival
from tests.engine.tuning.test_controller import on_a_machine, random_right
from tests.models import tiny_target

SLOW_ROWS = LatencyCurve((1, 64), (10.0, 73.0))
"""A millisecond a row."""


@pytest.mark.parametrize("share", [0.3, 0.8])
def test_as_set_is_predicted_by_what_the_controller_saw(share: float, tmp_path: Path) -> None:
    """Six tokens a draft: 0.2 ms to draft, 6 ms to verify them, 10 ms for a plain step."""
    drafter = on_a_machine(SLOW_ROWS, random_right(share))
    for _ in range(3):
        drafter.write()
    config = parse_method({"decoding_type": "NGram", "max_draft_len": 6})
    target, store = tiny_target(), ExperienceStore(tmp_path)
    store.load(config, target)
    store.save(config, target, drafter.experience)
    curve = next(file for file in tmp_path.iterdir() if "rows" in file.read_text())
    curve.write_text('{"rows": [1, 64], "ms": [10.0, 73.0]}')
    known = ExperienceStore(tmp_path).find(target.name, config.replace(drafting="as set"))
    expected = known and known.predict_as_set(config)
    assert expected
    mat = sum(share**length for length in range(7))
    assert expected.mat == pytest.approx(mat, rel=0.2)
    assert expected.mat / expected.speedup == pytest.approx((10.0 + 6.0 + 0.2) / 10.0, rel=0.15)
    assert store.find("another", config) is None
    assert store.find(target.name, config.replace(max_draft_len=5)) is None


def test_nothing_is_predicted_of_what_never_drafted() -> None:
    config = parse_method({"decoding_type": "NGram"})
    assert Experience.new(SLOW_ROWS).predict_as_set(config) is None
    only_prior = Experience.new(SLOW_ROWS, {"survival": {"offered": [5.0, 5.0], "l1": [4.0, 5.0]}})
    assert only_prior.predict_as_set(config) is None


def test_a_level_counts_once_however_many_siblings_were_tried() -> None:
    tree, survival = TreeShape([-1, 0, 0, 1, 1]), Survival(memory=1.0)
    for path in ((0, 2), (0, 1, 4), (0,)):
        survival.observe_attempt(True)
        survival.observe(Proposal(torch.arange(5), tree), path)
    counts = {name: survival.groups[name][0] for name in ("l1", "l2")}
    tries = {name: survival.groups[name][1] / 0.6 for name in ("l1", "l2")}
    assert counts == {"l1": 2, "l2": 1} and tries == pytest.approx({"l1": 3, "l2": 2})


def test_a_curve_that_rows_belie_is_measured_again_once_it_is_old(tmp_path: Path) -> None:
    """As one of a busy machine is; what other methods learnt of the old one's rows goes with it."""
    target, names = tiny_target(), ("NGram", "Suffix")
    one, other = (parse_method({"decoding_type": name}) for name in names)
    store = ExperienceStore(tmp_path)
    first = store.curve(target)
    for config in (one, other):
        learnt = store.load(config, target)
        learnt.costs.row_scale = 3.0
        store.save(config, target, learnt)
    assert ExperienceStore(tmp_path).load(one, target).costs.row_scale == 3.0, "it is new"
    (file,) = (f for f in tmp_path.glob("*.json") if "about" not in json.loads(f.read_text()))
    os.utime(file, (0, 0))
    again = ExperienceStore(tmp_path)
    assert again.load(one, target).costs.row_scale == 1.0
    assert again.load(other, target).costs.row_scale == 1.0
    assert again.curve(target) != first


def test_a_prior_serves_the_very_weights_and_settings_until_more_is_known(tmp_path: Path) -> None:
    head = tmp_path / "head"
    head.mkdir()
    (head / "model.safetensors").write_bytes(b"weights")
    values: dict[str, object] = {"decoding_type": "Draft_Target", "speculative_model": str(head)}
    target, config = tiny_target(), parse_method(values)
    target.provenance["weights"] = "f00d"
    survival = Survival({"p3": [7.0, 9.0]})
    prior = Prior.of(config, target, lambda name, kind="drafters": name, survival)
    assert prior is not None
    store, target = ExperienceStore(tmp_path / "cache", [prior]), tiny_target()
    assert not store.load(config, target).survival.groups
    target.provenance["weights"] = "f00d"
    for drafting in ("auto", "as set"):
        own = store.load(config.replace(drafting=drafting), target)
        assert own.survival.groups == prior.survival
    assert not own.costs.draft_times and not own.speedups
    assert not store.load(config.replace(max_draft_len=2), target).survival.groups
    (tmp_path / "head" / "model.safetensors").write_bytes(b"other weights")
    assert not store.load(config, target).survival.groups
    own.survival.groups["p3"] = [1.0, 2.0]
    store.save(config, target, own)
    again = ExperienceStore(tmp_path / "cache", [prior]).load(config, target)
    assert again.survival.groups == {"p3": [1.0, 2.0]}, "what was learnt here comes first"


OWN_DRAFTERS = ("smollm2-135m-instruct", "qwen2.5-coder-0.5b-instruct")
"""Targets that drafters are shipped for."""


def test_every_shipped_drafter_has_a_prior_of_its_weights() -> None:
    cards = [
        json.loads(file.read_text()) for file in (presets.FOLDER / "drafters").glob("*/card.json")
    ]
    weights = {card["target_weights"] for card in cards}
    assert {one.weights for one in presets.priors()} == weights
    priors = {(one.drafter, str(one.method["decoding_type"])) for one in presets.priors()}
    for preset in presets.methods().values():
        own = preset.target in (None, *OWN_DRAFTERS) and not preset.untrained
        if own and preset.config.decoding_type != "Autoregressive":
            digest = drafter_digest(preset.config, presets.locate)
            assert (digest, preset.config.decoding_type) in priors, preset.name
