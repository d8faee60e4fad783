"""A GGUF file's config in transformers' terms, by the table of families.

Every field of the model is honoured, or is on a list of harmless ones, or refuses the file by its
name. Fields of the tokenizer are `engine.model.gguf.tokenizer`'s.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import transformers

from engine.errors import SourceError, first_line
from engine.model.files import RANGES, READ_ERRORS, check_sizes
from engine.model.gguf.architectures import FAMILIES
from engine.model.gguf.families import COMMON_FIELDS, NEUTRAL, NOT_READ, Family, Settings
from engine.model.gguf.file import GGUFFile
from engine.model.gguf.positions import rope_settings, shortest
from engine.model.gguf.tokenizer import write_tokenizer
from engine.model.sources import Weights, whole_folder
from engine.safe_text import short, visible

TOKEN_IDS = {"bos": "bos_token_id", "eos": "eos_token_id", "padding": "pad_token_id"}


def can_read(architecture: str) -> bool:
    """Whether GGUF files of this architecture are read."""
    return architecture in FAMILIES


def family_of(file: GGUFFile) -> Family:
    """The row of the table that a file belongs to.

    Raises SourceError: its architecture is not read; the reason is named where there is one.
    """
    name = file.architecture
    for family in FAMILIES.get(name, ()):
        if family.when(file):
            return family
    reason = NOT_READ.get(name, "it is not in the table of architectures")
    raise SourceError(
        f"{file.path} has the architecture {visible(name)[:80]}, which is not read: {reason}. "
        "Give the model as a folder in transformers' layout, or choose another."
    )


def read_gguf_config(file: GGUFFile) -> Any:
    """transformers' config of a file's model.

    Raises SourceError: a field is unknown, or has a value that this model cannot have.
    """
    family = family_of(file)
    settings = read_fields(file, family)
    try:
        return transformers.CONFIG_MAPPING[family.model_type](**settings)
    except READ_ERRORS as error:
        raise SourceError(
            f"{file.path}: its fields do not describe a model: {first_line(error)}."
        ) from error


def read_fields(file: GGUFFile, family: Family) -> Settings:
    """The settings that a file's fields say; raises as `read_gguf_config`."""
    settings = _ConfigReader(file, family).settings()
    check_sizes(settings, str(file.path))
    return settings


def extract_config(file: GGUFFile, weights: Weights, cache_dir: Path) -> Weights:
    """A cached folder with a GGUF file's config and tokenizer in transformers' layout.

    Raises SourceError: as `read_gguf_config` and `write_tokenizer`.
    """
    # Keyed by the file on the disk: its weights' fingerprint may not see an edited chat template.
    status = file.path.stat()
    identity = f"{file.path.resolve()}:{status.st_size}:{status.st_mtime_ns}"
    key = f"{file.path.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    folder = cache_dir / "gguf" / key
    if not folder.is_dir():
        config = read_gguf_config(file)
        with whole_folder(folder) as temp:
            config.save_pretrained(temp)
            write_tokenizer(file, temp)
    return Weights(str(folder), None, None, True, weights.fingerprint)


@dataclass(frozen=True)
class _ConfigReader:
    file: GGUFFile
    family: Family

    @cached_property
    def _defaults(self) -> Any:
        """The config of its class without settings, which tells the names that it knows."""
        return transformers.CONFIG_MAPPING[self.family.model_type]()

    def settings(self) -> dict[str, Any]:
        """The config's settings."""
        file, fields = self.file, self.file.fields
        settings: dict[str, Any] = {"tie_word_embeddings": "output.weight" not in file.entries}
        if (embedding := file.entries.get("token_embd.weight")) is not None:
            settings["vocab_size"] = embedding.shape[-1]
        for kind, name in TOKEN_IDS.items():
            settings[name] = file.metadata.get(f"tokenizer.ggml.{kind}_token_id")
        settings |= self._head_settings(fields)
        for name, value in fields.items():
            settings |= self._of_field(name, shortest(value))
        settings |= self.family.settings
        if self.family.derive is not None:
            settings |= self.family.derive(file, settings)
        return rope_settings(file, self.family, settings, self._defaults) | settings

    def _head_settings(self, fields: Mapping[str, Any]) -> Settings:
        """Sizes of heads where the file has no field for them."""
        heads, width = fields.get("attention.head_count"), fields.get("embedding_length")
        settings: Settings = {}
        if isinstance(heads, int) and heads > 0 and isinstance(width, int):
            if self._has("num_key_value_heads"):
                settings["num_key_value_heads"] = heads
            if self._has("head_dim"):
                settings["head_dim"] = width // heads
        return settings

    def _of_field(self, name: str, value: Any) -> Settings:
        """A field's settings; SourceError if it is unknown, or cannot be honoured."""
        if name.startswith("rope.") and name not in self.family.fields:
            return {}  # `rope_settings` reads them
        rule = self.family.fields.get(name, COMMON_FIELDS.get(name, ()))
        if rule is None:
            return {}
        if callable(rule):
            return rule(value, self.file)
        for key in (rule,) if isinstance(rule, str) else rule:
            if self._has(key):
                if key in RANGES:
                    check_sizes({key: value}, str(self.file.path))
                return {key: value}
        if self._is_neutral(name, value):
            return {}
        raise SourceError(
            f"{self.file.path} has the field {short(f'{self.file.architecture}.{name}')} = "
            f"{short(value)}, which is not read for this architecture. Give the model as a folder "
            "in transformers' layout, or choose another file."
        )

    def _has(self, name: str) -> bool:
        """Whether the class has a setting that can be set."""
        kind = type(self._defaults)
        if name in vars(self._defaults) or name in kind.attribute_map:
            return True
        return hasattr(kind, name) and not isinstance(getattr(kind, name), property)

    def _is_neutral(self, name: str, value: Any) -> bool:
        """Whether the model is the same without a field."""
        if name == "attention.key_length":
            fields = self.file.fields
            heads = fields.get("attention.head_count", 0)
            return bool(fields.get("embedding_length") == value * heads)
        return name in NEUTRAL and value in NEUTRAL[name]
