"""Training settings of the trainable methods, by their names on the command line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.errors import did_you_mean, validate_choice
from engine.training.methods.draft_model import DraftModelTraining
from engine.training.methods.eagle import Eagle3Training, EagleTraining
from engine.training.methods.medusa import MedusaTraining
from engine.training.methods.redrafter import ReDrafterTraining
from engine.training.recipe import TrainSettings

_SETTINGS = (MedusaTraining, EagleTraining, Eagle3Training, ReDrafterTraining, DraftModelTraining)
METHODS: dict[str, type[TrainSettings]] = {cls.method: cls for cls in _SETTINGS}


def training_settings(method: str, values: Mapping[str, Any]) -> TrainSettings:
    """A method's training settings from plain data.

    Raises ConfigError: there is no such method, or a setting is invalid.
    """
    hint = did_you_mean(method, METHODS)
    return METHODS[validate_choice("The trained method", method, METHODS, hint)].parse(values)
