"""Choice tree presets: published trees, and trees fitted to measured ranks, as YAML files."""

from __future__ import annotations

from pydantic import Field, field_validator

from engine.config import Settings
from engine.drafters import methods
from engine.tree import ChoicePaths, ChoiceTree


class TreePreset(Settings):
    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_.-]*$")
    title: str
    description: str = ""
    methods: tuple[str, ...] = Field(
        strict=False, min_length=1, description="decoding types that it is for"
    )
    candidates: ChoicePaths
    source: str = Field("", description="where it was published, or how it was fitted")
    measured: dict[str, str | int | float] | None = Field(
        None, description="of a fitted tree: target, drafter, texts, and the MAT over them"
    )

    @field_validator("methods")
    @classmethod
    def _known(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            if name not in methods():
                raise ValueError(f"methods must name decoding types, got {name!r:.80}")
        return value

    @property
    def tree(self) -> ChoiceTree:
        return ChoiceTree(self.candidates)
