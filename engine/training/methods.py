"""The trainable methods by the name that the command line uses."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from engine.errors import ConfigError
from engine.training.draft_model import DraftModelTraining
from engine.training.eagle import Eagle3Training, EagleTraining
from engine.training.medusa import MedusaTraining
from engine.training.recipe import TrainSettings
from engine.training.redrafter import ReDrafterTraining

METHODS: dict[str, type[TrainSettings]] = {
    cls.method: cls
    for cls in (
        MedusaTraining,
        EagleTraining,
        Eagle3Training,
        ReDrafterTraining,
        DraftModelTraining,
    )
}


def training_settings(method: str, values: Mapping[str, Any]) -> TrainSettings:
    """Settings of a method's training from plain data.

    Raises:
        ConfigError: no such method, or a setting that it refuses.
    """
    if method not in METHODS:
        near = difflib.get_close_matches(method, METHODS, n=1, cutoff=0.4)
        hint = f"Did you mean {near[0]}?" if near else f"Allowed: {', '.join(METHODS)}."
        raise ConfigError(f"--method must name a trainable method, got {method!r:.80}. {hint}")
    return METHODS[method].parse(values)
