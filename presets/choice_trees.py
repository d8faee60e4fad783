"""Choice tree presets: published trees, and trees fitted to measured ranks, as YAML files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml
from pydantic import Field, field_validator

from engine.config import Settings
from engine.drafters import methods
from engine.tree import ChoicePaths, ChoiceTree


class Measured(Settings):
    target: str
    dtype: str = ""
    drafter: str = Field("", description="weights of the drafter")
    texts: int = Field(ge=1, description="texts that it was fitted to")
    positions: int = Field(ge=1, description="positions in these texts")
    mat: float = Field(ge=1.0, description="replayed MAT over these texts")
    prompts: str = Field("", description="what was asked, e.g. a suite's name")
    held_out_mat: float | None = Field(
        None, ge=1.0, description="replayed MAT over texts that the tree was not fitted to"
    )
    held_out_texts: int | None = Field(None, ge=1, description="how many those are")


class TreePreset(Settings):
    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_.-]*$")
    title: str
    description: str = ""
    methods: tuple[str, ...] = Field(
        strict=False, min_length=1, description="decoding types that it is meant for"
    )
    candidates: ChoicePaths
    source: str = Field("", description="where it was published, or how it was made")
    measured: Measured | None = None

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


def tree_preset(values: Mapping[str, Any], *, where: str) -> TreePreset:
    """A tree preset from plain data.

    Raises ConfigError: naming file, key and value.
    """
    given = dict(values) if isinstance(values, Mapping) else {}
    if isinstance(given.get("measured"), Mapping):
        given["measured"] = Measured.parse(given["measured"], where=where)
    return TreePreset.parse(given, where=where)


def tree_yaml(preset: TreePreset) -> str:
    """The file of a preset: settings one per line, one line of candidates per depth."""
    values = preset.model_dump(mode="json", exclude_none=True, exclude={"candidates"})
    head = yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=100)
    lines = [head.rstrip("\n"), "candidates:"]
    lines += [f"  - {list(path)}" for path in preset.candidates]
    return "\n".join(lines) + "\n"
