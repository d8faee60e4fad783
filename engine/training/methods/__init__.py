"""Recipes of the trainable methods, by the name that the command line uses."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from engine.errors import ConfigError
from engine.training.methods.draft_model import DraftModelTraining
from engine.training.methods.eagle import Eagle3Training, EagleTraining
from engine.training.methods.medusa import MedusaTraining
from engine.training.methods.redrafter import ReDrafterTraining
from engine.training.recipe import TrainSettings

_RECIPES = (MedusaTraining, EagleTraining, Eagle3Training, ReDrafterTraining, DraftModelTraining)
METHODS: dict[str, type[TrainSettings]] = {recipe.method: recipe for recipe in _RECIPES}


def training_settings(method: str, values: Mapping[str, Any]) -> TrainSettings:
    """Settings of a method's training from plain data.

    Raises ConfigError: no such method, or a setting that it refuses.
    """
    if method not in METHODS:
        near = difflib.get_close_matches(method, METHODS, n=1, cutoff=0.4)
        hint = f"Did you mean {near[0]}?" if near else f"Allowed: {', '.join(METHODS)}."
        raise ConfigError(f"--method must name a trainable method, got {method!r:.80}. {hint}")
    return METHODS[method].parse(values)
