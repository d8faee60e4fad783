"""Rotary positions of a GGUF file in transformers' terms: base, share of a head, scaling."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.errors import SourceError
from engine.model.gguf.file import GGUFFile
from engine.safe_text import short

if TYPE_CHECKING:
    from engine.model.gguf.families import Family, Settings

DEFAULT_BASE = 10000.0
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
DIVISORS = "rope_freqs.weight"
"""Divisors of the rotary frequencies, as of Llama 3: the loader divides the model's by them."""
_SCALING = {
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "attn_factor": "attention_factor",
    "yarn_attn_factor": "attention_factor",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
    "yarn_log_multiplier": "mscale_all_dim",
}
_KEYS = {
    "none": set(),
    "linear": {"factor"},
    "yarn": {*_SCALING.values()},
    "longrope": {"factor", "original_max_position_embeddings", "attention_factor"},
}
"""Settings that each type of scaling has."""
_OTHERS = {"freq_base", "freq_base_swa", "dimension_count", "dimension_count_swa", "scaling.type"}
_HARMLESS = {"scaling.finetuned"}
_BOUND = "scaling.original_context_length"
"""Some files have it without a scaling, which alone makes use of it."""
_NEUTRAL = {("scaling.attn_factor", 1.0), ("scaling.factor", 1.0)}


def rope_settings(
    file: GGUFFile, family: Family, settings: Mapping[str, Any], defaults: Any
) -> Settings:
    """The config's `rope_parameters`; none where the class has no rotary positions.

    Args:
        settings: of the config so far.
        defaults: a config of the class without settings.

    Raises SourceError: a field of positions is unknown, or cannot be honoured.
    """
    fields = {
        name.removeprefix("rope."): value
        for name, value in file.fields.items()
        if name.startswith("rope.") and name not in family.fields
    }
    own = dict(getattr(defaults, "rope_parameters", None) or {})
    if not own:
        if fields.keys() - _HARMLESS - set(family.no_rope_fields):
            raise _refusal(file, next(iter(fields)), "the model has no rotary positions")
        return {}
    base = float(fields.get("freq_base", DEFAULT_BASE))
    plain: Settings = {"rope_type": "default", "rope_theta": shortest(base)}
    dimensions = fields.get("dimension_count")
    share = _share(dimensions, settings, defaults)
    if share is not None:
        plain["partial_rotary_factor"] = share
    scaled = plain | _scaling(file, fields, settings)
    if scaled["rope_type"] != "default":
        scaled |= family.rope
    if (scale := file.fields.get("attention.temperature_scale")) is not None:
        scaled["llama_4_scaling_beta"] = scale
    original = fields.get("scaling.original_context_length")
    further: Settings = {}
    if original is not None and hasattr(defaults, "original_max_position_embeddings"):
        further["original_max_position_embeddings"] = original
    by_layer = all(isinstance(value, Mapping) for value in own.values())
    if not by_layer:
        if "freq_base_swa" in fields and float(fields["freq_base_swa"]) != base:
            raise _refusal(file, "freq_base_swa", "all its layers have one base")
        if fields.get("dimension_count_swa", dimensions) != dimensions:
            raise _refusal(file, "dimension_count_swa", "all its layers rotate the same share")
        return {"rope_parameters": scaled} | further
    local = dict(plain)
    local["rope_theta"] = float(fields.get("freq_base_swa", family.sliding_rope_base or base))
    if (swa := fields.get("dimension_count_swa")) is not None:
        local.pop("partial_rotary_factor", None)
        if share is None and swa != settings.get("head_dim", swa):
            raise _refusal(file, "dimension_count_swa", "sliding layers rotate whole heads")
    return {"rope_parameters": {"full_attention": scaled, "sliding_attention": local}}


def _share(dimensions: int | None, settings: Mapping[str, Any], defaults: Any) -> float | None:
    """The rotated share of a head; None for all of it."""
    heads, width = settings.get("num_attention_heads"), settings.get("hidden_size")
    size = settings.get("head_dim") or settings.get("qk_rope_head_dim")
    if size is None and isinstance(heads, int) and isinstance(width, int):
        size = width // heads
    if settings.get("qk_rope_head_dim") or dimensions is None or not size or dimensions == size:
        known = hasattr(defaults, "partial_rotary_factor")
        known |= "partial_rotary_factor" in (getattr(defaults, "rope_parameters", None) or {})
        return 1.0 if known else None
    return dimensions / int(size)


def _scaling(file: GGUFFile, fields: Mapping[str, Any], settings: Mapping[str, Any]) -> Settings:
    """The scaling's type and its settings."""
    has_tables = LONG_FACTORS in file.entries
    kind = str(fields.get("scaling.type", "none"))
    kind = "longrope" if has_tables else kind
    if kind not in _KEYS:
        raise _refusal(file, "scaling.type", "this type is unknown")
    values: Settings = {}
    for name, value in fields.items():
        if name in _OTHERS | _HARMLESS:
            continue
        key = _SCALING.get(name.removeprefix("scaling."))
        if key is None or (name == "scaling.yarn_ext_factor" and value != 1):
            raise _refusal(file, name, "it is unknown")
        if key in _KEYS[kind]:
            values[key] = shortest(value)
        elif name != _BOUND and (name, value) not in _NEUTRAL:
            raise _refusal(file, name, f"{kind} scaling has none")
    if "mscale_all_dim" in values:  # of DeepSeek, a tenth of it is stored, and mscale is the same
        is_tenth = file.architecture == "deepseek2"
        values["mscale_all_dim"] = shortest(values["mscale_all_dim"] * (10 if is_tenth else 1))
        values["mscale"] = values["mscale_all_dim"] if is_tenth else 1.0
    if kind == "none" or (kind == "linear" and values.get("factor", 1) == 1):
        return {}
    if kind == "longrope":
        values |= {"long_factor": _factors(file, LONG_FACTORS)}
        values |= {"short_factor": _factors(file, SHORT_FACTORS)}
        values.setdefault("original_max_position_embeddings", settings["max_position_embeddings"])
        values.setdefault("attention_factor", 1.0)
    return {"rope_type": kind} | values


def shortest(value: Any) -> Any:
    """A float32 of a file as the shortest decimal that means it: 9.99999974e-06 → 1e-05."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _factors(file: GGUFFile, name: str) -> list[float]:
    if name not in file.entries:
        raise SourceError(f"{file.path} has {LONG_FACTORS}, but no {name}. Give a whole file.")
    return [shortest(float(value)) for value in np.ravel(file.floats(name))]


def _refusal(file: GGUFFile, name: str, reason: str) -> SourceError:
    field = f"{file.architecture}.rope.{name}"
    value = file.fields.get(f"rope.{name}")
    return SourceError(
        f"{file.path} has the field {short(field)} = {short(value)}, which is not read: {reason}. "
        "Choose another file of this model."
    )
