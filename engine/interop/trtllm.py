"""TensorRT-LLM: the `speculative_config` block of its YAML file.

Two lines of releases: from 1.3 on only the PyTorch backend is left, with NGram, SA, Draft_Target,
Eagle3, MTP and DFlash. Until 1.2 there was the TensorRT backend beside it, with Medusa, Lookahead
and EAGLE-1/2 and their choice trees. Source: tensorrt_llm/llmapi/llm_args.py of both lines.

A dynamic tree must satisfy max_draft_len ≤ max_total_draft_tokens ≤ topK · max_draft_len there.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from typing import Any

from engine.drafters.autoregressive import AutoregressiveConfig
from engine.drafters.combined import CombinedConfig
from engine.drafters.dflash import DFlashConfig
from engine.drafters.draft_target import DraftTargetConfig
from engine.drafters.eagle import EagleConfig
from engine.drafters.eagle3 import Eagle3Config
from engine.drafters.lookahead import LookaheadConfig
from engine.drafters.medusa import MedusaConfig
from engine.drafters.mtp import MTPConfig
from engine.drafters.ngram import NGramConfig
from engine.drafters.suffix import SuffixConfig
from engine.interop.handoff import (
    Engine,
    File,
    NotTakenError,
    Sheet,
    Writer,
    chain_of_levels,
)
from engine.interop.plain import command, yaml_block
from engine.interop.trtllm_read import read_trtllm
from engine.tree import ChoiceTree

Files = tuple[File, ...]
Values = dict[str, Any]
MODEL_KEY = "speculative_model"
LEGACY = ("Medusa", "Eagle", "Lookahead")
"""Methods of the TensorRT backend, which 1.2 is the last to have."""


def is_current(sheet: Sheet) -> bool:
    """Whether the release has the PyTorch backend only."""
    return sheet.at_least(1, 3)


def _write(config: Any, sheet: Sheet) -> Files:
    """config.yaml and the command that serves with it."""
    values = speculative_values(config, sheet)
    target = shlex.quote(sheet.context.target)
    legacy = not is_current(sheet) and config.decoding_type in LEGACY
    option = "--config" if is_current(sheet) else "--extra_llm_api_options"
    backend = "--backend tensorrt" if legacy else "--backend pytorch"
    serve = command(f"trtllm-serve {target}", backend, (option, "config.yaml"))
    return (
        File("config.yaml", yaml_block(values), "yaml"),
        File("serve.sh", serve, "bash"),
    )


def speculative_values(config: Any, sheet: Sheet) -> Values:
    """The YAML file's content: `speculative_config`, and what must stand beside it.

    Raises:
        NotTakenError: this release cannot take the method.
    """
    block = BLOCKS[config.decoding_type](config, sheet)
    beside = {}
    if config.decoding_type in ("NGram", "Draft_Target"):
        beside["disable_overlap_scheduler"] = True
        sheet.note("TensorRT-LLM's documentation switches the overlap scheduler off for it.")
    return {**beside, "speculative_config": block}


def _plain(config: AutoregressiveConfig, sheet: Sheet) -> Files:
    sheet.note("Without speculative_config, TensorRT-LLM decodes plainly.")
    serve = command(f"trtllm-serve {shlex.quote(sheet.context.target)}", "--backend pytorch")
    return (File("serve.sh", serve, "bash"),)


def _drafter(sheet: Sheet) -> Values:
    """The drafter's weights under the key that the release knows."""
    return {MODEL_KEY if is_current(sheet) else "speculative_model_dir": sheet.model()}


