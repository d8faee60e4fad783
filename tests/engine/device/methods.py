"""Every method on a tiny target: what builds its drafter on the CPU and on the pretended device."""

from __future__ import annotations

import copy
import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from engine.drafters import parse_method
from engine.drafters.base import Drafter
from engine.model.target import Target
from tests.engine.drafters import test_assistant, test_dflash, test_dspark, test_p_eagle
from tests.engine.drafters.eagle_heads import save_eagle, save_eagle3
from tests.engine.drafters.fitted import save_medusa, save_redrafter
from tests.engine.drafters.tiny_mtp import load_deepseek, save_deepseek
from tests.models import alike, build_context, tiny_target

DYNAMIC = {"use_dynamic_tree": True, "dynamic_tree_max_topK": 4, "max_total_draft_tokens": 12}
TAPS = {"eagle3_layers_to_capture": [0, 1, 2]}
METHODS: dict[str, dict[str, Any]] = {
    "plain": {"decoding_type": "Autoregressive"},
    "ngram": {"decoding_type": "NGram", "max_draft_len": 4},
    "suffix": {"decoding_type": "Suffix", "use_tree_spec": True},
    "lookahead": {"decoding_type": "Lookahead"},
    "recycling": {"decoding_type": "Token_Recycling"},
    "combined": {"decoding_type": "Combined"},
    "eagle": {"decoding_type": "Eagle"},
    "eagle-dynamic": {"decoding_type": "Eagle", **DYNAMIC, "max_draft_len": 4},
    "eagle3": {"decoding_type": "Eagle3", **TAPS, "max_draft_len": 4},
    "eagle3-dynamic": {"decoding_type": "Eagle3", **TAPS, **DYNAMIC, "max_draft_len": 4},
    "medusa": {"decoding_type": "Medusa"},
    "redrafter": {"decoding_type": "ReDrafter", "beam_width": 4, "beam_length": 5},
    "draft-model": {"decoding_type": "Draft_Target", "max_draft_len": 4},
    "draft-model-unsure": {
        "decoding_type": "Draft_Target",
        "max_draft_len": 4,
        "confidence_threshold": 0.3,
    },
    "draft-model-text": {
        "decoding_type": "Draft_Target",
        "max_draft_len": 4,
        "vocabulary": "text",
    },
    "mtp": {"decoding_type": "MTP"},
    "assistant": {"decoding_type": "MTP_Assistant", "max_draft_len": 4},
    "dflash": {"decoding_type": "DFlash"},
    "dflash-tree": {"decoding_type": "DFlash", "use_dynamic_tree": True},
    "dspark": {"decoding_type": "DSpark"},
    "pard": {"decoding_type": "PARD", "max_draft_len": 4, "mask_token_id": 270},
    "p-eagle": {"decoding_type": "P_EAGLE", "max_draft_len": 4},
    "user": {"decoding_type": "User_Provided", "drafter": "pairs"},
}


@functools.cache
def _folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="pretend-"))


@functools.cache
def target_of(family: str) -> Target:
    if family == "deepseek":
        folder = save_deepseek(_folder() / "deepseek", num_mtp_layers=2)
        return load_deepseek(folder)
    return tiny_target(family, eos_token_id=None)


def family_of(name: str) -> str:
    return {"mtp": "deepseek", "assistant": "gemma4_text"}.get(name, "llama")


@functools.cache
def on_device(family: str, device: torch.device) -> Target:
    own = target_of(family)
    return Target(
        copy.deepcopy(own.model).to(device),  # type: ignore[arg-type]
        own.tokenizer,
        name=own.name,
        provenance=own.provenance,
    )


@functools.cache
def head_of(name: str) -> str:
    """What a method drafts with, in a folder."""
    target, folder = target_of(family_of(name)), _folder() / name
    makers: dict[str, Callable[[], Any]] = {
        "Eagle": lambda: save_eagle(folder, target),
        "Eagle3": lambda: save_eagle3(folder, target, (1, 2, 3), draft_vocab=64),
        "Medusa": lambda: save_medusa(folder, target, num_heads=4),
        "ReDrafter": lambda: save_redrafter(folder, target),
        "MTP_Assistant": lambda: test_assistant.save_assistant(folder, target),
        "DFlash": lambda: test_dflash.save_as_published(folder),
        "DSpark": lambda: test_dspark.save(folder),
        "P_EAGLE": lambda: test_p_eagle.save_parallel(folder, target),
    }
    kind = METHODS[name]["decoding_type"]
    return str(makers[kind]()) if kind in makers else ""


def drafter_for(target: Target, name: str) -> Drafter:
    values = dict(METHODS[name])
    small = alike(eos_token_id=None, max_position_embeddings=512)
    if target.device.type != "cpu":
        small = Target(
            copy.deepcopy(small.model).to(target.device),  # type: ignore[arg-type]
            small.tokenizer,
            name="alike",
        )
    if values["decoding_type"] in ("Draft_Target", "PARD"):
        values["speculative_model"] = "small"
    elif head := head_of(name):
        values["speculative_model"] = head
    return parse_method({"drafting": "as set", **values}).build(build_context(target, small=small))
