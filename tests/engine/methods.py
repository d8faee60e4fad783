"""Every method on a tiny target, on whatever device and forward the target runs."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.drafters import parse_method, user_provided
from engine.drafters.base import Drafter
from engine.model.target import Target
from engine.tuning.controller import build_drafter
from tests.engine.drafters import test_assistant, test_dflash, test_dspark, test_p_eagle
from tests.engine.drafters.eagle_heads import save_eagle, save_eagle3
from tests.engine.drafters.example_drafter import PairDrafter
from tests.engine.drafters.fitted import save_medusa, save_redrafter
from tests.engine.drafters.tiny_mtp import load_deepseek, save_deepseek
from tests.models import alike, build_context, lasting_folder, tiny_target

DYNAMIC = {"use_dynamic_tree": True, "dynamic_tree_max_topK": 4, "max_total_draft_tokens": 12}
TAPS = {"eagle3_layers_to_capture": [0, 1, 2]}
DRAFT: dict[str, Any] = {"decoding_type": "Draft_Target", "max_draft_len": 4}
METHODS: dict[str, dict[str, Any]] = {
    "plain": {"decoding_type": "Autoregressive"},
    "ngram": {"decoding_type": "NGram", "max_draft_len": 4},
    "suffix": {"decoding_type": "Suffix", "use_tree_spec": True},
    "lookahead": {"decoding_type": "Lookahead"},
    "recycling": {"decoding_type": "Token_Recycling"},
    "combined": {"decoding_type": "Combined"},
    "eagle": {"decoding_type": "Eagle"},
    "eagle-chain": {"decoding_type": "Eagle", "eagle_choices": [[0, 0, 0, 0]]},
    "eagle-dynamic": {"decoding_type": "Eagle", **DYNAMIC, "max_draft_len": 4},
    "eagle3": {"decoding_type": "Eagle3", **TAPS, "max_draft_len": 4},
    "eagle3-dynamic": {"decoding_type": "Eagle3", **TAPS, **DYNAMIC, "max_draft_len": 4},
    "medusa": {"decoding_type": "Medusa"},
    "medusa-typical": {"decoding_type": "Medusa", "acceptance": "typical"},
    "redrafter": {"decoding_type": "ReDrafter", "beam_width": 4, "beam_length": 5},
    "draft-model": DRAFT,
    "draft-model-unsure": {**DRAFT, "confidence_threshold": 0.3},
    "draft-model-shared": {**DRAFT, "vocabulary": "intersection"},
    "draft-model-text": {**DRAFT, "vocabulary": "text"},
    "mtp": {"decoding_type": "MTP"},
    "mtp-relaxed": {
        "decoding_type": "MTP",
        "use_relaxed_acceptance_for_thinking": True,
        "begin_thinking_phase_token": 7,
        "end_thinking_phase_token": 11,
    },
    "assistant": {"decoding_type": "MTP_Assistant", "max_draft_len": 4},
    "dflash": {"decoding_type": "DFlash"},
    "dflash-tree": {"decoding_type": "DFlash", "use_dynamic_tree": True},
    "dspark": {"decoding_type": "DSpark"},
    "pard": {"decoding_type": "PARD", "max_draft_len": 4, "mask_token_id": 270},
    "p-eagle": {"decoding_type": "P_EAGLE", "max_draft_len": 4},
    "user": {"decoding_type": "User_Provided", "drafter": "pairs"},
}
FAMILIES = {"MTP": "deepseek", "MTP_Assistant": "gemma4_text"}
"""Targets of methods that want another than Llama."""


@functools.cache
def _folder() -> Path:
    return lasting_folder("methods")


@functools.cache
def target_of(name: str) -> Target:
    """A method's target on the processor."""
    family = FAMILIES.get(METHODS[name]["decoding_type"], "llama")
    if family == "deepseek":
        return load_deepseek(save_deepseek(_folder() / name, num_mtp_layers=2))
    return tiny_target(family, eos_token_id=None)


def moved(target: Target, device: torch.device) -> Target:
    """A copy of a target on a device."""
    model: Any = copy.deepcopy(target.model)
    for module in model.modules():  # theirs would tell the target on the processor
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
    return Target(
        model.to(device), target.tokenizer, name=target.name, provenance=target.provenance
    )


def save_head(method: str, folder: Path, target: Target) -> str:
    """A folder with the weights of a method (`decoding_type`); empty where it has none."""
    draft_vocab = min(64, target.vocab_size // 2)
    makers: dict[str, Callable[[], object]] = {
        "Medusa": lambda: save_medusa(folder, target, num_heads=4),
        "ReDrafter": lambda: save_redrafter(folder, target),
        "Eagle": lambda: save_eagle(folder, target),
        "Eagle3": lambda: save_eagle3(folder, target, (1, 2, 3), draft_vocab=draft_vocab),
        "P_EAGLE": lambda: test_p_eagle.save_parallel(folder, target),
        "DFlash": lambda: test_dflash.save_as_published(folder, vocab_size=target.vocab_size),
        "DSpark": lambda: test_dspark.save(folder, vocab=target.vocab_size),
        "MTP_Assistant": lambda: test_assistant.save_assistant(folder, target),
    }
    return str(makers[method]() and folder) if method in makers else ""


@functools.cache
def _head_of(name: str) -> str:
    return save_head(METHODS[name]["decoding_type"], _folder() / f"{name}-head", target_of(name))


def drafter_for(
    target: Target,
    name: str,
    drafting: str = "as set",
    *,
    small: Target | None = None,
    **changes: Any,
) -> Drafter:
    """A method's drafter for its target, wherever that is; `small`: the model that drafts."""
    values = {"drafting": drafting, **METHODS[name], **changes}
    small = small or moved(alike(eos_token_id=None), target.device)
    if values["decoding_type"] in ("Draft_Target", "PARD"):
        values["speculative_model"] = "small"
    elif head := _head_of(name):
        values["speculative_model"] = head
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(user_provided._factories, "pairs", PairDrafter)
        return build_drafter(parse_method(values), build_context(target, small=small))