def _draft_target(config: DraftTargetConfig, sheet: Sheet) -> Values:
    old = not sheet.at_least(1, 2)
    values: Values = {
        "decoding_type": "DraftTarget" if old else "Draft_Target",
        "max_draft_len": sheet.take("max_draft_len"),
        **_drafter(sheet),
    }
    sheet.explain("confidence_threshold", "TensorRT-LLM always drafts the full length.")
    if not is_current(sheet) and not old:
        sheet.note("Some 1.2 builds spell the type DraftTarget.")
    if sheet.take("use_draft_probs"):
        if is_current(sheet):
            values["use_rejection_sampling"] = True
            sheet.note("use_rejection_sampling is a prototype feature; greedy requests ignore it.")
        else:
            sheet.warn(
                "use_draft_probs is dropped: this release accepts a drafted token only where the "
                "target draws the same one; when sampling, acceptance falls."
            )
    return values


def _ngram(config: NGramConfig, sheet: Sheet) -> Values:
    sheet.explain("lookup", "TensorRT-LLM looks up by its pool's rules (lookup=pool here).")
    names = ("max_draft_len", "max_matching_ngram_size")
    pool = ("is_keep_all", "is_use_oldest", "is_public_pool")
    return {"decoding_type": "NGram"} | {name: sheet.take(name) for name in (*names, *pool)}


def _suffix(config: SuffixConfig, sheet: Sheet) -> Values:
    if not is_current(sheet):
        raise NotTakenError(
            "TensorRT-LLM has suffix look-up (SA) from 1.3 on.", "NGram is in every release."
        )
    length = sheet.take("max_draft_len")
    sheet.warn(
        f"SA copies {length} tokens after the longest match, however long it is: max_spec_factor, "
        "min_token_prob and max_tree_depth are dropped.",
        *("max_spec_factor", "min_token_prob", "max_tree_depth"),
    )
    sheet.explain("use_tree_spec", "SA drafts one path.")
    sheet.explain("global_pool_size", "It counts tokens; TensorRT-LLM counts requests.")
    for name in ("escape", "text_weight"):
        sheet.explain(name, "It only matters with mix_contexts.")
    return {
        "decoding_type": "SA",
        "max_draft_len": length,
        "max_matching_ngram_size": -1,
        "enable_global_pool": sheet.take("use_global_pool"),
    }


def _medusa(config: MedusaConfig, sheet: Sheet) -> Values:
    _needs_legacy(sheet, "Medusa", "EAGLE-3 heads for the same target, or TensorRT-LLM 1.2.")
    sheet.explain("acceptance", "TensorRT-LLM verifies exactly: fewer tokens are accepted.")
    tree = ChoiceTree(sheet.take("medusa_choices"))
    heads = sheet.take("num_medusa_heads")
    return {
        "decoding_type": "Medusa",
        "max_draft_len": len(tree),
        **({} if heads is None else {"num_medusa_heads": heads}),
        **_drafter(sheet),
        "medusa_choices": tree.as_lists(),
    }


def _needs_legacy(sheet: Sheet, what: str, nearest: str) -> None:
    if is_current(sheet):
        raise NotTakenError(
            f"TensorRT-LLM removed {what} with its TensorRT backend in July 2026; 1.2 is the last "
            "release that has it.",
            nearest,
        )
    sheet.note("It runs on the TensorRT backend, which builds an engine when it starts.")


def non_leaves_per_layer(tree: ChoiceTree) -> int:
    """Most nodes with children at any depth, the root's included."""
    shape = tree.shape
    inner = [int(shape.depths[node]) for node, kids in enumerate(shape.children) if kids]
    return max(inner.count(depth) for depth in set(inner))


def _eagle(config: EagleConfig, sheet: Sheet) -> Values:
    if is_current(sheet):
        raise NotTakenError(
            "TensorRT-LLM's PyTorch backend takes EAGLE-3 heads only.",
            "EAGLE-3 heads for the same target; EAGLE-1 and EAGLE-2 ran until 1.2.",
        )
    _needs_legacy(sheet, "EAGLE-1 and EAGLE-2", "")
    if sheet.take("use_dynamic_tree"):
        return _eagle2(sheet)
    tree = ChoiceTree(sheet.take("eagle_choices"))
    return {
        "decoding_type": "Eagle",
        "max_draft_len": len(tree),
        "num_eagle_layers": tree.depth,
        "max_non_leaves_per_layer": non_leaves_per_layer(tree),
        **_drafter(sheet),
        "eagle_choices": tree.as_lists(),
    }


