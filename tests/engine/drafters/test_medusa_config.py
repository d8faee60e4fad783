"""Medusa's choice tree as a setting: every way to write it, every way to get it wrong."""

from __future__ import annotations

from typing import Any

import pytest

from engine.drafters.heads.medusa import MedusaConfig
from engine.errors import ConfigError


@pytest.mark.parametrize(
    ("choices", "path"),
    [
        ([[0], [0, 1, 0]], r"\[0, 1, 0\] needs its parent \[0, 1\]"),
        ([[0], [1], [0]], r"\[0\] twice"),
        ([[0], [0, -1]], r"paths of ranks from 0.* got \[0, -1\]"),
        ([[0], [0, True]], r"paths of ranks from 0.* got \[0, True\]"),
        ([[0], [0, 0.5]], r"paths of ranks from 0.* got \[0, 0.5\]"),
        ([[0], []], r"got \[\]"),
        ([[0], 3], r"got 3"),
        ([], "at least one path"),
        (7, "got 7"),
        ("[[0], [0", "must be a list of paths"),
        ([[i] for i in range(1025)], "at most 1024 nodes, got 1025"),
    ],
)
def test_malformed_tree_is_refused_with_its_path_and_its_file(choices: Any, path: str) -> None:
    with pytest.raises(ConfigError, match=path + r".* \(in medusa\.yaml\)\."):
        MedusaConfig.parse({"medusa_choices": choices}, where="medusa.yaml")


@pytest.mark.parametrize(
    "choices",
    [
        [[0, 0, 0, 0], [0, 1, 0], [1, 0], [1, 1]],
        ((0,), (0, 0), (0, 0, 0), (0, 0, 0, 0), (0, 1), (0, 1, 0), (1,), (1, 0), (1, 1)),
        "[[0,0,0,0],[0,1,0],[1,0],[1,1]]",
    ],
)
def test_leaves_candidates_and_text_mean_the_same_tree(choices: Any) -> None:
    config = MedusaConfig.parse({"medusa_choices": choices})
    assert config == MedusaConfig()
    assert MedusaConfig.parse(config.model_dump(mode="json")) == config
    assert len(config.medusa_choices) == 9
