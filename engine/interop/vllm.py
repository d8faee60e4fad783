"""vLLM: `--speculative-config` JSON.

What changed between releases, read from the releases' own vllm/config/speculative.py:

    0.11.1  suffix; every *_mtp method is spelled mtp
    0.16    draft_model works again (the V1 engine refused it until 0.14)
    0.18    rejection_sample_method strict / probabilistic; gone again with 0.21
    0.20    dflash; the last with speculative_token_tree
    0.21    draft_sample_method (gumbel); 0.22 calls it probabilistic
    0.33    medusa and mlp_speculator are gone
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from typing import Any

from engine.drafters.autoregressive import AutoregressiveConfig
from engine.drafters.dflash import DFlashConfig
from engine.drafters.draft_target import DraftTargetConfig
from engine.drafters.eagle import EagleConfig
from engine.drafters.eagle3 import Eagle3Config
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
    chain_or_warn,
)
from engine.interop.plain import command, dumps
from engine.interop.tree_writers import counts_of, tuples
from engine.interop.trees import parse_tree
from engine.interop.vllm_read import read_vllm
from engine.tree import ChoiceTree

SAMPLED = (
    "When sampling, vLLM drafts the likeliest token; here EAGLE-1 draws its drafts. The law of the "
    "output is the same, acceptance differs."
)
POOL = 10_000
"""Requests that vLLM's global suffix tree keeps by default."""
Files = tuple[File, ...]


def _files(values: Mapping[str, Any], sheet: Sheet, *more: str | tuple[str, object]) -> Files:
    serve = command(
        f"vllm serve {shlex.quote(sheet.context.target)}",
        ("--speculative-config", dumps(values)),
        *more,
    )
    text = json.dumps(values, indent=2) + "\n"
    return (File("speculative_config.json", text, "json"), File("serve.sh", serve, "bash"))


def _config(values_of: Callable[[Any, Sheet], Mapping[str, Any]]) -> Writer:
    """A writer from what makes the JSON object."""
    return lambda config, sheet: _files(values_of(config, sheet), sheet)


def _plain(config: AutoregressiveConfig, sheet: Sheet) -> Files:
    sheet.note("Without --speculative-config, vLLM decodes plainly.")
    return (File("serve.sh", command(f"vllm serve {shlex.quote(sheet.context.target)}"), "bash"),)


def _draft_target(config: DraftTargetConfig, sheet: Sheet) -> Mapping[str, Any]:
    if not sheet.at_least(0, 15):
        raise NotTakenError(
            "vLLM's V1 engine refuses draft models until 0.14.", "Use 0.16 or newer, or NGram."
        )
    sheet.explain("confidence_threshold", "vLLM always drafts the full length.")
    values = {
        "method": "draft_model",
        "model": sheet.model(),
        "num_speculative_tokens": sheet.take("max_draft_len"),
    }
    if sheet.take("use_draft_probs"):
        values |= _draft_probs(sheet)
    return values


def _draft_probs(sheet: Sheet) -> Mapping[str, Any]:
    """How drafts are sampled and verified with their own probabilities, in this release."""
    if sheet.at_least(0, 22):
        return {"draft_sample_method": "probabilistic"}
    if sheet.at_least(0, 21):
        return {"draft_sample_method": "gumbel"}
    if sheet.at_least(0, 18):
        return {"rejection_sample_method": "probabilistic"}
    sheet.warn(
        "use_draft_probs is dropped: when sampling, this release drafts the likeliest token and "
        "accepts it with the target's probability; acceptance falls with the temperature."
    )
    return {}


def _ngram(config: NGramConfig, sheet: Sheet) -> Mapping[str, Any]:
    sheet.warn(
        "vLLM copies what followed the longest match in the request's own text: the pool rules "
        "(lookup, is_keep_all, is_use_oldest, is_public_pool) are dropped; where a pattern occurs "
        "more than once its pick may be another one.",
        *("lookup", "is_keep_all", "is_use_oldest", "is_public_pool"),
    )
    return {
        "method": "ngram",
        "num_speculative_tokens": sheet.take("max_draft_len"),
        "prompt_lookup_min": 1,
        "prompt_lookup_max": sheet.take("max_matching_ngram_size"),
    }


def _suffix(config: SuffixConfig, sheet: Sheet) -> Mapping[str, Any]:
    if not sheet.at_least(0, 11, 1):
        raise NotTakenError("vLLM has suffix decoding from 0.11.1 on.", "NGram.")
    sheet.explain("use_tree_spec", "vLLM verifies one path, not a tree.")
    sheet.explain("max_total_draft_tokens", "It only matters with use_tree_spec.")
    sheet.explain("global_pool_size", "It counts tokens; vLLM keeps 10000 requests.")
    for name in ("escape", "text_weight"):
        sheet.explain(name, "It only matters with mix_contexts.")
    sheet.note("vLLM needs the package arctic-inference for it: pip install arctic-inference.")
    return {
        "method": "suffix",
        "num_speculative_tokens": sheet.take("max_draft_len"),
        "suffix_decoding_max_tree_depth": sheet.take("max_tree_depth"),
        "suffix_decoding_max_spec_factor": sheet.take("max_spec_factor"),
        "suffix_decoding_min_token_prob": sheet.take("min_token_prob"),
        "suffix_decoding_max_cached_requests": POOL if sheet.take("use_global_pool") else 0,
    }