def _eagle2(sheet: Sheet) -> Values:
    """In 1.2 max_draft_len counts levels and max_total_draft_tokens nodes; before, it was nodes."""
    levels, keep = sheet.take("max_draft_len"), sheet.take("max_total_draft_tokens")
    topk = sheet.take("dynamic_tree_max_topK")
    expanded = sheet.take("max_non_leaves_per_layer")
    new = sheet.at_least(1, 2)
    size = {"max_draft_len": levels, "max_total_draft_tokens": keep} if new else {}
    return {
        "decoding_type": "Eagle",
        **(size or {"max_draft_len": keep}),
        "num_eagle_layers": levels,
        "max_non_leaves_per_layer": topk if expanded is None else expanded,
        **_drafter(sheet),
        "use_dynamic_tree": True,
        "dynamic_tree_max_topK": topk,
    }


def _eagle3(config: Eagle3Config, sheet: Sheet) -> Values:
    current = is_current(sheet)
    values: Values = {"decoding_type": "Eagle3" if current else "Eagle"}
    if not sheet.take("use_dynamic_tree"):
        values |= {"max_draft_len": sheet.take("max_draft_len"), **_drafter(sheet)}
    elif current:
        values |= _dynamic(sheet)
    else:
        length = chain_of_levels(sheet, "The PyTorch backend drafts until 1.2")
        values |= {"max_draft_len": length, **_drafter(sheet)}
    layers = sheet.take("eagle3_layers_to_capture")
    return values | ({} if layers is None else {"eagle3_layers_to_capture": list(layers)})


def _dynamic(sheet: Sheet) -> Values:
    """A dynamic tree within TensorRT-LLM's bounds; every change is told."""
    levels, keep = sheet.take("max_draft_len"), sheet.take("max_total_draft_tokens")
    topk = sheet.take("dynamic_tree_max_topK")
    if keep > topk * levels:
        sheet.warn(
            f"max_total_draft_tokens is lowered from {keep} to {topk * levels}: TensorRT-LLM takes "
            f"at most dynamic_tree_max_topK × max_draft_len = {topk} × {levels}. MAT may fall."
        )
        keep = topk * levels
    if keep < levels:
        sheet.warn(
            f"max_draft_len is lowered from {levels} to {keep}: TensorRT-LLM takes no fewer nodes "
            "than levels. The trees stay the same, for one of so few nodes is never deeper."
        )
        levels = keep
    expanded = sheet.take("max_non_leaves_per_layer")
    sheet.note("Dynamic trees do not run on targets with sliding-window or MLA attention.")
    return {
        "max_draft_len": levels,
        **_drafter(sheet),
        "use_dynamic_tree": True,
        "dynamic_tree_max_topK": topk,
        "max_total_draft_tokens": keep,
        **({} if expanded is None else {"max_non_leaves_per_layer": expanded}),
    }


def _lookahead(config: LookaheadConfig, sheet: Sheet) -> Values:
    _needs_legacy(sheet, "lookahead", "NGram or SA: they need no weights either.")
    sheet.explain("pool_from_text", "TensorRT-LLM also fills its pool from the prompt.")
    names = ("max_window_size", "max_ngram_size", "max_verification_set_size")
    return {"decoding_type": "Lookahead"} | {name: sheet.take(name) for name in names}


def _mtp(config: MTPConfig, sheet: Sheet) -> Values:
    key = "max_draft_len" if is_current(sheet) else "num_nextn_predict_layers"
    values: Values = {"decoding_type": "MTP", key: sheet.take("max_draft_len")}
    relaxed = ("relaxed_topk", "relaxed_delta", "begin_thinking_phase_token")
    if sheet.take("use_relaxed_acceptance_for_thinking"):
        values["use_relaxed_acceptance_for_thinking"] = True
        values |= {name: sheet.take(name) for name in (*relaxed, "end_thinking_phase_token")}
    return values


