"""A drafter that is not asked for some steps drafts afterwards as if it had been."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.drafters import parse_method
from engine.model.target import Target
from tests.engine.drafters import judges
from tests.engine.drafters.heads import save_head
from tests.engine.drafters.tiny_mtp import load_deepseek, save_deepseek
from tests.engine.drafters.wrapped import Pausing
from tests.models import alike, build_context

TREE = {"use_dynamic_tree": True, "dynamic_tree_max_topK": 3, "max_total_draft_tokens": 8}
METHODS: dict[str, dict[str, Any]] = {
    "Eagle": {"decoding_type": "Eagle", **TREE, "max_draft_len": 3},
    "Eagle-static": {"decoding_type": "Eagle", "eagle_choices": [[0, 0, 0], [1, 0]]},
    "Eagle3": {"decoding_type": "Eagle3", **TREE, "eagle3_layers_to_capture": [0, 1, 2]},
    "Medusa": {"decoding_type": "Medusa", "medusa_choices": [[0, 0], [0, 1], [1]]},
    "ReDrafter": {"decoding_type": "ReDrafter", "beam_width": 3, "beam_length": 4},
    "Draft_Target": {
        "decoding_type": "Draft_Target",
        "speculative_model": "other",
        "max_draft_len": 3,
    },
    "NGram": {"decoding_type": "NGram", "max_draft_len": 3},
    "Suffix": {"decoding_type": "Suffix", "max_draft_len": 3},
    "MTP": {"decoding_type": "MTP", "max_draft_len": 3},
    "MTP_Assistant": {"decoding_type": "MTP_Assistant", "max_draft_len": 3},
    "PARD": {"decoding_type": "PARD", "speculative_model": "other", "mask_token_id": 270},
    **{name: {"decoding_type": name} for name in ("DFlash", "DSpark", "P_EAGLE")},
}


def drafts(
    target: Target, values: dict[str, Any], every: int
) -> dict[int, tuple[list[int], tuple[int, ...]]]:
    context = build_context(target, other=alike(eos_token_id=None))
    drafter = Pausing(parse_method(values).build(context), target, every)
    judges.write(target, drafter, judges.PROMPTS[0], tokens=60)
    return drafter.drawn


@pytest.mark.parametrize("name", METHODS)
def test_drafts_after_a_pause_are_those_without_one(name: str, tmp_path: Path) -> None:
    values = METHODS[name]
    target = judges.target_of("gemma4_text" if name == "MTP_Assistant" else "llama")
    if name == "MTP":
        target = load_deepseek(save_deepseek(tmp_path / "deepseek", num_mtp_layers=3))
    if head := save_head(values["decoding_type"], tmp_path / "head", target):
        values = {**values, "speculative_model": head}
    always, seldom = (drafts(target, values, every) for every in (1, 5))
    assert len(seldom) >= 10
    assert {at: always[at] for at in seldom} == seldom
