"""Triton's config.pbtxt or model.yaml as a method."""

from __future__ import annotations

import re
from typing import Any

from engine.drafters import parse_method
from engine.errors import ConfigError
from engine.interop.handoff import Imported, ReadYaml
from engine.interop.plain import whole
from engine.interop.tree_files import is_pbtxt
from engine.interop.trees import parse_tree
from engine.interop.trtllm_read import read_trtllm

_PARAMETER = re.compile(
    r"key\s*:\s*\"([^\"]*)\"\s*,?\s*value\s*:?\s*\{\s*string_value\s*:\s*\"([^\"]*)\"", re.DOTALL
)
TREES = {"medusa": ("Medusa", "medusa_choices"), "eagle": ("Eagle", "eagle_choices")}
LOOKAHEAD = {
    "lookahead_window_size": "max_window_size",
    "lookahead_ngram_size": "max_ngram_size",
    "lookahead_verification_set_size": "max_verification_set_size",
}
PLAIN_MODES = ("top_k", "top_p", "top_k_top_p", "beam_search", "auto")
NO_WEIGHTS = "config.pbtxt names no drafter weights: they are in the engine. Set speculative_model."


def read_triton(text: str, read_yaml: ReadYaml) -> Imported:
    """The method that the parameters, or model.yaml, set up.

    Raises:
        ConfigError: no decoding mode, or one that drafts nothing.
    """
    if not is_pbtxt(text):
        return read_trtllm(text, read_yaml)
    found = {key: value.strip() for key, value in _PARAMETER.findall(text)}
    values = {key: value for key, value in found.items() if value and "${" not in value}
    mode = values.get("decoding_mode") or _mode_of(values)
    used = {"decoding_mode"}
    settings: dict[str, Any]
    notes: tuple[str, ...] = ()
    if mode in TREES:
        kind, key = TREES[mode]
        used.add(key)
        settings = {"decoding_type": kind}
        notes = (NO_WEIGHTS,)
        if key in values:
            settings[key] = parse_tree(values[key], format="triton").paths
        else:
            notes += (f"{key} is not set; the tree of the method's defaults is taken here.",)
    elif mode == "lookahead":
        settings = {"decoding_type": "Lookahead"}
        for theirs, ours in LOOKAHEAD.items():
            if theirs in values:
                settings[ours] = whole(values, theirs)
        used |= set(LOOKAHEAD)
    elif mode == "redrafter":
        settings = {"decoding_type": "ReDrafter"}
        notes = (NO_WEIGHTS, "Its beams are fixed in the engine; the defaults are taken here.")
    else:
        hint = " It drafts nothing." if mode in PLAIN_MODES else ""
        raise ConfigError(
            "decoding_mode must be one of medusa, eagle, lookahead and redrafter, got "
            f"{mode or 'none'}.{hint}"
        )
    ignored = tuple(key for key in values if key not in used)
    return Imported(parse_method(settings, where="config.pbtxt"), None, notes, ignored, ())


def _mode_of(values: dict[str, str]) -> str:
    """The mode that a lone tree parameter implies."""
    modes = [mode for mode, (_, key) in TREES.items() if key in values]
    return modes[0] if len(modes) == 1 else ""