def _dflash(config: DFlashConfig, sheet: Sheet) -> Values:
    if not is_current(sheet):
        raise NotTakenError("TensorRT-LLM has DFlash from 1.3 on.", "EAGLE-3 as a chain.")
    length = sheet.take("max_draft_len")
    if length is None:
        raise NotTakenError(
            "TensorRT-LLM needs max_draft_len for DFlash, and it is not set.",
            "Set max_draft_len, e.g. to the draft model's block size less one.",
        )
    mask, layers = sheet.take("mask_token_id"), sheet.take("target_layer_ids")
    return {
        "decoding_type": "DFlash",
        "max_draft_len": length,
        **_drafter(sheet),
        **({} if mask is None else {"mask_token_id": mask}),
        **({} if layers is None else {"target_layer_ids": list(layers)}),
    }


def _combined(config: CombinedConfig, sheet: Sheet) -> Values:
    """Suffix look-up before Eagle3 or MTP is TensorRT-LLM's `sa_config`."""
    first, second = sheet.take("retrieval"), sheet.take("model")
    fits = first.decoding_type == "Suffix" and second.decoding_type in ("Eagle3", "MTP")
    if not is_current(sheet) or not fits:
        raise NotTakenError(
            f"TensorRT-LLM cannot combine {first.decoding_type} with {second.decoding_type}.",
            "From 1.3 on it combines Suffix with Eagle3 or MTP (sa_config).",
        )
    look_up, drafting = sheet.inner(first), sheet.inner(second)
    pool = look_up.take("use_global_pool")
    length = look_up.take("max_draft_len")
    sheet.warn(
        f"sa_config drafts as many tokens as {second.decoding_type} does, not {length}, and knows "
        "no max_spec_factor, min_token_prob or max_tree_depth: these settings of Suffix are "
        "dropped."
    )
    look_up.used |= {"max_spec_factor", "min_token_prob", "max_tree_depth"}
    values = BLOCKS[second.decoding_type](second, drafting)
    look_up.finish("Suffix: ")
    drafting.finish(f"{second.decoding_type}: ")
    threshold = sheet.take("min_match_len")
    return values | {"sa_config": {"threshold": threshold, "enable_global_pool": pool}}


BLOCKS: Mapping[str, Callable[[Any, Sheet], Values]] = {
    "Draft_Target": _draft_target,
    "NGram": _ngram,
    "Suffix": _suffix,
    "Medusa": _medusa,
    "Eagle": _eagle,
    "Eagle3": _eagle3,
    "Lookahead": _lookahead,
    "MTP": _mtp,
    "DFlash": _dflash,
    "Combined": _combined,
}
"""What writes each method's `speculative_config`."""

WRITERS: Mapping[str, Writer] = {"Autoregressive": _plain, **dict.fromkeys(BLOCKS, _write)}
REFUSED = {
    "ReDrafter": (
        "TensorRT-LLM's LLM API never had ReDrafter; it was an engine built for Triton.",
        "Export to Triton for TensorRT-LLM 1.2, or use EAGLE-3 heads.",
    ),
    "Token_Recycling": ("TensorRT-LLM has no token recycling.", "NGram: it needs no weights."),
    "User_Provided": (
        "A drafter written for this playground does not run in TensorRT-LLM.",
        "User_Provided there takes a Drafter object from Python, not from YAML.",
    ),
}

ENGINE = Engine(
    name="trtllm",
    title="TensorRT-LLM",
    versions=(
        ("1.3", "PyTorch backend only"),
        ("1.2", "the last with the TensorRT backend: Medusa, Lookahead, EAGLE-1/2"),
        ("1.0", "1.0 and 1.1"),
    ),
    trees="dynamic trees for EAGLE-3; drawn trees until 1.2",
    writers=WRITERS,
    refused=REFUSED,
    read=read_trtllm,
)