def _medusa(config: MedusaConfig, sheet: Sheet) -> Mapping[str, Any]:
    if sheet.at_least(0, 33):
        raise NotTakenError(
            "vLLM 0.33 removed Medusa.", "vLLM 0.32 runs it as a chain: --engine-version 0.32."
        )
    sheet.explain("acceptance", "vLLM verifies exactly: fewer tokens are accepted.")
    for name in ("posterior_threshold", "posterior_alpha"):
        sheet.explain(name, "It only matters with typical acceptance.")
    sheet.explain("num_medusa_heads", "vLLM reads it from the checkpoint.")
    length = chain_or_warn(ChoiceTree(sheet.take("medusa_choices")), sheet, "vLLM runs Medusa")
    return {"method": "medusa", "model": sheet.model(), "num_speculative_tokens": length}


def _eagle(config: EagleConfig, sheet: Sheet) -> Files:
    values: dict[str, Any] = {"method": "eagle", "model": sheet.model()}
    if sheet.take("use_dynamic_tree"):
        return _files(
            values | {"num_speculative_tokens": chain_of_levels(sheet, "vLLM drafts")}, sheet
        )
    tree = ChoiceTree(sheet.take("eagle_choices"))
    sheet.note(SAMPLED)
    counts = counts_of(tree)
    if sheet.at_least(0, 21) or tree == ChoiceTree.chain(tree.depth):
        length = chain_or_warn(tree, sheet, "vLLM runs EAGLE")
    elif counts is None:
        length = chain_or_warn(tree, sheet, "vLLM runs EAGLE")
        sheet.note(
            "vLLM 0.20 takes trees in which every node of a depth has equally many children, e.g. "
            f"{tuples(parse_tree('[1, 2, 2]'))}; this one is not of that kind."
        )
    else:
        values |= {"num_speculative_tokens": len(tree), "speculative_token_tree": tuples(tree)}
        sheet.note("vLLM 0.21 removed token trees; stay on 0.20 or older for this one.")
        return _files(values, sheet, ("--attention-backend", "TREE_ATTN"))
    return _files(values | {"num_speculative_tokens": length}, sheet)


def _eagle3(config: Eagle3Config, sheet: Sheet) -> Mapping[str, Any]:
    sheet.explain("eagle3_layers_to_capture", "vLLM reads the layers from the checkpoint.")
    values = {"method": "eagle3", "model": sheet.model()}
    dynamic = sheet.take("use_dynamic_tree")
    length = chain_of_levels(sheet, "vLLM drafts") if dynamic else sheet.take("max_draft_len")
    return values | {"num_speculative_tokens": length}


def _mtp(config: MTPConfig, sheet: Sheet) -> Mapping[str, Any]:
    sheet.explain(
        "use_relaxed_acceptance_for_thinking", "vLLM verifies exactly: fewer tokens are accepted."
    )
    method = "mtp" if sheet.at_least(0, 11, 1) else "deepseek_mtp"
    return {"method": method, "num_speculative_tokens": sheet.take("max_draft_len")}


def _dflash(config: DFlashConfig, sheet: Sheet) -> Mapping[str, Any]:
    if not sheet.at_least(0, 20):
        raise NotTakenError("vLLM has DFlash from 0.20 on.", "EAGLE-3 as a chain.")
    length = sheet.take("max_draft_len")
    if length is None:
        raise NotTakenError(
            "vLLM needs num_speculative_tokens for DFlash, and max_draft_len is not set.",
            "Set max_draft_len, e.g. to the draft model's block size less one.",
        )
    for name in ("mask_token_id", "target_layer_ids"):
        sheet.explain(name, "vLLM reads it from the checkpoint.")
    return {"method": "dflash", "model": sheet.model(), "num_speculative_tokens": length}


NEAREST = "NGram or Suffix: they need no weights either."
ENGINE = Engine(
    name="vllm",
    title="vLLM",
    versions=(
        ("0.33", "the newest known here"),
        ("0.32", "the last with Medusa, as a chain"),
        ("0.20", "the last with token trees"),
        ("0.16", "the first V1 release with draft models"),
        ("0.11.1", "the first with suffix decoding"),
    ),
    trees="chains only; token trees until 0.20",
    writers={
        "Autoregressive": _plain,
        "Draft_Target": _config(_draft_target),
        "NGram": _config(_ngram),
        "Suffix": _config(_suffix),
        "Medusa": _config(_medusa),
        "Eagle": _eagle,
        "Eagle3": _config(_eagle3),
        "MTP": _config(_mtp),
        "DFlash": _config(_dflash),
    },
    refused={
        "Lookahead": ("vLLM has no lookahead decoding.", NEAREST),
        "ReDrafter": ("vLLM has no ReDrafter.", "A draft model, or EAGLE-3 heads for the target."),
        "Token_Recycling": ("vLLM has no token recycling.", NEAREST),
        "Combined": (
            "vLLM runs one drafting method at a time.",
            "Export the method that drafts most of the accepted tokens by itself.",
        ),
        "User_Provided": (
            "A drafter written for this playground does not run in vLLM.",
            'Write a proposer class for vLLM: {"method": "custom_class", "model": "module.Class"} '
            "(0.22 and newer).",
        ),
    },
    read=read_vllm,
)
