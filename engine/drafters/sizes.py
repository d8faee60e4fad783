"""What was measured of a method at several sizes: how much was accepted, and of how many rows.

Neither depends on the machine, so both are measured once and shipped; what a row costs is measured
where it is decoded (`engine.tuning.fit`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from engine.config import Settings
from engine.drafters.method import MethodConfig


class Size(Settings):
    """One size.

    Attributes:
        settings: the method's `size_settings` that make it, where they are not at their defaults.
        mat: committed tokens per step, over all questions.
        rows: how many rows verify forwards had, root included, and in which share of the steps.
    """

    settings: dict[str, Any]
    mat: float = Field(ge=1.0)
    rows: tuple[Annotated[tuple[int, float], Field(strict=False)], ...] = Field(
        strict=False, min_length=1
    )


class SizeTable(Settings):
    """A method's sizes.

    Attributes:
        target: name of the target that verified them.
        method: the other settings, `decoding_type` among them.
        about: what was measured on what; plain JSON.
    """

    target: str
    method: dict[str, Any]
    sizes: tuple[Size, ...] = Field(strict=False, min_length=1)
    about: dict[str, Any] = {}

    def serves(self, config: MethodConfig) -> bool:
        """Whether these settings are the ones measured, whatever size they say."""
        if self.method.get("decoding_type") != config.decoding_type:
            return False
        measured = type(config).parse(self.method)
        return beside_size(measured) == beside_size(config)


def beside_size(config: MethodConfig) -> Mapping[str, Any]:
    """The settings that have an effect and do not say how much is drafted, nor who decides it."""
    names = config.live_settings() - {*config.size_settings.split(), "size", "adaptive"}
    return {name: getattr(config, name) for name in names}
